"""The declarations of a part (an algorithm, an explorer, an engine, ...). In addition to the methods of its
protocol, a part has:

    Config                    dataclass of its settings, each with a docstring; it checks their ranges
    defaults(config, run)     optional: values for settings that were left open, derived from the run's facts
    checks(config, run)       optional: checks of other sections' settings that may contradict its own

Both functions are static. They read only their arguments: the part's own `Config` and a `RunFacts`. `build/`
calls them before anything is loaded.
"""

from dataclasses import dataclass
from typing import NamedTuple


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
        prompts: prompts of a step (`algorithm.prompts`); None: not known.
        max_steps, max_queries: where the run ends (`stop`); None: nowhere.
    """

    profile: str
    max_new_tokens: int
    is_sampling: bool
    has_recorded: bool
    num_recorded: int
    has_environment: bool
    has_buffer: bool
    measures_pairs: bool
    prompts: int | None = None
    max_steps: int | None = None
    max_queries: int | None = None


class Derived(NamedTuple):
    """A value for a setting that was left open, and its source in words, such as "as model.path". `oat check`
    prints the source."""

    value: object
    source: str


class Check(NamedTuple):
    """The result of a check of one setting.

    Attributes:
        field: the setting that the user should change, as "section.field", or "section.field.field".
        is_wrong: if it is true, the run is refused.
        why: the end of the error message: what is wrong, and what to do.
    """

    field: str
    is_wrong: object
    why: str
