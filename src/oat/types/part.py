"""A part (an algorithm, an explorer, an engine, ...) declares its settings itself, so no other file needs to
know them. Beside the methods of its protocol it has:

    Config                    dataclass of its settings, each with a docstring; it checks their ranges
    defaults(config, run)     optional: values for settings left open that follow from the run around it
    checks(config, run)       optional: checks of other sections' settings that may contradict its own

Both functions are static, get the part's own `Config` and a `RunFacts`, and read nothing else. `build/` calls
them before anything is loaded.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that a part may know.

    Attributes:
        profile: "cpu" or "gpu" (`compute.profile`).
        max_new_tokens: largest number of tokens in a response (`sampling.max_new_tokens`).
        is_sampling: True if anything is sampled, in training or in evaluations.
        has_environment: True if an environment answers the model, so that an episode has several responses.
        has_buffer: True if a step also learns from questions of earlier steps (`learner.buffer`).
        measures_pairs: True if evaluations measure recorded pairs (`evaluation.pairs`), which are never
            learned.
    """

    profile: str
    max_new_tokens: int
    is_sampling: bool
    has_environment: bool
    has_buffer: bool
    measures_pairs: bool


class Derived(NamedTuple):
    """The value for a setting that was left open, and its source in words, which `oat check` prints: "as
    model.path"."""

    value: object
    source: str


class Check(NamedTuple):
    """The result of a check of one setting.

    Attributes:
        field: the setting that the user should change, as "section.field".
        is_wrong: the run is refused if this value is true.
        why: the end of the error message: what is wrong, and what to do.
    """

    field: str
    is_wrong: object
    why: str
