"""What a message about a whole configuration of a peer's says beside what its names are called here: what the
peer does by default, and with the chat template."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from oat.config.peers.answer import Given, Leaf
from oat.config.peers.copied import is_python
from oat.config.peers.first_record import count, has_messages
from oat.config.peers.our_defaults import default_of
from oat.config.peers.table import family_of
from oat.config.peers.theirs import CLASSES, class_of
from oat.config.peers.translated import entry, rows_of, settings_of
from oat.config.peers.trl_defaults import LEARNED, by_default
from oat.config.settings import Config

_END = "learner.schedule_steps is the number of optimiser steps of the run; with stop.max_steps it is known"
_CAP = (
    "TRL caps the ratio of cispo at epsilon_high, or else at epsilon, 0.2 by default; here the cap is "
    "1 + algorithm.clip_high, at least 1"
)
_SEVERAL = 3
"""Number of names of a peer's from which on they count as a whole configuration of its."""
_DEEPEST = 3
"""Largest number of sections within each other that our settings have."""
_NEEDED = ("model.path", "prompts.path")
"""Settings without which no run begins."""
_TEMPLATE = {"render.template": "tokenizer"}


def beside(
    place: str,
    leaves: Sequence[Leaf],
    algorithm: str | None,
    cls: str | None,
    around: Mapping[str, Any] | None,
    is_section: bool,
) -> tuple[Given, Given, str, str | None]:
    """Return our settings for what TRL decides by default, those that are worked out from what is around
    the names, lines on what nobody can tell from the names, and the algorithm. If the user gave a few names
    alone, there are no such settings, and no lines.

    Args:
        place: where the names were set.
        leaves: the user's fields that the tables have.
        algorithm: name of the run's algorithm; None: not known.
        cls: name of the class of TRL's whose fields they are; None: they are of no object.
        around: the whole tree; None: the names stand in a section of ours.
        is_section: they stand in a section of their own, such as `args`.
    """
    rows = [rows_of(path, algorithm) for path, _ in leaves]
    found = [each[0] for each in rows if each]
    names = [row.field for row in found if row.peer == "TRL"]
    given = dict(_given(around))
    is_ours = any(name.partition(".")[0] in LEARNED and name not in _OPEN for name in given)
    is_mixed = not is_section and is_ours
    its = cls or class_of(names, algorithm) or ""
    if around is not None and len([row for row in found if row.peer == "verl"]) >= _SEVERAL:
        said = f"verl puts prompts into the model's chat template: add {_template(place)}"
        return {}, {}, "" if "render.template" in given else said, algorithm
    if around is None or its not in CLASSES or (not cls and (is_mixed or len({*names}) < _SEVERAL)):
        return {}, {}, "", algorithm
    own = given.get("algorithm.name")
    own = own if isinstance(own, str) and family_of(own) == family_of(CLASSES[its]) else None
    algorithm = algorithm or CLASSES[its]
    defaults = by_default(its, leaves, own, [name for name in given if name != "algorithm.name" or own])
    if around.get("oracle", ...) is not ... and given.get("oracle.name") != "recorded":
        defaults.pop("prompts.too_long", None)  # responses are sampled, so no record of them is cut
    if around.get("oracle", ...) is ... and CLASSES[its] != "grpo":
        defaults["oracle.name"] = "recorded"
    elif around.get("oracle", ...) is ... and not is_python(place):
        defaults["oracle.name"] = ...
    ours = settings_of(leaves, algorithm)
    missing = [name for name in _NEEDED if name not in ours and name.partition(".")[0] not in around]
    defaults |= dict.fromkeys(missing if not is_python(place) else (), ...)
    notes = [_END] if "learner.schedule_steps" in defaults else []
    notes += [_CAP] if defaults.get("algorithm.clip_high") is ... else []
    prompts = ours.get("prompts.path", _data(around, leaves))
    prompts = dict(_within(prompts, "")).get("path", prompts)
    sizes = {"algorithm.prompts": default_of("algorithm.prompts", algorithm), **defaults, **given, **ours}
    is_part = ours.get("stop.max_steps") is ...
    steps, said = _steps(leaves, prompts, sizes["algorithm.prompts"], algorithm) if is_part else (0, "")
    worked_out = {"stop.max_steps": steps} if steps else {}
    notes += [said] if said else []
    is_open = "render.template" not in {**given, **ours}
    key = ours.get("prompts.prompt_key", given.get("prompts.prompt_key"))
    is_chat = has_messages(prompts, key) if is_open else False
    if is_chat is None:
        notes.append(f"if prompts are messages, TRL puts them into the chat template: add {_template(place)}")
    return {**defaults, **(_TEMPLATE if is_chat else {})}, worked_out, "\n".join(notes), algorithm


def _steps(leaves: Sequence[Leaf], data: Any, prompts: Any, algorithm: str | None) -> tuple[int, str]:
    """Return the number of steps of a part of an epoch, 0 if it is not known, and how it comes about. TRL's
    GRPO leaves out the records that do not fill a step; the other trainers learn from them."""
    epochs = next(value for path, value in leaves if path[-1].replace("-", "_") == "num_train_epochs")
    records = count(data)
    if not records or type(prompts) is not int or prompts < 1:
        return 0, f"stop.max_steps is {epochs} x records / algorithm.prompts"
    is_group = family_of(algorithm) == "group"
    whole = max(1, records // prompts if is_group else math.ceil(records / prompts))
    steps = max(1, math.ceil(epochs * whole))
    return steps, f"stop.max_steps is {epochs} x {records} records / algorithm.prompts {prompts}"


def _data(around: Mapping[str, Any], leaves: Sequence[Leaf]) -> Any:
    """Return what the user gave as data, by our name or by TRL's."""
    within = [value for path, value in leaves if path[-1] == "train_dataset"]
    found = [around.get(name, ...) for name in ("prompts", "train_dataset")] + within
    return next((value for value in found if value is not ...), None)


_OPEN = ("algorithm.name", "prompts.path", "prompts.prompt_key", "prompts.split")
"""Our settings in the sections of learning that say nothing about how a run learns."""


def _template(place: str) -> str:
    is_file = not is_python(place) and not place.startswith("--")
    return "render: {template: tokenizer}" if is_file else entry(place, _TEMPLATE)


def _given(around: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield our settings that a tree has, with their values; a part by its name alone is its field `name`."""
    for f in fields(Config):
        section = (around or {}).get(f.name)
        if issubclass(type(section), str) and f.name != "run_dir":
            yield f"{f.name}.{'path' if f.name in ('model', 'prompts') else 'name'}", section
        else:
            yield from _within(section, f"{f.name}.")


def _within(section: Any, above: str) -> Iterator[tuple[str, Any]]:
    is_section = issubclass(type(section), dict) and above.count(".") <= _DEEPEST  # isinstance asks an object
    for name, value in section.items() if is_section else ():
        yield f"{above}{name}", value
        yield from _within(value, f"{above}{name}.")
