"""The estimators of LightRFT, by its names: the table of docs/algorithms/group.md against plain Python."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from wiring import forward, made, step_of, value_of

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "group.md"
NAMES = ("gae", "reinforce", "rloo", "group_norm", "grpo", "reinforce_baseline", "cpgd")
GAMMA, LAM, BETA = 0.9, 0.8, 0.1


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings that the page's table gives for a name of LightRFT."""
    section = PAGE.read_text(encoding="utf-8").split("### LightRFT's names")[1].split("\n## ")[0]
    lines = section.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    (found,) = (settings for names, settings in rows if f"`{name}`" in names)
    settings: dict[str, Any] = yaml.safe_load(found.strip("`"))
    return settings


def shaped(name: str, scores: Sequence[float]) -> list[float]:
    """Return what LightRFT makes of the scores of the responses to one prompt."""
    mean, count = statistics.fmean(scores), len(scores)
    if name == "rloo":
        return [score - (sum(scores) - score) / (count - 1) for score in scores]
    if name in ("grpo", "group_norm"):
        return [(score - mean) / (statistics.stdev(scores) + 1e-8) for score in scores]
    return [score - mean if name == "reinforce_baseline" else score for score in scores]


def slow(name: str, *, is_normalised: bool) -> list[float]:
    """Return the advantages of all tokens. The shaped score is at the last token, and the KL of each token is
    subtracted; GAE, or discounted sums."""
    found: list[float] = []
    for item in step_of(1).items:
        scores = shaped(name, item.answer.values)
        for made_row, score in zip(item.group.trajectories, scores, strict=True):
            raw, reference = (value_of(made_row, m, "raw", is_updated=False) for m in ("policy", "reference"))
            values = [*value_of(made_row, "critic", "value", is_updated=False).tolist(), 0.0]
            rewards = (-BETA * (raw - reference)).tolist()
            rewards[-1] += score
            after, own = 0.0, []
            for t in reversed(range(len(rewards))):
                one_step = rewards[t] + (GAMMA * values[t + 1] - values[t] if name == "gae" else 0.0)
                after = one_step + GAMMA * (LAM if name == "gae" else 1.0) * after
                own.append(after)
            found += own[::-1]
    if is_normalised:
        mean, variance = statistics.fmean(found), max(statistics.pvariance(found), 1e-8)
        found = [(value - mean) / math.sqrt(variance) for value in found]
    return found


@pytest.mark.inventory(46)
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_estimators_are_those_of_lightrft(name: str, is_normalised: bool) -> None:
    options = {**settings_of(name), "gamma": GAMMA, "kl_reward_coef": BETA}
    algorithm = options.pop("name")
    if algorithm == "ppo":
        options["lam"] = LAM
    if is_normalised:
        options |= {"whiten": True, "whiten_over": "step_biased"}
    batch = made(algorithm, options).prepare(step_of(1), forward, np.random.default_rng(0))
    found = batch.columns["advantages_K"]
    assert found.isfinite().all()
    assert found.tolist() == pytest.approx(slow(name, is_normalised=is_normalised), rel=1e-4, abs=1e-5)


def test_the_table_has_every_name() -> None:
    assert len({str(settings_of(name)) for name in NAMES}) == len(NAMES) - 1, "group_norm is grpo"
