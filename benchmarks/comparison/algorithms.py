"""The algorithms of the comparison, each with its line of settings.

The names come from the registry. An algorithm without a line in `LINES` is compared with `DEFAULT_LINE`, so a
new algorithm takes part at once, and a line gives it settings of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oat.plugins.registry import ALGORITHMS

Options = Mapping[str, Any]
"""Fields of the section `algorithm`, with their values."""


@dataclass(frozen=True)
class Line:
    """The settings of one algorithm.

    Attributes:
        knob: the two values that the search tries of the algorithm's own settings.
        fixed: further fields of the section `algorithm`, in every run.
        learner: further fields of the section `learner`, in every run.
        prompts: fields of the section `prompts`. With recorded responses the algorithm asks nobody.
        algorithm: name of the algorithm in the registry, if it is not that of the line.
    """

    knob: tuple[Options, Options]
    fixed: Options = field(default_factory=dict)
    learner: Options = field(default_factory=dict)
    prompts: Options = field(default_factory=dict)
    algorithm: str | None = None


def _betas(low: float, high: float, **fixed: Any) -> Line:
    return Line(knob=({"beta": low}, {"beta": high}), fixed=fixed)


_KL = Line(knob=({"kl_coef": 0.0}, {"kl_coef": 0.05}))
_KL_IN_REWARDS = Line(knob=({"kl_reward_coef": 0.0}, {"kl_reward_coef": 0.05}))
_BOUNDS = Line(knob=({"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_low": 0.03, "clip_high": 0.04}))
_REDUCTION = Line(knob=({"reduction": "sequence"}, {"reduction": "token"}))
DEFAULT_LINE = Line(knob=({"minibatches": 2}, {"minibatches": 4}), fixed={"epochs": 1})
"""The line of an algorithm that has none. All algorithms make one pass over the answers of a step."""
LINES: dict[str, Line] = {
    "dpo": _betas(0.1, 0.5),
    "robust_dpo": _betas(0.1, 0.5, label_smoothing=0.1),
    "ipo": _betas(0.1, 0.5),
    "slic": _betas(0.1, 0.5),
    "simpo": _betas(2.0, 10.0),
    "bnf": Line(knob=({"normalize": "shorter"}, {"normalize": "own"})),
    "exo": _betas(0.1, 0.5),
    "nca": _betas(0.1, 0.5),
    "apo_zero": _betas(0.1, 0.5),
    "apo_down": _betas(0.1, 0.5),
    "sppo_hard": _betas(0.1, 0.5),
    "discopop": _betas(0.1, 0.5),
    "aot": _betas(0.1, 0.5),
    "orpo": _betas(0.1, 1.0),
    "cpo": Line(knob=({"sft_weight": 1.0}, {"sft_weight": 0.1})),
    "kto": Line(knob=({"beta": 0.1}, {"beta": 0.5}), fixed={"samples": 8}),
    "sft": Line(
        knob=({"reduction": "sequence"}, {"reduction": "prompt"}), fixed={"samples": 8, "threshold": 1.0}
    ),
    "grpo": _KL,
    "dr_grpo": _KL,
    "rloo": _KL_IN_REWARDS,
    "reinforce_pp": _KL_IN_REWARDS,
    "gspo": _BOUNDS,
    "cispo": Line(knob=({"clip_high": 4.0}, {"clip_high": 0.5})),
    "cpgd": Line(knob=({"drift_coef": 0.1}, {"drift_coef": 0.0})),
    "sapo": _KL,
    "luspo": _BOUNDS,
    "vespo": _KL,
    "ppo": replace(_KL_IN_REWARDS, fixed={"epochs": 1}, learner={"critic_learning_rate": 1e-3}),
}
LEFT_OUT: dict[str, str] = {
    "reward_model": "its policy does not learn",
    "frozen": "its policy does not learn",
    "xpo": "it explores (docs/exploration.md)",
}
"""Algorithms of the registry that are not compared, with the reason."""
RECORDED: dict[str, Line] = {
    "sft_teacher": Line(
        knob=_REDUCTION.knob,
        prompts={"path": "demonstrations.jsonl", "responses": ["answer"]},
        algorithm="sft",
    ),
    "sft_right": Line(
        knob=_REDUCTION.knob, prompts={"path": "train.jsonl", "responses": ["answer"]}, algorithm="sft"
    ),
    "dpo_recorded": Line(
        knob=LINES["dpo"].knob,
        prompts={"path": "pairs.jsonl", "responses": ["chosen", "rejected"]},
        algorithm="dpo",
    ),
}
"""Runs that ask nobody, since their responses are recorded: more demonstrations of the teacher of the
quickstart, the right answers as demonstrations, and pairs of the right answer and the one without the
carry."""


def contestants(only: Sequence[str] | None = None) -> dict[str, Line]:
    """Return the lines of the algorithms that are compared, by name, in the order of the registry, and then
    those of the runs that ask nobody.

    Args:
        only: names of algorithms; None: all of the registry.
    """
    online = {
        name: LINES.get(name, DEFAULT_LINE)
        for name in ALGORITHMS
        if name not in LEFT_OUT and (only is None or name in only)
    }
    return {**online, **RECORDED}


def family(name: str) -> str:
    """Return the kind of answers that an algorithm learns from: `pairs`, `scores`, or `nobody` if it asks
    nobody."""
    if name in RECORDED:
        return "nobody"
    # a class whose needs depend on its settings states them when it is made; all such classes need scores
    requires = getattr(ALGORITHMS[name], "requires", None)
    return "pairs" if requires is not None and requires.feedback == "compare" else "scores"
