"""The rules of the code (docs/architecture.md): which module may import which, and limits of size. The tests
read the source and run nothing."""

import ast
import fnmatch
import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import affected
import pytest

import oat
from oat.plugins.registry import ALGORITHMS, ENGINES, EXPLORERS, ORACLES

ROOT = Path(oat.__file__).parent
LIGHT = (ALGORITHMS, ENGINES, EXPLORERS, ORACLES)
"""Parts whose modules need no torch to be imported."""
FILES = sorted(ROOT.rglob("*.py"))
TESTS = Path(__file__).parent
OTHER_TESTS = ("begun", "faults", "golden", "learning", "pages", "protocol")
BOXES = ("algorithms", "engines", "explore", "oracles")
PROTOCOLS = {*(f"oat.{box}.base" for box in BOXES), "oat.engines.kind", "oat.explore.settings"}
"""Modules of a box that hold its protocol and simplest form, and settings that several boxes read. Every
module may import them."""

MAY_IMPORT = {
    "__init__": "config rundir trainer",
    "__main__": "cli",
    "algorithms": "errors explore functional lazy plugins types",
    "answering": (
        "algorithms assemble config engines errors evaluation explore files hardware learner "
        "loop models resolve rollout rundir seeds text types"
    ),
    "assemble": (
        "algorithms collector config control data engines environments errors evaluation "
        "explore files hardware learner ledger loop models oracles plugins protocols resolve "
        "processes rollout rundir runtime seeds text tracking types wire"
    ),
    "blobs": "errors types wire",
    "cli": "config control errors files plugins",
    "collector": "errors explore protocols seeds types",
    "commands": (
        "answering assemble control data errors evaluation explore files forecast hardware "
        "laboratory learner ledger loop metrics models opening oracles plugins reports resolve "
        "rollout rundir runtime text types"
    ),
    "config": "errors files plugins",
    "control": "config errors plugins types",
    "data": "errors files plugins seeds text types",
    "engines": "config errors functional hardware models seeds types",
    "environments": "errors plugins text types",
    "evaluation": "algorithms errors explore files protocols rollout seeds types",
    "explore": "errors lazy plugins types",
    "files": "errors",
    "forecast": (
        "algorithms assemble collector config control data engines errors evaluation explore "
        "files hardware learner loop models oracles resolve rollout rundir runtime seeds text "
        "tracking types"
    ),
    "functional": "errors",
    "hardware": "functional models types",
    "laboratory": "errors explore files models plugins seeds",
    "learner": "algorithms config errors functional hardware models seeds types wire",
    "ledger": "blobs control errors files oracles seeds types wire",
    "loop": "algorithms control errors metrics protocols seeds types",
    "metrics": "errors",
    "models": "config errors files functional lazy text types",
    "opening": (
        "assemble config control data errors files forecast learner ledger loop models resolve "
        "rundir runtime text tracking"
    ),
    "oracles": "config errors files hardware lazy models plugins types wire",
    "plugins": "errors files processes",
    "processes": "errors files wire",
    "protocols": "algorithms types",
    "quickstart": "commands errors files models oracles reports rundir seeds text types",
    "reports": "algorithms config control errors files ledger loop metrics resolve rundir tracking types",
    "resolve": (
        "algorithms config control data engines environments errors evaluation explore files "
        "lazy learner metrics models oracles plugins rundir text tracking types"
    ),
    "rollout": "data engines environments errors models seeds text types",
    "rundir": "config errors files ledger types",
    "runtime": "algorithms blobs engines errors files oracles plugins processes protocols types wire",
    "testing": (
        "__init__ algorithms cli data environments errors explore learner metrics models "
        "oracles plugins rundir seeds types wire"
    ),
    "text": "errors files types",
    "tracking": "config errors files plugins processes rundir types",
    "trainer": "commands config control errors files loop opening plugins reports resolve rundir",
    "wire": "errors types",
}
"""For each package and each module of the root, the others that it may import."""

MAX_ROOT = 13
SKIPPED = ("build", "_build", "dist", "lib", "env", "venv", "target", "parts", "wheels", "site-packages")
"""Names of folders that ruff, setuptools or the usual ignore files leave out."""
MAX_LINES = 700
MAX_FUNCTION_LINES = 80
"""Alarms, no aims: a file is parted for its reader."""
ONLY_IN = {
    "ray": "processes/ray_broker.py",
    "vllm": "engines/vllm.py",
    "peft": "models/lora.py",
    "bitsandbytes": "models/nf4.py",
    "rich": "reports/progress.py",
    "tensorboard": "tracking/tensorboard.py",
    "wandb": "tracking/wandb.py",
    "mlflow": "tracking/mlflow.py",
    "deepspeed": "learner/sharding.py",
    "torch.distributed.fsdp": "learner/sharding.py",
    "torch.distributed._composable": "learner/sharding.py",
}
STARTERS = (
    "subprocess",
    "multiprocessing",
    "concurrent.futures.process",
    "concurrent.futures.ProcessPoolExecutor",
    "torch.multiprocessing",
    "torch.utils.data",
    "joblib",
    "pty",
    "ray",
)
STARTING = (
    "os.fork",
    "os.exec",
    "os.system",
    "os.popen",
    "os.spawn",
    "os.posix_spawn",
    "asyncio.create_subprocess",
)
"""Modules and names that start processes, and how the names of the functions begin that do."""
REVIEWED = {
    "rundir/provenance.py": "git, which ends at once",
    "reports/terminal.py": "the user's pager, which has the terminal",
    "oracles/remote/server.py": "the server of Mosec, which starts workers itself",
    "quickstart/processes.py": "commands of `oat`, as a user starts them",
    "cli/restart.py": "no further process: the command itself, begun anew",
}
"""Files outside `processes/` that start processes, and which."""


def name_of(file: Path) -> str:
    return ".".join(("oat", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@functools.cache
def is_module(name: str) -> bool:
    place = ROOT.parent.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(tree: ast.AST, *, at_import: bool) -> Iterator[ast.AST]:
    """Yield every node but expressions. With `at_import`, also leave out code that does not run when the
    module is imported."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types_only(node)
            if not (isinstance(node, ast.expr) or (at_import and is_later)):
                yield node
                waiting.append(node)


class Source(NamedTuple):
    """What the tests look at in a file.

    Attributes:
        imports: the modules that it imports, by full name: `from oat import wire` is oat.wire.
        at_import: those of them that it imports when it is imported itself.
        lines: its number of lines.
        functions: names of its functions, and their numbers of lines.
    """

    imports: set[str]
    at_import: set[str]
    lines: int
    functions: list[tuple[str, int]]


@functools.cache
def source_of(file: Path) -> Source:
    """Parse a file. Its tree is not kept: every later garbage collection would walk through the trees of all
    files."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(walk(tree, at_import=False))
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    at_import = imported(walk(tree, at_import=True), file)
    return Source(imported(nodes, file), at_import, len(text.splitlines()), functions)


def imported(nodes: Iterable[ast.AST], file: Path) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            found |= {
                full if is_module(full := f"{node.module}.{alias.name}") else node.module
                for alias in node.names
            }
    return found


def imports(file: Path) -> set[str]:
    return source_of(file).imports


def foreign(names: set[str], *allowed: str) -> set[str]:
    """Return the names that are neither in the standard library nor in an allowed package."""
    return {
        name
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == a or name.startswith(f"{a}.") for a in allowed)
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
    assert source_of(file).at_import == always
    assert imports(file) == always | {"ray", "oat.loop"}
    assert foreign(imports(file), "oat", "torch") == {"ray", "numpy"}
    assert len(FILES) > 40


@pytest.mark.parametrize(
    ("box", "allowed"),
    [
        ("functional", ("torch", "jaxtyping", "oat.errors", "oat.functional")),
        (
            "algorithms",
            (
                "torch",
                "numpy",
                "oat.errors",
                "oat.types",
                "oat.functional",
                "oat.algorithms",
                "oat.plugins",
                "oat.lazy",
                "oat.explore.settings",
                "oat.explore.pair_buffer",
            ),
        ),
        (
            "explore",
            (
                "torch",
                "numpy",
                "oat.errors",
                "oat.lazy",
                "oat.types",
                "oat.functional",
                "oat.explore",
                "oat.plugins",
            ),
        ),
    ],
)
def test_a_box_imports_only(box: str, allowed: tuple[str, ...]) -> None:
    assert {name_of(file): found for file in in_box(box) if (found := foreign(imports(file), *allowed))} == {}


def test_functional_knows_no_process() -> None:
    """No function of `functional/` depends on the process, or changes it: none imports these modules."""
    assert [file.name for file in in_box("functional") if imports(file) & {"os", "sys", "warnings"}] == []


def unit_of(name: str) -> str:
    """Return the package of a module, or the module itself if it is in the root."""
    return name.split(".")[1] if "." in name else "__init__"


def arrows() -> dict[str, dict[str, set[str]]]:
    """Return the units that each unit imports, and the modules that import them."""
    found: dict[str, dict[str, set[str]]] = {}
    for file in FILES:
        own = unit_of(name_of(file))
        for other in {unit_of(name) for name in imports(file) if name.split(".")[0] == "oat"} - {own}:
            found.setdefault(own, {}).setdefault(other, set()).add(name_of(file))
    return found


def circle(table: Mapping[str, Collection[str]]) -> list[str]:
    """Return a path of imports that leads back to its beginning; empty if there is none."""
    done: set[str] = set()

    def walk_from(unit: str, way: list[str]) -> list[str]:
        if unit in way:
            return [*way[way.index(unit) :], unit]
        if unit not in done:
            for other in sorted(table.get(unit, ())):
                if found := walk_from(other, [*way, unit]):
                    return found
            done.add(unit)
        return []

    return next((found for unit in sorted(table) if (found := walk_from(unit, []))), [])


def test_packages_import_what_the_table_allows_and_nothing_stands_there_unused() -> None:
    found = arrows()
    allowed = {unit: set(others.split()) for unit, others in MAY_IMPORT.items()}
    forbidden = {
        f"{unit} -> {other}": sorted(modules)
        for unit, others in found.items()
        for other, modules in others.items()
        if other not in allowed.get(unit, set())
    }
    assert forbidden == {}
    assert {
        f"{unit} -> {other}"
        for unit, others in allowed.items()
        for other in others - found.get(unit, {}).keys()
    } == set()


def test_the_table_has_no_circle() -> None:
    assert circle({unit: others.split() for unit, others in MAY_IMPORT.items()}) == []
    assert circle({"a": ["b"], "b": ["c"], "c": ["d", "b"]}) == ["b", "c", "b"]


def test_no_files_import_each_other_in_a_circle() -> None:
    """No files import each other in a circle; imports within functions count too. An `__init__.py` may
    re-export names of its own package."""
    files = {name_of(file): file for file in FILES if file.name != "__init__.py"}
    assert circle({name: imports(file) & files.keys() - {name} for name, file in files.items()}) == []


def test_rooms_are_few_and_say_what_they_are() -> None:
    assert len(list(ROOT.glob("*.py"))) <= MAX_ROOT
    silent = [
        str(file.relative_to(ROOT))
        for file in FILES
        if file.name == "__init__.py" and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert silent == []


def test_the_map_of_packages_is_what_they_say() -> None:
    """Each description in docs/architecture.md consists of the first sentences of the package's docstring."""
    page = (ROOT.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = {
        line.split("`")[1].rstrip("/"): line.split(" | ")[1].removesuffix(" |")
        for line in page.splitlines()
        if line.startswith("| `") and "/` |" in line
    }
    packages = {
        file.parent.name: " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
        for file in ROOT.glob("*/__init__.py")
    }
    assert told.keys() == packages.keys()
    assert [name for name, sentence in told.items() if not packages[name].startswith(sentence)] == []


@pytest.mark.parametrize("name", ["loop", "collector"])
def test_the_loop_knows_protocols_only(name: str) -> None:
    allowed = (
        "torch",
        "oat.protocols",
        "oat.control.interruption",
        "oat.metrics",
        "oat.seeds",
        "oat.control.silence",
        "oat.types",
        "oat.errors",
        *PROTOCOLS,
    )
    assert foreign(imports(ROOT / f"{name}.py"), *allowed) == set()


def test_no_file_knows_concrete_parts_of_several_boxes() -> None:
    """A file may use a concrete algorithm, engine, explorer or oracle. Those of other boxes it knows by their
    protocols, and by their simplest forms, which stand beside them."""
    found = {}
    for file in FILES:
        own = f"oat.{file.relative_to(ROOT).parts[0]}."
        concrete = {
            n
            for n in imports(file)
            if n.startswith(tuple(f"oat.{box}." for box in BOXES))
            and n not in PROTOCOLS
            and not n.startswith(own)
        }
        if concrete:
            found[name_of(file)] = {name.split(".")[1] for name in concrete}
    assert {name: boxes for name, boxes in found.items() if len(boxes) > 1} == {}


def test_only_those_who_make_runs_import_assemble_run() -> None:
    knowing = {name_of(file) for file in FILES if "oat.assemble.run" in imports(file)}
    assert knowing == {
        "oat.answering.compare",
        "oat.opening.open_run",
        "oat.commands.eval",
        "oat.commands.features",
        "oat.forecast.step_time",
    }


@pytest.mark.parametrize(("library", "place"), ONLY_IN.items())
def test_heavy_libraries_are_imported_in_one_place_each_and_inside_functions(
    library: str, place: str
) -> None:
    def uses(names: set[str]) -> bool:
        return any(f"{name}.".startswith(f"{library}.") for name in names)

    assert {file for file in FILES if uses(source_of(file).at_import)} == set()
    assert {file for file in FILES if uses(source_of(file).imports)} <= {ROOT / place}


def starts_processes(text: str) -> bool:
    """Return True if a module's text names something that starts processes, under whatever name."""
    tree = ast.parse(text)
    names = {"os": "os", "asyncio": "asyncio"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            found.append(f"{names.get(owner, owner)}.{node.attr}")
    return any(name.startswith(STARTING) for name in found) or any(
        f"{name}.".startswith(f"{starter}.") for name in found for starter in STARTERS
    )


@pytest.mark.parametrize(
    "text",
    [
        "from os import fork",
        "import os as o; o.fork()",
        "import os; f = os.fork",
        "import os; os.posix_spawnp('a', [], {})",
        "import subprocess as s",
        "from multiprocessing.pool import Pool",
        "import multiprocessing.context",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures as c; c.ProcessPoolExecutor()",
        "import concurrent.futures; concurrent.futures.ProcessPoolExecutor()",
        "import asyncio; asyncio.create_subprocess_exec('a')",
        "from torch import multiprocessing",
        "import torch; torch.multiprocessing.spawn(f)",
        "from torch.utils.data import DataLoader",
    ],
)
def test_whatever_starts_a_process_is_seen(text: str) -> None:
    assert starts_processes(text)
    assert not starts_processes("from concurrent.futures import ThreadPoolExecutor\nserver.fork()\nos.path")


def test_processes_are_started_in_one_package() -> None:
    found = {
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if starts_processes(file.read_text(encoding="utf-8"))
    }
    assert {file for file in found if not file.startswith("processes/")} == {*REVIEWED}


@pytest.mark.parametrize(
    "name",
    [
        "oat",
        "oat.types",
        "oat.errors",
        "oat.config.load",
        "oat.resolve.targets",
        "oat.cli",
        "oat.wire",
        "oat.seeds",
        "oat.metrics",
        "oat.resolve.resolve",
        "oat.resolve.missing",
        *sorted({registry.symbol(name).partition(":")[0] for registry in LIGHT for name in registry}),
    ],
)
def test_light_modules_reach_neither_torch_nor_transformers(name: str) -> None:
    """No chain of imports at import time leads from a light module to torch or transformers: settings are
    refused without them, those of parts too. tests/cli/test_cli.py asks Python itself."""
    by_name = {name_of(file): file for file in FILES}
    reached, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        if current in by_name:
            parents = [current.rpartition(".")[0]] if "." in current else []
            waiting += [*source_of(by_name[current]).at_import, *parents]
    assert {
        module for module in reached if module.split(".")[0] in ("torch", "transformers", "safetensors")
    } == set()


def test_tests_mirror_the_packages() -> None:
    """The tests of a package are in the folder of its name, and shared helpers in `support`. Other folders
    have tests of whole runs and of pages."""
    folders = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py") if file.parent != TESTS}
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert folders - packages == set(OTHER_TESTS)
    assert not list((TESTS / "support").rglob("test_*.py"))


def test_tools_look_into_every_folder(pytestconfig: pytest.Config) -> None:
    """No folder of code or of tests has a name that pytest or ruff skips by default."""
    skipped = [*pytestconfig.getini("norecursedirs"), *SKIPPED]
    passed_over = {
        folder
        for root in (ROOT, TESTS)
        for file in root.rglob("*.py")
        for folder in file.relative_to(root).parts[:-1]
        if any(fnmatch.fnmatch(folder, pattern) for pattern in skipped)
    }
    assert passed_over == set()


def test_no_test_imports_another() -> None:
    found = {
        file.name: others
        for file in TESTS.rglob("*.py")
        if (others := {name for name in affected.imported(file.read_text()) if name.startswith("test_")})
    }
    assert found == {}
    assert affected.imported("import a, test_b as b\nfrom test_c import (\n    d,\n)\n") == {
        "a",
        "test_b",
        "test_c",
        "test_c.d",
    }


def too_long(files: Iterable[Path]) -> list[str]:
    found = []
    for file in files:
        source = source_of(file)
        if source.lines > MAX_LINES:
            found.append(f"{file.name}: {source.lines} lines")
        found += [
            f"{file.name}: {name}: {lines} lines"
            for name, lines in source.functions
            if lines > MAX_FUNCTION_LINES
        ]
    return found


def test_nothing_is_too_long_to_read() -> None:
    assert too_long(FILES) == []


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports test modules by their names alone, and cannot collect two of one name."""
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_what_is_beside_the_package_is_not_too_long_either(folder: str) -> None:
    assert too_long(sorted((TESTS.parent / folder).rglob("*.py"))) == []
