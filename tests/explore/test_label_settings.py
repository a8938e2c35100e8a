"""Settings of the ensemble's own labels with which nothing is labelled, nothing ends, or noise is learned."""

from pathlib import Path
from typing import Any

import pytest
from explorer_rounds import facts, labels
from fixtures import World, oat

from oat.errors import ConfigError, OatWarning
from oat.explore.ensemble import EnsembleExplorer
from oat.explore.find_rule import find_rule
from oat.explore.settings import EnsembleExplorerConfig, FeaturesConfig


def wrong(config: EnsembleExplorerConfig, **run: Any) -> list[tuple[str, str]]:
    """Return the fields of the checks that are wrong, each with what it refuses."""
    found = EnsembleExplorer.checks(config, facts(**run))
    return [(check.field, check.refuses) for check in found if check.is_wrong]


@pytest.mark.parametrize(
    ("share", "questions", "is_refused"),
    [(0.3, 3, True), (0.3, 4, False), (0.25, 4, False), (0.0, 4, False), (0.1, None, False)],
)
def test_a_share_that_labels_no_prompt_of_a_step_is_refused(
    share: float, questions: int | None, is_refused: bool
) -> None:
    """A share of 0 is meant, and a number of questions may be unknown yet."""
    config = EnsembleExplorerConfig(model_labels=labels(share=share, burn_in=1))
    found = wrong(config, questions=questions)
    assert found == ([("explorer.model_labels.share", "new")] if is_refused else [])


PURE: dict[str, Any] = {"share": 1.0, "burn_in": 1, "pure": True}


@pytest.mark.parametrize(
    ("given", "run", "is_warned"),
    [
        (PURE, {"max_queries": 100}, True),
        (PURE, {"max_queries": 100, "steps": 50}, False),
        (PURE, {"max_queries": 100, "max_steps": 50}, False),
        ({**PURE, "audit": 0.1}, {"max_queries": 100}, False),
        ({**PURE, "pure": False}, {"max_queries": 100}, False),
    ],
)
def test_a_pure_run_that_only_queries_limit_never_ends(
    given: dict[str, Any], run: dict[str, Any], is_warned: bool
) -> None:
    found = wrong(EnsembleExplorerConfig(model_labels=labels(**given)), questions=8, **run)
    assert found == ([("explorer.model_labels.pure", "never")] if is_warned else [])


def test_a_backbone_of_its_own_reads_no_episodes() -> None:
    config = EnsembleExplorerConfig(features=FeaturesConfig("org/name"))
    assert wrong(config) == []
    assert wrong(config, has_environment=True) == [("explorer.features.backbone", "new")]
    reference = EnsembleExplorerConfig(features=FeaturesConfig("reference"))
    assert wrong(reference, has_environment=True) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tries": True}, "tries of the rule eets is True; give a value that is neither true nor false"),
        ({"second_best": 3}, "second_best of the rule eets is 3; give true or false"),
    ],
)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_rule("eets", options)


def test_an_option_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """NaN differs from itself, so a run with it could not be continued."""
    (tmp_path / "mine.py").write_text("def mine(rewards, valid, generator, *, share=0.5): ...\n")
    for value in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"share of the rule .* give a finite number"):
            find_rule(f"{tmp_path / 'mine.py'}:mine", {"share": value})


def test_a_rule_that_takes_too_few_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(
        "def few(rewards, valid, *, share=0.5): ...\ndef many(*arguments): ...\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"few takes rewards, valid; it is called with"):
        find_rule(f"{tmp_path / 'few.py'}:few", {})
    find_rule(f"{tmp_path / 'few.py'}:many", {})


def config_of(world: World, folder: Path, oracle: str) -> Path:
    explorer = {
        "name": "ensemble",
        "samples": 4,
        "ensemble": {"members": 2, "hidden": 4},
        "model_labels": {"share": 0.5, "burn_in": 1},
    }
    return world.config("dpo", folder, {"explorer": explorer, "evaluation": None, "oracle.name": oracle})


def test_labels_of_an_ensemble_that_has_learned_nothing_are_warned_of(world: World, tmp_path: Path) -> None:
    """An oracle that finds all responses equal teaches the ensemble nothing."""
    (tmp_path / "equal.py").write_text(
        "def equal(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n", encoding="utf-8"
    )
    with pytest.warns(OatWarning, match="no pair with a winner has taught it anything yet"):
        assert oat("train", config_of(world, tmp_path, f"{tmp_path / 'equal.py'}:equal")) == 0


@pytest.mark.filterwarnings("error:.*taught it anything")
def test_an_ensemble_that_has_learned_may_label(world: World, tmp_path: Path) -> None:
    assert oat("train", config_of(world, tmp_path, world.oracle)) == 0
