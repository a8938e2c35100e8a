"""The declarations of a part (an algorithm, an explorer, an engine, ...). In addition to the methods of its
protocol, a part has:

    Config                    dataclass of its settings, each with a docstring; it checks their ranges
    defaults(config, run)     optional: values for settings that were left open, derived from the run's facts
    checks(config, run)       optional: checks of other sections' settings that may contradict its own

Both functions are static. They read only their arguments: the part's own `Config` and a `RunFacts`.
`resolve/` calls them before anything is loaded. It calls `checks` once more before anything is sampled, with
the facts that follow from the prompts and from the oracle's prices.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that `defaults` and `checks` may read.

    Attributes:
        profile: "cpu" or "gpu" (`compute.profile`).
        max_new_tokens: largest number of tokens in a response (`sampling.max_new_tokens`).
        is_sampling: True if the run samples responses, in training or in evaluations.
        has_recorded: True if training learns from recorded responses (`prompts.responses`).
        num_recorded: number of recorded responses of a prompt; 0 if training samples them.
        has_environment: True if an environment answers the policy, so an episode can have several responses.
        has_buffer: True if a step also learns from questions of earlier steps (`learner.buffer`).
        measures_pairs: True if evaluations measure recorded pairs (`evaluation.pairs`), which are never
            learned.
        is_quantized: True if the policy's frozen weights have four bits (`model.quantize`).
        max_steps, max_queries: where the run ends (`stop`); None: nowhere.
        slots: the slots whose weights the run samples or scores with. None: not known yet.
        steps: largest number of steps of the run, by `stop.max_steps` and by its prompts (`prompts.epochs`).
            None: no limit, or the prompts are not known yet.
        questions: number of questions of a step. None: not known yet.
        most_questions: largest number of questions that a step may take, with all further rounds
            (`sampling.refill_rounds`). None: not known, also if questions are asked ahead.
        whole_groups: True if reward functions get every response of a group, equal ones too
            (`oracle.whole_groups`).
        question_price: the most queries that a question of training costs. None: not known yet, or no budget
            limits the run.
    """

    profile: str
    max_new_tokens: int
    is_sampling: bool
    has_recorded: bool
    num_recorded: int
    has_environment: bool
    has_buffer: bool
    measures_pairs: bool
    is_quantized: bool = False
    max_steps: int | None = None
    max_queries: int | None = None
    slots: frozenset[str] | None = None
    steps: int | None = None
    questions: int | None = None
    most_questions: int | None = None
    question_price: int | None = None
    whole_groups: bool = True


class Derived(NamedTuple):
    """A value for a setting that was left open, and its source in words, such as "as model.path". `oat check`
    prints the source."""

    value: object
    source: str


class Check(NamedTuple):
    """The result of a check of one setting.

    Attributes:
        field: the setting that the user should change, as "section.field", or "section.field.field".
        is_wrong: if it is true, `refuses` says what follows.
        why: the end of the message: what is wrong, and what to do.
        refuses: "always": the run is refused. But if only facts of the second call show that it is wrong, a
            run that has begun gets a warning. "new": a new run is refused, and one that has begun gets a
            warning. "never": a new run gets a warning.
    """

    field: str
    is_wrong: object
    why: str
    refuses: Literal["always", "new", "never"] = "always"
