"""TRL's defaults as settings of ours: those that the user did not set, that differ from ours, and that decide
what is learned. With them a run trains as TRL does."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oat.config.peers.answer import Given, Leaf
from oat.config.peers.our_defaults import default_of
from oat.config.peers.theirs import CLASSES, fields_of
from oat.config.peers.translated import faulty, rows_of, settings_of

LEARNED = ("algorithm", "sampling", "prompts", "learner")
"""The sections that say what is learned."""
_ASIDE = ("learner.gradient_checkpointing", "algorithm.correction.")
"""Settings in them that change memory alone, or act on another engine there (vLLM)."""


def by_default(cls: str, leaves: Sequence[Leaf], algorithm: str | None, given: Iterable[str] = ()) -> Given:
    """Return what one of TRL's classes decides about learning by its defaults, as settings of ours whose
    defaults differ. `...` is a value that the user has to choose.

    Args:
        cls: one of `CLASSES`.
        leaves: the fields that the user set, which have no defaults then.
        algorithm: name of the run's algorithm, if the user gave it.
        given: our settings that the user set.
    """
    ours = algorithm or CLASSES[cls]
    fields = {name: what["default"] for name, what in fields_of(cls).items()}
    is_own = algorithm not in (None, CLASSES[cls])  # an algorithm of ours has its own loss and advantages
    if is_own:
        fields.pop("loss_type", None)
    rows = [rows_of(path, ours) for path, _ in leaves]
    named = {found[0].field for found in rows if found}
    others = [((name,), value) for name, value in fields.items() if name not in named]
    mine = settings_of(leaves, ours)
    both = settings_of([*leaves, *others], ours)
    decided = {*given, *mine, *faulty(leaves, ours)}
    loss = both.get("algorithm.name", ours)
    added = {
        name: value
        for name, value in {"algorithm.name": loss, **both}.items()
        if name not in decided and _is_learned(name, value, loss)
        if not (is_own and name.startswith("algorithm.") and name != "algorithm.prompts")
    }
    if is_endless({**both, **dict.fromkeys(given)}):
        added["learner.schedule_steps"] = ...
    return added


def is_endless(ours: Mapping[str, Any]) -> bool:
    """Return True if a schedule falls and nothing says when it ends."""
    ends = ("stop.max_steps", "learner.schedule_steps")
    return ours.get("learner.schedule") in ("linear", "cosine") and not any(name in ours for name in ends)


def _is_learned(setting: str, value: Any, algorithm: str) -> bool:
    if setting == "algorithm.name":
        return True
    if setting.partition(".")[0] not in LEARNED or setting.startswith(_ASIDE):
        return False
    return bool(default_of(setting, algorithm) != (tuple(value) if isinstance(value, list) else value))
