"""A run that needs what its engine lacks is refused by name, or takes another way (`engines/kind.py`)."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, made, oat
from syntax import trees

from oat.assemble.engine import engine_notes
from oat.assemble.run import build
from oat.config.load import load_config
from oat.engines.embedded import Embedded
from oat.engines.kind import Capabilities, EngineKind, Traits
from oat.engines.torch_config import TorchEngineConfig
from oat.resolve.resolve import resolve
from oat.runtime.probe import Probing

APL = {"explorer": {"name": "apl"}}
ENSEMBLE = {
    "explorer": {
        "name": "ensemble",
        "samples": 4,
        "ensemble": {"members": 2},
        "features": {"backbone": "policy"},
    }
}


def lacking(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Give the engine `torch` other capabilities."""

    whole = Embedded.traits

    def traits(config: TorchEngineConfig) -> Traits:
        found = whole(config)
        return replace(found, capabilities=replace(found.capabilities, **changes))

    monkeypatch.setattr(Embedded, "traits", staticmethod(traits))


def test_the_embedded_engine_is_of_a_kind() -> None:
    kind: type[EngineKind] = Embedded
    assert kind.traits(TorchEngineConfig()).capabilities.recorded_is_old
    assert not kind.traits(TorchEngineConfig(dtype="bfloat16")).capabilities.recorded_is_old


REFUSED: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    ({"slots": frozenset({"sampler", "policy"})}, "dpo", {"algorithm": {"name": "xpo"}}, "no slot reference"),
    ({"stop_strings": False}, "dpo", {"sampling.stop": ["."]}, "remove sampling.stop"),
    ({"lora": False}, "dpo", {"model.lora": {"rank": 2}}, "remove model.lora"),
    ({"sampled_logps": False}, "grpo", {}, "grpo divides by the probability of sampling, which this engine"),
    ({"kept_sets": False}, "grpo", {"sampling.top_k": 5}, "leave out sampling.top_k, top_p and min_p"),
    ({"raw_logps": False}, "dpo", APL, "apl needs the log-probabilities of what was sampled"),
    ({"features": False}, "dpo", ENSEMBLE, "it keeps no hidden states; give explorer.features another"),
    ({"own_threads": False}, "dpo", {}, "the learner's too; set compute.runtime: processes, which gives it"),
]


@pytest.mark.parametrize(
    ("changes", "recipe", "settings", "said"), REFUSED, ids=[next(iter(r[0])) for r in REFUSED]
)
def test_a_run_that_needs_more_is_refused(
    changes: dict[str, Any],
    recipe: str,
    settings: dict[str, Any],
    said: str,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`oat check` accepts the run with the engine as it is, and refuses it with one that lacks one thing."""
    config = world.config(recipe, tmp_path, settings)
    assert oat("check", config) == 0
    lacking(monkeypatch, **changes)
    capsys.readouterr()
    assert oat("check", config) == 2
    error = capsys.readouterr().err
    assert "engine.name is 'torch': " in error
    assert said in error


def test_recorded_log_probabilities_are_computed_again_where_the_engine_computes_otherwise(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(world.config("grpo", tmp_path))
    assert resolve(*config).objective.recorded_is_old
    lacking(monkeypatch, recorded_is_old=False)
    assert not resolve(*config).objective.recorded_is_old


def test_people_are_told_of_draws_that_depend_on_earlier_ones(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "a run that is killed and continued samples other responses"
    for is_told in (False, True):
        config = world.config("dpo", tmp_path, {"stop.max_steps": 1, "run_dir": str(tmp_path / str(is_told))})
        assert oat("train", config) == 0
        assert (told in " ".join(capsys.readouterr().out.split())) == is_told
        lacking(monkeypatch, addressed_draws=False)


def test_an_engine_with_the_threads_of_its_process_samples_in_another_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, own_threads=False)
    assert oat("check", world.config("dpo", tmp_path, {"compute.runtime": "ray"})) == 0


def test_people_are_told_that_the_number_of_actors_counts(world: World, tmp_path: Path) -> None:
    def notes(actors: int, *, is_invariant: bool) -> str:
        changes = {
            "compute.runtime": "ray",
            "compute.actors": actors,
            "engine.deterministic": is_invariant,
        }
        return " ".join(engine_notes(resolve(*load_config(world.config("dpo", tmp_path, changes)))))

    assert "with another number of compute.actors than 2, a run has other last bits" in notes(
        2, is_invariant=False
    )
    assert notes(2, is_invariant=True) == notes(1, is_invariant=False) == ""


def test_weights_that_cannot_be_read_are_probed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proof(name: str) -> Any:
        resolved = resolve(*load_config(world.config("dpo", tmp_path)))
        run: Any = build(resolved, directory=made(tmp_path / name))
        run.ledger.close()
        return run.weights.proof

    assert proof("readable") == "all"
    lacking(monkeypatch, readable_weights=False)
    assert isinstance(proof("unreadable"), Probing)


def said(tree: ast.AST) -> Iterator[str]:
    """Yield the names of attributes that a file reads, and its strings without docstrings."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


def names_outside(*words: str) -> dict[str, set[str]]:
    """Return the names in each file outside the engines in which one of the words stands."""
    return {file: set(said(tree)) for file, tree in trees(*words, outside=("engines",))}


def test_every_capability_has_a_reader() -> None:
    capabilities = {field.name for field in fields(Capabilities)}
    found = names_outside(*capabilities).items()
    read = set().union(*(names for file, names in found if file.startswith(("resolve/", "assemble/"))))
    assert capabilities <= read


def test_no_file_outside_an_engine_reads_its_settings() -> None:
    """Precision and threads are traits, which a run may ask of every engine."""
    own = {field.name for field in fields(TorchEngineConfig)} - {"dtype", "threads"}
    named = re.compile(rf"engine\.({'|'.join(own)})")
    found = {
        file
        for file, names in names_outside(*own).items()
        for name in names
        if name in own or named.search(name)
    }
    assert found <= {"quickstart/__init__.py", "forecast/memory.py"}, (
        "the quickstart writes a configuration, and rows of `oat check` name settings"
    )
