"""Settings of the explorer `ensemble` that `oat check` refuses before anything is sampled."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from explorer_rounds import facts, labels
from fixtures import World, oat

from oat.assemble import late_checks
from oat.config.load import load_config
from oat.errors import ConfigError, OatWarning
from oat.explore.ensemble import EnsembleExplorer
from oat.explore.settings import EnsembleExplorerConfig, ModelLabelsConfig
from oat.resolve.resolve import resolve
from oat.types.part import Check


def check(folder: Path, algorithm: str, **explorer: Any) -> None:
    whole = {
        "model": {"path": "org/name"},
        "prompts": {"path": "prompts.jsonl"},
        "oracle": {"name": "reward.py:reward"},
        "algorithm": {"name": algorithm},
        "explorer": {"name": "ensemble", **explorer},
        "stop": {"max_steps": 10},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    resolve(*load_config(folder / "config.yaml"))


SOFT = {"model_labels": {"labels": "soft"}}


@pytest.mark.parametrize("algorithm", ["dpo", "simpo", "exo", "nca"])
def test_losses_that_weigh_both_winners_take_soft_labels(tmp_path: Path, algorithm: str) -> None:
    check(tmp_path, algorithm, **SOFT)


@pytest.mark.parametrize("algorithm", ["aot", "reward_model"])
def test_losses_that_take_one_winner_refuse_soft_labels(tmp_path: Path, algorithm: str) -> None:
    with pytest.raises(ConfigError, match="takes one winner of a pair; give hard or sampled"):
        check(tmp_path, algorithm, **SOFT)


@pytest.mark.parametrize("tries", [0, -1, 1.5])
def test_a_number_of_tries_is_a_whole_number_above_zero(tmp_path: Path, tries: float) -> None:
    with pytest.raises(ConfigError, match=r"tries of the rule eets is .* give a whole number above 0"):
        check(tmp_path, "dpo", rule={"name": "eets", "tries": tries})


def test_one_try_is_enough(tmp_path: Path) -> None:
    check(tmp_path, "dpo", rule={"name": "eets", "tries": 1})


# what only the prompts, the prices or a new run show

KNOWN = {"steps": 10, "questions": 4, "most_questions": 4, "question_price": 2}


def wrong(given: ModelLabelsConfig, **run: Any) -> list[tuple[str, str]]:
    """Return the fields of the checks that are wrong, each with what it refuses."""
    found = EnsembleExplorer.checks(EnsembleExplorerConfig(model_labels=given), facts(**run))
    return [(check.field.rpartition(".")[2], check.refuses) for check in found if check.is_wrong]


@pytest.mark.parametrize(
    ("given", "run", "expected"),
    [
        (labels(burn_in=10), {}, [("burn_in", "always")]),
        (labels(burn_in=9), {}, []),
        (labels(burn_in=9), {"max_steps": 9}, []),
        (labels(burn_in_pairs=36), {}, []),
        (labels(burn_in_pairs=37), {}, [("burn_in_pairs", "always")]),
        (labels(burn_in_pairs=37), {"most_questions": 8}, []),
        (labels(burn_in_pairs=37), {"most_questions": None}, []),
        (labels(burn_in_pairs=999), {"steps": None}, []),
        (labels(burn_in=5), {"max_queries": 40}, [("burn_in", "never")]),
        (labels(burn_in=5), {"max_queries": 41}, []),
        (labels(burn_in=5), {"max_queries": 20, "question_price": 1}, [("burn_in", "never")]),
        (labels(burn_in=5), {"max_queries": 1, "question_price": None}, []),
        (labels(burn_in=5), {"max_queries": 1, "question_price": 0}, []),
        (labels(burn_in_pairs=20), {"max_queries": 20}, [("burn_in_pairs", "always")]),
        (labels(burn_in_pairs=20), {"max_queries": 21}, [("burn_in_pairs", "never")]),
        (labels(burn_in_pairs=20), {"max_queries": 40}, [("burn_in_pairs", "never")]),
        (labels(burn_in_pairs=20), {"max_queries": 41}, []),
        (
            labels(burn_in=5, burn_in_pairs=20),
            {"max_queries": 30},
            [("burn_in", "never"), ("burn_in_pairs", "never")],
        ),
    ],
)
def test_a_burn_in_that_certainly_outlasts_the_run_is_refused_and_a_likely_one_warned_of(
    given: ModelLabelsConfig, run: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    """A pair counts if it cost at least one query, and may cost two. Labels need a step after the burn-in."""
    assert wrong(given, **{**KNOWN, **run}) == expected


def config_of(world: World, folder: Path, changes: dict[str, Any], **explorer: Any) -> Path:
    """Write a configuration of 30 prompts, four in a step. A pair costs two queries."""
    small = {"samples": 4, "ensemble": {"members": 4, "hidden": 8}}
    whole = {"explorer": {"name": "ensemble", **small, **explorer}, "evaluation": None, "stop": {}}
    return world.config("dpo", folder, whole | changes)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "prompts": (
        {"prompts.epochs": 1},
        {"model_labels": {"burn_in": 8}},
        ("explorer.model_labels.burn_in is 8: the run has at most 8 steps (stop.max_steps, prompts.epochs)",),
    ),
    "pairs of steps": (
        {"prompts.epochs": 1},
        {"model_labels": {"burn_in_pairs": 29}},
        (
            "explorer.model_labels.burn_in_pairs is 29: before the last of at most 8 steps, at most 28 pairs "
            "are asked",
        ),
    ),
    "tries": (
        {"stop.max_steps": 4},
        {"rule": {"name": "eets", "tries": 5}},
        ("explorer.rule is ", "tries is 5, and the ensemble has 4 members (explorer.ensemble.members)"),
    ),
}


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_new_run_is_refused_before_it_asks(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, command: str
) -> None:
    changes, explorer, said = REFUSED[what]
    forbidden = {"oracle.name": f"{world.folder / 'reward.py'}:forbidden"}
    config = config_of(world, tmp_path, changes | forbidden, **explorer)
    assert oat(command, config) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in (f"{config}:", *said)), error
    assert not (tmp_path / "dpo").exists()


@pytest.mark.sample("changes0-*", "changes2-*", "changes4-*", seconds=0.6)
@pytest.mark.parametrize(
    ("changes", "explorer"),
    [
        ({"prompts.epochs": 1}, {"model_labels": {"burn_in": 7}}),
        ({"prompts.epochs": 1}, {"model_labels": {"burn_in_pairs": 28}}),
        ({"stop.max_steps": 4}, {"rule": {"name": "eets", "tries": 4}}),
        ({"stop.max_queries": 41}, {"model_labels": {"burn_in": 5}}),
        ({"stop.max_queries": 51}, {"model_labels": {"burn_in": 0, "burn_in_pairs": 25}}),
        ({"prompts.epochs": 1, "sampling.refill_rounds": 1}, {"model_labels": {"burn_in_pairs": 29}}),
        ({"prompts.epochs": 1, "oracle.max_outstanding": 4}, {"model_labels": {"burn_in_pairs": 29}}),
    ],
)
def test_what_may_work_is_sound(
    world: World, tmp_path: Path, changes: dict[str, Any], explorer: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", OatWarning)
        assert oat("check", config_of(world, tmp_path, changes, **explorer)) == 0


@pytest.mark.sample("30-*", seconds=0.5)
@pytest.mark.parametrize(
    ("queries", "burn_in", "said"),
    [
        (30, {"burn_in": 5}, r"burn_in is 5: this is 20 pairs at a price of at most 2, and stop\.max"),
        (40, {"burn_in": 0, "burn_in_pairs": 25}, "burn_in_pairs is 25: this is 25 pairs at a price of"),
    ],
)
def test_a_budget_that_the_burn_in_probably_spends_gives_a_warning(
    world: World, tmp_path: Path, queries: int, burn_in: dict[str, Any], said: str
) -> None:
    """`oat check` prices a pair as the run does. The run itself shows that the warning is right."""
    config = config_of(world, tmp_path, {"stop.max_queries": queries}, model_labels={"share": 1, **burn_in})
    with pytest.warns(OatWarning, match=said):
        assert oat("check", config) == 0
    with pytest.warns(OatWarning, match="the run probably ends before the ensemble labels anything"):
        assert oat("train", config) == 0
    assert "explorer/model_frac" not in (tmp_path / "dpo" / "metrics.jsonl").read_text()


@pytest.mark.sample("forked", seconds=0.6)
@pytest.mark.parametrize("source", [False, True], ids=["continued", "forked"])
def test_a_run_that_began_before_the_check_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: bool
) -> None:
    config = config_of(world, tmp_path, {"stop.max_steps": 2}, rule={"name": "eets", "tries": 50})

    def none(*given: Any) -> list[Check]:
        return []

    with monkeypatch.context() as before:
        before.setattr(late_checks, "part_checks", none)
        assert oat("train", config) == 0
    own = ("--run_dir", tmp_path / "fork", "--from", tmp_path / "dpo") if source else ()
    for command in ("check", "train"):
        with pytest.warns(OatWarning, match="tries is 50, and the ensemble has 4 members"):
            assert oat(command, config, *own, "--stop.max_steps", 3) == 0
