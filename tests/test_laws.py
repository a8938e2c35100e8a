"""The laws of the house (docs/design.md): who may import whom, and how large a thing may be. Read from the source, nothing is run."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oat

ROOT = Path(oat.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
BOXES = ("algorithms", "engines", "explore", "oracles")
PROTOCOLS = {f"oat.{box}.base" for box in BOXES} | {"oat.oracles.router"}
"""Modules of a box that hold its protocol and simplest form; everybody may know them."""

MAX_LINES, MAX_FUNCTION_LINES = 500, 60
ONLY_IN = {
    "ray": "runtime/ray.py",
    "vllm": "engines/vllm.py",
    "peft": "lora.py",
    "bitsandbytes": "nf4.py",
    "rich": "progress.py",
    "tensorboard": "sinks/tensorboard.py",
    "wandb": "sinks/wandb.py",
    "mlflow": "sinks/mlflow.py",
    "deepspeed": "learner/sharding.py",
    "torch.distributed.fsdp": "learner/sharding.py",
    "torch.distributed._composable": "learner/sharding.py",
}


def name_of(file: Path) -> str:
    return ".".join(("oat", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def is_module(name: str) -> bool:
    place = ROOT.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(tree: ast.AST, *, at_import: bool) -> Iterator[ast.AST]:
    """Every node; `at_import` leaves out what does not run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_import and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_for_types_only(node)):
            continue
        yield node
        yield from walk(node, at_import=at_import)


def imports(file: Path, *, at_import: bool = False) -> set[str]:
    """The modules that a file imports, by full name: `from oat import wire` is oat.wire."""
    found = set()
    for node in walk(ast.parse(file.read_text(encoding="utf-8")), at_import=at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            found |= {full if is_module(full := f"{node.module}.{alias.name}") else node.module for alias in node.names}
    return found


def foreign(names: set[str], *allowed: str) -> set[str]:
    """The names that are neither allowed (nor within something allowed) nor of the standard library."""
    return {
        name
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names and not any(name == a or name.startswith(f"{a}.") for a in allowed)
    }


def in_box(box: str) -> list[Path]:
    return sorted((ROOT / box).rglob("*.py"))


def test_the_reader_of_imports_sees_them(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "import os.path, torch as t\nfrom oat import wire\nfrom oat.types import Plan\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray\n"
        "class A:\n    import numpy\n    def f(self):\n        from oat.loop import train\n"
    )
    always = {"os.path", "torch", "oat.wire", "oat.types", "typing", "numpy"}
    assert imports(file, at_import=True) == always
    assert imports(file) == always | {"ray", "oat.loop"}
    assert foreign(imports(file), "oat", "torch") == {"ray", "numpy"}
    assert len(FILES) > 40


@pytest.mark.parametrize(
    ("box", "allowed"),
    [
        ("functional", ("torch", "jaxtyping", "oat.errors", "oat.functional")),
        ("algorithms", ("torch", "numpy", "oat.errors", "oat.types", "oat.functional", "oat.algorithms")),
        ("explore", ("torch", "numpy", "oat.errors", "oat.types", "oat.functional", "oat.explore")),
    ],
)
def test_a_box_imports_only(box: str, allowed: tuple[str, ...]) -> None:
    assert {name_of(file): found for file in in_box(box) if (found := foreign(imports(file), *allowed))} == {}


@pytest.mark.parametrize("box", ["oracles", "engines", "explore"])
def test_boxes_do_not_know_each_other(box: str) -> None:
    others = tuple(f"oat.{other}" for other in ("oracles", "engines", "explore", "algorithms", "learner") if other != box)
    found = {name_of(file): {name for name in imports(file) if name.startswith(others)} for file in in_box(box)}
    assert {name: known for name, known in found.items() if known} == {}


@pytest.mark.parametrize("name", ["loop", "collector"])
def test_the_loop_knows_protocols_only(name: str) -> None:
    allowed = ("torch", "oat.boxes", "oat.interruption", "oat.metrics", "oat.seeds", "oat.silence", "oat.types", "oat.errors", *PROTOCOLS)
    assert foreign(imports(ROOT / f"{name}.py"), *allowed) == set()


def test_only_check_and_build_know_concrete_parts_of_several_boxes() -> None:
    """Outside its box a concrete algorithm, engine, explorer or oracle may be used. Whoever holds several against each other is check.py, and whoever
    puts them together build.py."""
    found = {}
    for file in FILES:
        own = f"oat.{file.relative_to(ROOT).parts[0]}."
        concrete = {n for n in imports(file) if n.startswith(tuple(f"oat.{box}." for box in BOXES)) and n not in PROTOCOLS and not n.startswith(own)}
        if concrete:
            found[name_of(file)] = {name.split(".")[1] for name in concrete}
    assert found["oat.build"] | found["oat.check"] == set(BOXES)
    assert {name for name, boxes in found.items() if len(boxes) > 1} == {"oat.build", "oat.check"}


def test_only_those_who_make_runs_import_build() -> None:
    knowing = {name_of(file) for file in FILES if "oat.build" in imports(file)}
    assert {name for name in knowing if not name.startswith("oat.quickstart")} == {
        *("oat.against", "oat.cli", "oat.memory", "oat.once", "oat.rundir", "oat.speaker", "oat.trainer")
    }


@pytest.mark.parametrize(("library", "place"), ONLY_IN.items())
def test_heavy_libraries_are_imported_in_one_place_each_and_inside_functions(library: str, place: str) -> None:
    def users(*, at_import: bool) -> set[Path]:
        return {file for file in FILES if any(f"{name}.".startswith(f"{library}.") for name in imports(file, at_import=at_import))}

    assert users(at_import=True) == set()
    assert users(at_import=False) <= {ROOT / place}


@pytest.mark.parametrize("name", ["oat", "oat.types", "oat.errors", "oat.config", "oat.cli", "oat.wire", "oat.seeds", "oat.metrics"])
def test_light_modules_reach_neither_torch_nor_transformers(name: str) -> None:
    """Through no chain of imports that run when they are imported; tests/test_cli.py asks Python itself."""
    by_name = {name_of(file): file for file in FILES}
    reached, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        if current in by_name:
            parents = [current.rpartition(".")[0]] if "." in current else []
            waiting += [*imports(by_name[current], at_import=True), *parents]
    assert {module for module in reached if module.split(".")[0] in ("torch", "transformers", "safetensors", "tokenizers")} == set()


def test_nothing_is_too_long_to_read() -> None:
    long = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if (size := len(text.splitlines())) > MAX_LINES:
            long.append(f"{name_of(file)}: {size} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (size := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                    long.append(f"{name_of(file)}.{node.name}: {size} lines")
    assert long == []
