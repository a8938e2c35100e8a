"""The declarations of a part (an algorithm, an explorer, an engine, ...) beside its protocol, so that no
other file knows its settings:

    Config                    dataclass of its settings, each with a docstring; ranges are checked in it
    defaults(config, run)     optional: settings left open that follow from the run around it
    checks(config, run)       optional: settings of other sections that contradict its own

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
        max_new_tokens: most tokens of a response.
        is_sampling: True if anything is sampled, in training or in evaluations.
        has_environment: True if an environment answers the model, so that an episode has several responses.
        has_buffer: True if a step also learns from questions of earlier steps (`learner.buffer`).
        measures_pairs: True if recorded pairs are measured that are never learned (`evaluation.pairs`).
    """

    profile: str
    max_new_tokens: int
    is_sampling: bool
    has_environment: bool
    has_buffer: bool
    measures_pairs: bool


class Derived(NamedTuple):
    """The value of a setting that was left open, and the source that `oat check` names: "as model.path"."""

    value: object
    source: str


class Check(NamedTuple):
    """A check of a setting; the run is refused where it is wrong.

    Attributes:
        field: the setting that the user should change, as "section.field".
        is_wrong: anything true refuses the run.
        why: the end of the message: what is wrong, and what to do.
    """

    field: str
    is_wrong: object
    why: str
