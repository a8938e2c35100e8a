"""With one response in a group or in a step, what would have no effect or would always be 0 is refused, and
nothing else is."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions

from oat.algorithms.policy_gradient_config import ADVANTAGES, PolicyGradientConfig
from oat.algorithms.shaping import RewardsConfig
from oat.plugins.registry import ALGORITHMS
from oat.types import Answer, Feedback, Item, Trajectory
from oat.types.part import RunFacts

SAMPLED = RunFacts("cpu", 8, True, False, 0, False, False, False)
OF_STEPS = ((2, 0.25), (4, 0.5))
"""The rewards of two steps, of 0.25 and 0.5, of a response of 4 tokens."""


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> Mapping[str, torch.Tensor]:
    raw_K = torch.from_numpy(np.concatenate([row.recorded("raw_logps") for row in rows]))
    return {name: raw_K for name in wants}


def feedback(*scores: float) -> Feedback:
    """Return feedback with groups of one response of 4 tokens, and a score for each, of one source."""
    items = []
    for number, score in enumerate(scores):
        group = make_group(number, "abcd")
        (question,) = make_questions([group], "score", 0, oracle="o")
        steps = tuple((end, reward * score) for end, reward in OF_STEPS)
        answer = Answer(
            question.key, (score,), ("ok",), 1, steps=(steps,), step_unit="tokens", sources={"s": (score,)}
        )
        items.append(Item(group, question, answer, None))
    return Feedback(0, tuple(items), len(scores))


def advantages(config: Any, name: str = "rloo") -> list[float]:
    """Return the advantages of the tokens or responses of a second step."""
    objective: Any = ALGORITHMS[name](config)
    for scores in ((1.0, 4.0, 2.0), (2.0, 0.5, 3.0)):
        batch = objective.prepare(feedback(*scores[: config.prompts]), forward, np.random.default_rng(0))
    columns = batch.columns
    found: torch.Tensor = columns["advantages_K" if "advantages_K" in columns else "advantages_N"]
    return found.tolist()


def refused(name: str, config: PolicyGradientConfig, facts: RunFacts = SAMPLED) -> list[str]:
    cls: Any = ALGORITHMS[name]
    return [check.field for check in cls.checks(config, facts) if check.is_wrong]


def test_what_one_response_makes_0_or_leaves_without_effect_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def doubled(given):\n    return 2 * given.rewards_N\n")
    overs = ("step", "group", "responses")
    whitenings = ({}, *({"whiten": True, "whiten_over": over} for over in overs))
    shapings = [{}, {"flat_group_weight": 0.5}, {"normalise": "running"}]
    shapings += [{"sources": how} for how in ("group", "batch", "running")]
    ways = [("none", "response", 1.0), ("none", "response", 0.5), ("none", "steps", 1.0)]
    ways += [("batch_mean", "response", 1.0), ("batch_mean", "response", 0.5), ("batch_mean", "steps", 1.0)]
    ways += [(f"{file}:doubled", "response", 1.0), (f"{file}:doubled", "steps", 1.0)]
    seen = set()
    for prompts, (advantage, credit, gamma), whitening, shaping in product(
        (1, 3), ways, whitenings, shapings
    ):
        if credit == "steps" and "sources" in shaping:
            continue
        if whitening.get("whiten_over") == "responses" and (credit == "steps" or gamma != 1):
            continue
        options = {"prompts": prompts, "samples": 1, "advantage": advantage, "gamma": gamma, **whitening}
        config = ALGORITHMS["rloo"].Config(**options, credit=credit, rewards=RewardsConfig(**shaping))
        found = advantages(config)
        is_useless = not any(abs(each) > 1e-6 for each in found)
        if "flat_group_weight" in shaping:
            is_useless |= found == advantages(ALGORITHMS["rloo"].Config(**options, credit=credit))
        assert bool(refused("rloo", config)) is is_useless, (options, credit, shaping, found)
        seen.add(is_useless)
    assert seen == {True, False}


def test_every_estimator_that_compares_a_group_needs_two() -> None:
    for advantage in ADVANTAGES:
        config = ALGORITHMS["grpo"].Config(samples=1, advantage=advantage)
        is_alone = advantage in ("none", "batch_mean")
        assert refused("grpo", config) == ([] if is_alone else ["algorithm.samples"])
        more = ALGORITHMS["grpo"].Config(samples=2, advantage=advantage)
        assert not refused("grpo", more)


def test_the_number_of_recorded_responses_counts() -> None:
    """`reinforce_pp` has `samples: 1`; two recorded responses are a group of two all the same, and `grpo`'s
    `samples: 8` does not make one response eight."""
    one, two = (RunFacts("cpu", 8, False, True, count, False, False, False) for count in (1, 2))
    config = ALGORITHMS["reinforce_pp"].Config(advantage="group_mean", whiten_over="group")
    assert not refused("reinforce_pp", config, two)
    assert refused("reinforce_pp", config, one) == ["prompts.responses", "algorithm.whiten_over"]
    (check,) = (c for c in ALGORITHMS["grpo"].checks(ALGORITHMS["grpo"].Config(), one) if c.is_wrong)
    assert check.field == "prompts.responses"
    assert "name further columns, or set algorithm.advantage to none" in check.why
    assert "samples" not in check.why


@pytest.mark.parametrize("whiten_over", ["step", "step_biased", "group"])
def test_a_critic_makes_tokens_differ(whiten_over: str) -> None:
    config = ALGORITHMS["ppo"].Config(prompts=1, samples=1, whiten_over=whiten_over)
    assert not refused("ppo", config)
