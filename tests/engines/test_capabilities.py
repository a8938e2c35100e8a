"""A run that needs what its engine lacks is refused by name, or takes another way (`engines/kind.py`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat

from oat.build.resolve import resolve
from oat.config.load import load_config
from oat.engines.embedded import Embedded
from oat.engines.kind import EngineKind, Traits
from oat.engines.torch_config import TorchEngineConfig

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
