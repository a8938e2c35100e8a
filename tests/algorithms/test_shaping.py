"""From scores to rewards: each step of the way by hand, the state of running statistics, and settings that
are wrong."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scored_groups import feedback
from shaped import CUT, changed, forward, made, prepared, rewards, with_rows

from oat.algorithms.shaping import RewardsConfig
from oat.errors import ConfigError, ContractError, OatWarning
from oat.plugins.registry import ALGORITHMS
from oat.types import Feedback, Trajectory
from oat.types.part import RunFacts


@pytest.mark.inventory(32)
def test_scale_and_bounds() -> None:
    assert rewards(made("rloo", rewards={"scale": 2.0})) == [2, 8, 2]
    objective = made("rloo", rewards={"scale": 2.0, "clip": (0.0, 5.0)})
    assert rewards(objective) == [2, 5, 2]
    assert prepared(objective).metrics["reward/clipped_frac"] == pytest.approx(1 / 3)
    assert prepared(objective).metrics["reward/shaped_mean"] == pytest.approx(3)
    assert "reward/shaped_mean" not in prepared(made("rloo")).metrics


@pytest.mark.inventory(48)
def test_rewards_are_bounded_before_the_kl() -> None:
    """Rewards are cut to 2; then each token's KL is subtracted: -0.5 nats to the reference, weight 0.1."""

    def apart(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
        found = forward(model, rows, wants)
        return {name: value - 0.5 * (model == "reference") for name, value in found.items()}

    objective = made("rloo", kl_reward_coef=0.1, rewards={"clip": (0.0, 2.0)})
    batch = objective.prepare(feedback((1.0, 4.0, 1.0)), apart, np.random.default_rng(0))
    left = [1, 4, 3, 2, 1, 2, 1]
    score = [1, 2, 2, 2, 2, 1, 1]
    expected = [s - 0.05 * n for s, n in zip(score, left, strict=True)]
    assert batch.columns["advantages_K"].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.inventory(31)
def test_a_response_that_did_not_stop_gets_less() -> None:
    """By `length` it is the one that was cut. By `no_end` it is each one without the id 3, so also one that a
    stop string ended; only the second response, of the ids 0 to 3, has it."""
    objective = made("rloo", rewards={"missing_end_penalty": 0.5})
    assert rewards(objective, CUT) == [1, 3.5, 1]
    assert prepared(objective, CUT).metrics["reward/penalty"] == pytest.approx(0.5 / 3)
    objective = made("rloo", rewards={"missing_end_penalty": 0.5, "missing_end": "no_end"})
    objective.end_ids = frozenset({3})
    assert rewards(objective, CUT) == [0.5, 4, 0.5]


def test_of_an_episode_the_last_turn_has_to_stop() -> None:
    """The end id 3 of an earlier turn, or in the environment's text, does not end the episode."""
    objective = made("rloo", rewards={"missing_end_penalty": 0.5, "missing_end": "no_end"})
    objective.end_ids = frozenset({3})
    first, second, third = (row.segments for row in CUT.items[0].group.trajectories)
    ended = with_rows(CUT, {}, {"segments": (*second, first[0], second[1])}, {})
    assert rewards(objective, ended) == [0.5, 4, 0.5]
    cut = with_rows(CUT, {}, {"segments": (*second, second[0], third[1])}, {})
    assert rewards(objective, cut) == [0.5, 3.5, 0.5]


def test_a_long_response_gets_less() -> None:
    section = {"overlong_penalty": 1.0, "overlong_from": 1, "overlong_to": 3}
    assert rewards(made("rloo", rewards=section)) == [1, 3, 0.5]


def test_a_cut_response_is_masked_or_dropped() -> None:
    """Masked, it counts in the mean of its group, 2; dropped, it does not, and the others' mean is 1."""
    masked = prepared(made("rloo", advantage="group_mean", rewards={"truncated": "mask"}), CUT)
    assert masked.columns["advantages_N"].tolist() == [-1, -1]
    assert [len(row.completion) for row in masked.rows] == [1, 2]
    assert masked.metrics["rows/trained"] == 2
    whitened = prepared(made("reinforce_pp", rewards={"truncated": "mask"}), CUT).columns["advantages_K"]
    assert whitened.tolist() == [0, 0, 0], "the rewards of what is learned are equal"
    dropped = prepared(made("rloo", advantage="group_mean", rewards={"truncated": "drop"}), CUT)
    assert dropped.columns["advantages_N"].tolist() == [0, 0]
    assert dropped.metrics["rows/trained"] == 2
    everything = with_rows(feedback((1.0, 4.0, 1.0)), *[{"finish_reason": "length"}] * 3)
    for how in ("mask", "drop"):
        assert prepared(made("rloo", rewards={"truncated": how}), everything).size == 0


def test_a_group_of_cut_responses_is_not_usable() -> None:
    (item,) = CUT.items
    assert made("rloo", advantage="group_mean").is_usable(item)
    assert not made("rloo", advantage="group_mean", rewards={"truncated": "drop"}).is_usable(item)
    assert made("rloo", advantage="group_mean", rewards={"truncated": "mask"}).is_usable(item)
    everything = with_rows(feedback((1.0, 4.0, 1.0)), *[{"finish_reason": "length"}] * 3).items[0]
    assert not made("rloo", rewards={"truncated": "mask"}).is_usable(everything)
    assert not made("reinforce_pp", rewards={"truncated": "mask"}).is_usable(everything)


def test_masked_responses_are_in_no_statistic_of_tokens() -> None:
    """The second response was cut. Over the tokens of the others, the advantages -1, -1, 2 are whitened, the
    entropies are compared, and the covariances have their means."""
    given = with_rows(feedback((1.0, 9.0, 4.0)), {}, {"finish_reason": "length"}, {})
    masked = {"truncated": "mask"}
    whitened_K = prepared(made("reinforce_pp", rewards=masked), given).columns["advantages_K"]
    std = math.sqrt(3)
    assert whitened_K.tolist() == pytest.approx([-2 / std, 1 / std, 1 / std], rel=1e-5)

    def entropies(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
        of_rows = [(0.1,), (5.0, 5.0, 5.0, 5.0), (0.3, 0.2)]
        lengths = [int(row.trained.sum()) for row in rows]
        values = [value for each in of_rows if len(each) in lengths for value in each]
        return {name: torch.tensor(values) for name in wants}

    section = {"tokens": {"high_entropy_share": 0.5}, "rewards": masked}
    batch = made("rloo", **section).prepare(given, entropies, np.random.default_rng(0))
    assert batch.columns["gradient_weight_K"].tolist() == [0, 1, 1]
    adapted = made("rloo", entropy={"target": 1.0, "step": 0.25}, rewards=masked)
    assert adapted.prepare(given, entropies, np.random.default_rng(0)).metrics["policy/entropy_coef"] == 0.25


def test_rewards_are_divided_by_the_deviation_of_the_run_so_far() -> None:
    objective = made("rloo", rewards={"normalise": "running"})
    std = math.sqrt(3)
    assert rewards(objective) == pytest.approx([-1 / std, 2 / std, -1 / std], rel=1e-3)
    seen = torch.tensor([1.0, 4, 1, 7, 7, 7])
    expected = (torch.tensor([7.0] * 3) - seen.mean()) / seen.std()
    given = feedback((7.0, 7.0, 7.0))
    assert objective.is_usable(given.items[0]), "it changes nothing"
    assert rewards(objective, given) == pytest.approx(expected.tolist(), rel=1e-3)
    plain = made("rloo")
    plain.load_state(objective.state)
    assert plain.state == {}, "a fork without running statistics drops them"
    for section, is_kept in (({"clip": (-1.0, 1.0)}, True), ({"scale": 10.0}, False)):
        fork = made("rloo", rewards={"normalise": "running", **section})
        fork.load_state(objective.state)
        assert bool(fork.state) is is_kept, section
    fork = made("rloo", rewards={"normalise": "running"}, credit="steps")
    fork.load_state(objective.state)
    assert fork.state == {}, "rewards of steps are other numbers than those of responses"
    older = {"moments": objective.state["moments"], "moments_of": {**objective.state["moments_of"]}}
    del older["moments_of"]["earned"]
    fork.load_state(older)
    assert fork.state["moments"] == older["moments"], "older runs did not say what they count, and continue"


@pytest.mark.parametrize("section", [{"normalise": "running"}, {"sources": "running"}])
def test_a_reward_beyond_float32_spoils_its_own_step_only(section: dict[str, str]) -> None:
    def given(value: float) -> Feedback:
        scores = (value, 0.0, 2.0)
        return changed(feedback(scores), sources={"only": scores})

    objective = made("rloo", rewards=section)
    assert not np.isfinite(rewards(objective, given(1e39))).all()
    assert np.isfinite(rewards(objective, given(7.0))).all()
    (moments,) = objective.shaping.moments.values()
    seen = [0.0, 2.0, 7.0, 0.0, 2.0]
    assert (moments.number, moments.mean) == (5, pytest.approx(np.mean(seen)))
    assert moments.std == pytest.approx(np.std(seen, ddof=1))


def test_a_killed_run_has_the_statistics_of_the_unbroken_one() -> None:
    unbroken = made("rloo", rewards={"normalise": "running"})
    rewards(unbroken)
    continued = made("rloo", rewards={"normalise": "running"})
    continued.load_state(unbroken.state)
    given = feedback((7.0, 0.0, 2.0))
    assert rewards(continued, given) == rewards(unbroken, given)
    assert continued.state == unbroken.state


SOURCES = {"right": (1.0, 0.0, 0.0), "short": (10.0, 30.0, None)}


def test_sources_are_normalised_before_they_are_added() -> None:
    """Of `right`: mean 1/3, deviation sqrt(1/3). Of `short`, over the two that have a score: mean 20,
    deviation sqrt(200)."""
    given = changed(feedback((11.0, 30.0, 0.0)), sources=SOURCES)
    right = [x / math.sqrt(1 / 3) for x in (2 / 3, -1 / 3, -1 / 3)]
    short = [x / math.sqrt(200) for x in (-10.0, 10.0, 0.0)]
    for how in ("group", "batch", "running"):
        found = rewards(made("rloo", rewards={"sources": how}), given)
        assert found == pytest.approx([a + b for a, b in zip(right, short, strict=True)], rel=1e-3)
    weighted = made("rloo", rewards={"sources": "group", "source_weights": {"short": 0.5}})
    assert rewards(weighted, given) == pytest.approx(
        [a + 0.5 * b for a, b in zip(right, short, strict=True)], rel=1e-3
    )
    assert rewards(made("rloo"), given) == [11, 30, 0]


def test_sources_that_are_not_there_are_named() -> None:
    with pytest.raises(ContractError, match="answers have no scores of sources; set oracle"):
        prepared(made("rloo", rewards={"sources": "group"}))
    section = {"sources": "group", "source_weights": {"rigth": 2.0}}
    with pytest.raises(ConfigError, match="names the source 'rigth', and the oracle has right, short"):
        made("rloo", rewards=section).check_answers(False, tuple(SOURCES))
    with pytest.raises(ConfigError, match="sources is group, and the oracle's answers have no scores of"):
        made("rloo", rewards=section).check_answers(False, ())
    made("rloo", rewards=section).check_answers(False, None)


def test_a_source_that_no_answer_of_a_step_has_counts_as_nothing() -> None:
    """A recipe may ask a source about some prompts only."""
    section = {"sources": "group", "source_weights": {"right": 2.0, "rare": 3.0}}
    objective = made("rloo", rewards=section)
    objective.check_answers(False, ("right", "short", "rare"))
    given = changed(feedback((1.0, 4.0, 1.0)), sources=SOURCES)
    without = made("rloo", rewards={"sources": "group", "source_weights": {"right": 2.0}})
    assert rewards(objective, given) == rewards(without, given)


def test_a_weight_of_a_source_that_no_answer_has_is_named_once() -> None:
    """The labels of a user's oracle are known only from its answers."""
    objective = made("rloo", rewards={"sources": "group", "source_weights": {"rigth": 2.0}})
    objective.shaping.check_sources(None)
    given = changed(feedback((1.0, 4.0, 1.0)), sources=SOURCES)
    with pytest.warns(OatWarning, match="names 'rigth', and no answer .* the answers have 'right', 'short'"):
        prepared(objective, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(objective, given)


def test_whether_a_group_is_usable_does_not_depend_on_its_own_scale() -> None:
    """With `sources: batch` the other groups of the step are not known yet. Within this group alone, the
    normalised scores of its two sources add up to 0."""
    sources = {"right": (0.0, 1.0), "short": (1.0, 0.0)}
    (item,) = changed(feedback((1.0, 1.0)), sources=sources).items
    flat = replace(item, answer=replace(item.answer, sources={name: (1.0, 1.0) for name in sources}))
    compared = made("grpo", advantage="group_norm", rewards={"sources": "batch"})
    assert compared.is_usable(item)
    assert not compared.is_usable(flat)
    assert not made("grpo", advantage="group_norm", rewards={"sources": "group"}).is_usable(item)
    assert made("grpo", rewards={"sources": "batch"}).is_usable(flat)
    alone = feedback((1.0,)).items[0]
    for section in ({"normalise": "running"}, {"normalise": "running", "clip": (-1.0, 1.0)}):
        assert made("reinforce_pp", samples=1, whiten=False, rewards=section).is_usable(alone)
        assert made("grpo", advantage="group_norm", rewards=section).is_usable(feedback((0.9, 1.0)).items[0])
        assert not made("grpo", advantage="group_norm", rewards=section).is_usable(item)
    running = made("grpo", advantage="group_norm", rewards={"sources": "running"})
    assert (running.is_usable(item), running.is_usable(flat), running.state) == (True, False, {})
    unweighted = {"sources": "batch", "source_weights": {"right": 0.0, "short": 0.0}}
    assert not made("grpo", advantage="group_norm", rewards=unweighted).is_usable(item)


def test_a_source_with_any_label_has_statistics_of_its_own() -> None:
    section = {"sources": "running", "normalise": "running"}
    given = feedback((1.0, 4.0, 1.0))
    found = [
        rewards(made("rloo", rewards=section), changed(given, sources={label: SOURCES["short"]}))
        for label in ("total", "other")
    ]
    assert found[0] == found[1]


def test_the_oracle_gives_what_the_place_of_rewards_needs() -> None:
    with pytest.raises(ConfigError, match="credit is steps, and the oracle gives no rewards of steps"):
        made("rloo", credit="steps").check_answers(False, None)
    made("rloo", credit="steps").check_answers(True, None)
    with pytest.raises(ConfigError, match="sources is group, and the rewards of steps"):
        made("rloo", credit="steps", rewards={"sources": "group"})
    facts = RunFacts("cpu", 8, True, False, 0, False, False, False)
    for section in ({"credit": "turns"}, {"turn_gamma": 0.5}):
        objective = made("rloo", **section)
        wrong = [each.field for each in objective.checks(objective.config, facts) if each.is_wrong]
        assert wrong == [f"algorithm.{name}" for name in section]
        facts_of_turns = replace(facts, has_environment=True)
        assert not any(each.is_wrong for each in objective.checks(objective.config, facts_of_turns))


def test_what_does_not_bound_recorded_responses_refuses_none() -> None:
    facts = RunFacts("cpu", 8, False, True, 3, False, False, False)
    section = {"overlong_penalty": 1.0, "overlong_from": 100, "overlong_to": 200}
    for name in ("rloo", "dr_grpo"):
        config = made(name, rewards=section, **({"max_length": 300} if name == "dr_grpo" else {})).config
        cls: Any = ALGORITHMS[name]
        assert not any(each.is_wrong for each in cls.checks(config, facts))
        sampled = replace(facts, has_recorded=False, num_recorded=0)
        assert [each.field for each in cls.checks(config, sampled) if each.is_wrong] == [
            "algorithm.rewards.overlong_from"
        ]
    dr_grpo: Any = ALGORITHMS["dr_grpo"]
    assert dr_grpo.defaults(dr_grpo.Config(max_length=5), facts) == {}
    with pytest.raises(
        ConfigError, match=r"set algorithm\.max_length, the most tokens that a recorded response"
    ):
        dr_grpo.defaults(dr_grpo.Config(), facts)
    ppo: Any = ALGORITHMS["ppo"]
    with pytest.raises(ConfigError, match="from which a response has no final state"):
        ppo.defaults(ppo.Config(end="final_state"), facts)


def test_scores_that_are_alone_in_their_groups_are_not_normalised_within_them() -> None:
    facts = RunFacts("cpu", 8, True, False, 0, False, False, False)
    for name, how, is_wrong in (("ppo", "group", True), ("ppo", "batch", False), ("grpo", "group", False)):
        cls: Any = ALGORITHMS[name]
        config = cls.Config(rewards=RewardsConfig(sources=how))
        wrong = [each.why for each in cls.checks(config, facts) if each.is_wrong]
        assert [why for why in wrong if "a score that is alone in its group is 0" in why] == wrong
        assert bool(wrong) is is_wrong


def test_token_rewards_are_scaled_and_keep_their_mean() -> None:
    objective = made("rloo", rewards={"whiten": True})
    rewards_K = torch.tensor([1.0, 0, 0, 0, 4, 0, 1], dtype=torch.float64)
    scaled_K = (rewards_K - rewards_K.mean()) / (rewards_K.var() + 1e-8).sqrt() + rewards_K.mean()
    expected = [
        scaled_K[0],
        *scaled_K[1:5].flip(0).cumsum(0).flip(0),
        *scaled_K[5:].flip(0).cumsum(0).flip(0),
    ]
    found = prepared(objective).columns["advantages_K"].tolist()
    assert found == pytest.approx([float(value) for value in expected], rel=1e-5)


@pytest.mark.inventory(50)
def test_flat_groups_weigh_as_they_are_told() -> None:
    given = feedback((1.0, 1.0, 1.0), (1.0, 4.0, 1.0))
    assert rewards(made("rloo", rewards={"flat_group_weight": 0.5}), given) == [0.5] * 3 + [2, 8, 2]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"scale": 0.0}, "rewards.scale is 0.0; it must be positive"),
        ({"clip": (2.0, 1.0)}, r"rewards.clip is \[2.0, 1.0\]; give the lowest and the highest"),
        ({"missing_end_penalty": -1.0}, "missing_end_penalty is -1.0; it must be at least 0.*subtracted"),
        (
            {"missing_end": "no_end"},
            "missing_end is no_end, and nothing reads it without missing_end_penalty",
        ),
        ({"overlong_from": 5}, "overlong_from is 5, and nothing reads it without overlong_penalty"),
        ({"overlong_penalty": 1.0, "overlong_from": 5}, "overlong_to is not set"),
        ({"overlong_penalty": 1.0, "overlong_from": 5, "overlong_to": 5}, "must be at least 0, and below"),
        ({"source_weights": {"a": 1.0}}, "source_weights is .* nothing reads it without sources other"),
        ({"flat_group_weight": -1.0}, "flat_group_weight is -1.0; it must be at least 0"),
    ],
)
def test_settings_that_are_wrong(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made("rloo", rewards=section)


def test_a_penalty_for_length_that_no_response_reaches_is_refused() -> None:
    section = {"overlong_penalty": 1.0, "overlong_from": 64, "overlong_to": 80}
    config = made("rloo", rewards=section).config
    facts = RunFacts("cpu", 64, True, False, 0, False, False, False)
    wrong = [check for check in type(made("rloo")).checks(config, facts) if check.is_wrong]
    assert [check.field for check in wrong] == ["algorithm.rewards.overlong_from"]
