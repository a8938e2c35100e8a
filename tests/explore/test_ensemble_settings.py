"""The metrics of the explorer `ensemble`, and the settings that it refuses."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explorer_rounds import (
    TEXTS,
    addresses,
    explorer,
    facts,
    labels,
    round_of,
)
from fixtures import World, make_group, oat

from oat.errors import ConfigError
from oat.explore.ensemble import READS_DISAGREEMENT, EnsembleExplorer
from oat.explore.metrics import pair_metrics
from oat.explore.rules import RULES
from oat.explore.settings import (
    EnsembleConfig,
    EnsembleExplorerConfig,
    FeaturesConfig,
    ModelLabelsConfig,
)
from oat.types import ENSEMBLE, UNASKED, Answer, Feedback, Item, Key, Mark, Question


def item(
    number: int,
    notes: Mapping[str, float],
    *,
    oracle: str = "judge",
    label: int | None = 0,
    p: float = 1.0,
    mark: Mark = "ok",
) -> Item:
    group = make_group(number, "a", "b")
    question = Question.about(group, Key("train", 0, 0, number), "compare", (0, 1), oracle)
    answer = Answer(question.key, (p,), (mark,), 2)
    return Item(group, replace(question, notes=dict(notes)), answer, label)


def noted(
    belief: float, first: float, second: float, variances: tuple[float, float], std: float, clash: float = 0.0
) -> dict[str, float]:
    return {
        "belief": belief,
        "reward_first": first,
        "reward_second": second,
        "pair_variance": variances[0],
        "prompt_variance": variances[1],
        "gap": first / 10,
        "second_std": std,
        "clash": clash,
    }


MODEL = {"model": 1.0}
ITEMS = (
    item(0, noted(0.9, 3.0, 1.0, (1.0, 2.0), 0.5)),
    item(1, noted(0.9, 3.0, 1.0, (2.0, 2.0), 0.1), label=1, p=0.2),
    item(2, noted(0.4, 1.0, 1.5, (3.0, 1.0), 0.3), label=1, p=0.1),
    item(3, noted(0.5, 1.0, 1.0, (0.0, 5.0), 0.7, clash=1.0), oracle=UNASKED, label=None, p=0.5, mark="tie"),
    item(4, noted(0.6, 2.0, 1.0, (4.0, 1.0), 0.9) | MODEL, oracle=ENSEMBLE),
    item(5, noted(0.8, 4.0, 2.0, (6.0, 3.0), 0.2) | MODEL, label=1, p=0.25),
    item(6, noted(0.7, 6.0, 0.0, (2.0, 2.0), 0.2) | MODEL, label=0, p=0.95),
    item(7, noted(0.7, 6.0, 0.0, (2.0, 2.0), 0.2), label=None, p=0.5, mark="tie"),
    item(8, {}),
    item(9, {"of_another_explorer": 3.0}),
)
"""Three pairs of the rule with a winner, a clash, a pair that the ensemble labelled, two audited ones, a tie,
and two questions that are not of this explorer."""


def test_metrics_by_hand() -> None:
    expected = {
        "explorer/clash_frac": 1 / 8,
        "explorer/clash_second_std": 0.7,
        "explorer/second_std": (0.5 + 0.1 + 0.3 + 0.9 + 0.2 + 0.2 + 0.2) / 7,
        "explorer/pair_variance": (1 + 2 + 3 + 0 + 4 + 6 + 2 + 2) / 8,
        "explorer/prompt_variance": (2 + 2 + 1 + 5 + 1 + 3 + 2 + 2) / 8,
        "explorer/gap": (3 + 3 + 1 + 1 + 2 + 4 + 6 + 6) / 80,
        # of items 0, 1, 2, 5 and 6: an oracle named a winner, for items 1 and 5 not the ensemble's
        "explorer/agreement": 3 / 5,
        "explorer/model_frac": 3 / 8,
        "explorer/model_belief": (0.6 + 0.8 + 0.7) / 3,
        "explorer/model_belief_min": 0.6,
        "explorer/model_belief_max": 0.8,
        "explorer/model_reward_chosen": 4.0,
        "explorer/model_reward_rejected": 1.0,
        "explorer/model_pair_variance": 4.0,
        "explorer/model_pair_variance_std": math.sqrt((0 + 4 + 4) / 3),
        "explorer/model_prompt_variance": 2.0,
        "explorer/model_prompt_variance_std": math.sqrt((1 + 1 + 0) / 3),
        "explorer/audit_accuracy": 1 / 2,
        "explorer/audit_win_prob": (0.25 + 0.95) / 2,
    }
    found = pair_metrics(Feedback(0, ITEMS, 0))
    assert found == pytest.approx(expected)
    assert set(found) == set(expected)
    split = Feedback(0, ITEMS[:4], 0, thrown_away=ITEMS[4:], older=(item(10, noted(0, 0, 0, (0, 0), 0)),))
    assert pair_metrics(split) == pytest.approx(expected), "questions that were thrown away count, older not"
    assert explorer().metrics(Feedback(0, ITEMS, 0)) == found


def test_an_audit_says_how_often_the_oracle_names_the_ensembles_winner() -> None:
    """It does so for two of three audited pairs."""
    notes = noted(0.8, 4.0, 2.0, (6.0, 3.0), 0.2) | MODEL
    audited = [item(0, notes, label=0), item(1, notes, label=1, p=0.25), item(2, notes, label=0, p=0.95)]
    found = pair_metrics(Feedback(0, tuple(audited), 0))
    assert found["explorer/audit_accuracy"] == pytest.approx(2 / 3)
    assert found["explorer/audit_win_prob"] == pytest.approx((1 + 0.25 + 0.95) / 3)


@pytest.mark.parametrize(
    ("items", "absent"),
    [
        ((), "explorer/"),
        (ITEMS[8:], "explorer/"),
        (ITEMS[:3], "explorer/model_"),
        (ITEMS[:3], "explorer/audit_"),
        (ITEMS[:3], "explorer/clash_second_std"),
        (ITEMS[3:4], "explorer/agreement"),
        (ITEMS[3:4], "explorer/second_std"),
        (ITEMS[4:5], "explorer/agreement"),
        (ITEMS[4:5], "explorer/audit_"),
        (ITEMS[7:8], "explorer/agreement"),
    ],
)
def test_a_metric_of_nothing_is_absent(items: tuple[Item, ...], absent: str) -> None:
    found = pair_metrics(Feedback(0, items, 0))
    assert not [name for name in found if name.startswith(absent)]
    assert bool(found) == any("belief" in each.question.notes for each in items)


# settings that are refused


@pytest.mark.parametrize(
    ("make", "field", "wrong", "right"),
    [
        (EnsembleExplorerConfig, "samples", (1, 0, -1), (2,)),
        (FeaturesConfig, "features.layer", (0,), (1, -2, "all")),
        (FeaturesConfig, "features.max_tokens", (7,), (8,)),
        *((EnsembleConfig, f"ensemble.{name}", (0, -3), (1,)) for name in ("members", "hidden", "steps")),
        *((EnsembleConfig, f"ensemble.{name}", (0, -3), ()) for name in ("batch", "buffer")),
        (EnsembleConfig, "ensemble.max_pairs", (0, -1), (1, None)),
        *(
            (EnsembleConfig, f"ensemble.{name}", (-1e-9, math.inf, math.nan), (0.0, 3.0))
            for name in ("learning_rate", "weight_decay", "prior")
        ),
        (EnsembleConfig, "ensemble.eps", (0.0, -1.0, math.inf, math.nan), (1e-12,)),
        (EnsembleConfig, "ensemble.max_grad_norm", (0.0, -1.0, math.inf, math.nan), (1e-3, None)),
        (EnsembleConfig, "ensemble.betas", ((0.9, 1.0), (-0.1, 0.9), (1.0, 0.9)), ((0.0, 0.0),)),
        *(
            (ModelLabelsConfig, f"model_labels.{name}", (-0.01, 1.01, math.nan), (0.0, 1.0))
            for name in ("share", "audit")
        ),
        *(
            (ModelLabelsConfig, f"model_labels.{name}", (-1,), (0, 7))
            for name in ("burn_in", "burn_in_pairs")
        ),
        (ModelLabelsConfig, "model_labels.max_variance", (-0.01, math.inf, math.nan), (0.0, 0.3, None)),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_number_out_of_range_is_refused(
    make: Any, field: str, wrong: tuple[Any, ...], right: tuple[Any, ...]
) -> None:
    name = field.rpartition(".")[2]
    for value in right:
        make(**{name: value})
    for value in wrong:
        shown = list(value) if isinstance(value, tuple) else value
        with pytest.raises(ConfigError) as raised:
            make(**{name: value})
        assert str(raised.value).startswith(f"explorer.{field} is {shown}")


def test_a_buffer_holds_a_batch() -> None:
    assert EnsembleConfig(batch=4, buffer=4).buffer == 4
    with pytest.raises(ConfigError, match=r"^explorer\.ensemble\.buffer is 3, smaller than a batch of 4"):
        EnsembleConfig(batch=4, buffer=3)


def test_an_algorithm_that_learns_from_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match="the explorer ensemble chooses pairs, and the algorithm learns"):
        EnsembleExplorer("score", EnsembleExplorerConfig())


@pytest.mark.parametrize("rule", [{"variance": "kl"}, {"name": 3}, {"name": None}, {}])
def test_a_rule_without_a_name_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^explorer\.rule is .*; give its `name`"):
        explorer(rule=rule)


def test_a_rules_options_stand_beside_its_name() -> None:
    """The rule of one prompt draws one member for the batch, as its option says."""
    rewards = [np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])] * 32
    given_round = round_of([make_group(number, *TEXTS[:3]) for number in range(32)], rewards)
    made = explorer(rule={"name": "bai_ts", "member": "batch"})
    assert len({question.picks[0] for question in made.choose(given_round)}) == 1


def wrong_fields(config: EnsembleExplorerConfig, **run: Any) -> list[str]:
    return [check.field for check in EnsembleExplorer.checks(config, facts(**run)) if check.is_wrong]


ONE = EnsembleConfig(members=1)
LAZY = EnsembleConfig(learn=False)
STARTED = EnsembleConfig(learn=False, start="somewhere")


@pytest.mark.parametrize(
    ("options", "run", "fields"),
    [
        ({}, {}, []),
        ({"samples": 2}, {}, ["explorer.samples"]),
        ({"samples": 2, "rule": {"name": "bai_ts"}}, {}, ["explorer.samples"]),
        ({"samples": 2, "rule": "passive"}, {}, []),
        ({"samples": 2, "rule": {"name": "uniform"}}, {}, []),
        ({"samples": 3}, {}, []),
        ({"ensemble": ONE}, {}, ["explorer.ensemble.members"]),
        ({"ensemble": ONE, "rule": "mine.py:rule"}, {}, []),
        (
            {"ensemble": ONE, "rule": "passive", "model_labels": labels(burn_in=1, pick="certain")},
            {},
            ["explorer.model_labels.max_variance"],
        ),
        (
            {"ensemble": ONE, "rule": "passive", "model_labels": labels(burn_in=1, max_variance=0.1)},
            {},
            ["explorer.model_labels.max_variance"],
        ),
        ({"ensemble": ONE, "rule": "passive", "model_labels": labels(burn_in=1)}, {}, []),
        ({"ensemble": LAZY, "model_labels": labels(burn_in=1)}, {}, ["explorer.model_labels"]),
        ({"ensemble": LAZY}, {}, []),
        ({"ensemble": STARTED, "model_labels": labels()}, {}, []),
        ({"model_labels": labels(pure=True)}, {}, ["explorer.model_labels.pure"]),
        ({"model_labels": labels(pure=True, burn_in=1)}, {}, []),
        ({"model_labels": labels(pure=True, burn_in_pairs=1)}, {}, []),
        ({"model_labels": labels(pure=True), "ensemble": EnsembleConfig(start="somewhere")}, {}, []),
        (
            {"model_labels": labels(burn_in=5)},
            {"max_steps": 5},
            ["explorer.model_labels.burn_in"],
        ),
        ({"model_labels": labels(burn_in=5)}, {"max_steps": 6, "max_queries": 1}, []),
        (
            {"model_labels": labels(burn_in_pairs=40)},
            {"max_queries": 40},
            ["explorer.model_labels.burn_in_pairs"],
        ),
        ({"model_labels": labels(burn_in_pairs=40)}, {"max_queries": 41, "max_steps": 1}, []),
        (
            {"features": FeaturesConfig(backbone="policy")},
            {"has_environment": True},
            ["explorer.features.backbone"],
        ),
        (
            {"features": FeaturesConfig(backbone="policy")},
            {"has_recorded": True},
            ["explorer.features.backbone"],
        ),
        ({"features": FeaturesConfig(backbone="policy")}, {}, []),
        ({}, {"has_environment": True, "has_recorded": True}, []),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    options: dict[str, Any], run: dict[str, Any], fields: list[str]
) -> None:
    assert wrong_fields(EnsembleExplorerConfig(**options), **run) == fields


def test_one_member_is_enough_for_rules_that_read_no_disagreement() -> None:
    refused = {
        name
        for name in RULES
        if wrong_fields(EnsembleExplorerConfig(rule=name, samples=4, ensemble=EnsembleConfig(members=1)))
    }
    assert refused == set(READS_DISAGREEMENT)
    generator = np.random.default_rng(0)
    groups = [make_group(number, *TEXTS) for number in range(5)]
    rewards = [generator.normal(size=(1, len(TEXTS))) for _ in groups]
    for name in set(RULES) - refused:
        questions = explorer(rule=name, ensemble=ONE).choose(round_of(groups, rewards))
        assert addresses(questions) == [""] * 5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two samples": ({"samples": 2}, "explorer.samples"),
    "one member": ({"ensemble": {"members": 1}}, "explorer.ensemble.members"),
    "labels of nothing": (
        {"model_labels": {"share": 0.5}, "ensemble": {"learn": False}},
        "explorer.model_labels",
    ),
    "no burn-in": ({"model_labels": {"pure": True, "burn_in": 0}}, "explorer.model_labels.pure"),
    "a share": ({"model_labels": {"share": 1.5}}, "explorer.model_labels.share"),
    "no such rule": ({"rule": "bai"}, "explorer.rule"),
    "no such option": ({"rule": {"name": "bai_ts", "temperature": 1}}, "explorer.rule"),
    "no such layer": ({"features": {"layer": 7}}, "explorer.features.layer"),
}


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_run_is_refused_before_anything_is_paid_for(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, command: str
) -> None:
    """No question is asked, and no run directory is left. The message names the setting."""
    options, field = REFUSED[what]
    changes = {
        "explorer": {"name": "ensemble", "samples": 4, **options},
        "oracle.name": f"{world.folder / 'reward.py'}:forbidden",
        "evaluation": None,
        "stop.max_steps": 1,
    }
    config = world.config("dpo", tmp_path, changes)
    assert oat(command, config) == 2
    assert field in capsys.readouterr().err
    assert not (tmp_path / "dpo").exists()
