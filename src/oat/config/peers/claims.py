"""Which of several names of a peer's decides about a setting of ours, whatever their order is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oat.config.peers.table import FILES, LEFT_OUT, Row

ARGUMENTS = ("generation_kwargs", "model_init_kwargs")
"""Sections of TRL's whose fields replace the fields with the same meaning beside them."""
Rank = tuple[bool, int, bool, str]
Claims = dict[str, tuple[bool, bool, int, Rank, int]]
"""The best claim for each setting. Its last part is the place of its field; -1: a value decides that has to
be worked out."""
Settings = Mapping[str, tuple[Any, bool]]
"""Settings of ours with their values, and True for one that gives way, as `Row.claimed` has them."""


def rank(path: Sequence[str], rows: Sequence[Row]) -> Rank:
    """Return the rank of a name among those that say something else about a setting; the smallest decides."""
    within = any(part.replace("-", "_") in ARGUMENTS for part in path[:-1])
    row = rows[0]
    return (not within, [*FILES.values()].index(row.peer), row.groups[0].startswith("older"), row.field)


def best(
    found: Sequence[tuple[tuple[Row, ...], Any]],
    claimed: Sequence[Settings | None],
    ranks: Sequence[Rank],
) -> Claims:
    """Return the best claim for each setting: that of a field which leaves it out, then of one that does not
    give way, then of one in a section of arguments, and then of the one with the fewest settings. What gives
    way also gives way to a field whose value has to be worked out.

    Args:
        found: the rows and the value of each field.
        claimed: the settings of each field; None: they have to be worked out.
    """
    open_ones = {
        setting
        for (rows, value), settings in zip(found, claimed, strict=True)
        if settings is None and value is not None
        for setting in rows[0].settings
    }
    claims: dict[str, list[tuple[bool, bool, int, Rank, int]]] = {}
    for place, settings in enumerate(claimed):
        for setting, (ours, gives_way) in (settings or {}).items():
            is_open = gives_way and ours is not ... and setting in open_ones
            many = len(settings or {}) if ranks[place][0] else 0
            claim = (ours is not LEFT_OUT, gives_way, many, ranks[place], -1 if is_open else place)
            claims.setdefault(setting, []).append(claim)
    return {setting: min(all_of_it) for setting, all_of_it in claims.items()}


def lost(
    row: Row,
    value: Any,
    settings: Settings | None,
    claims: Claims,
    claimed: Sequence[Settings | None],
    ranks: Sequence[Rank],
) -> tuple[str, int] | None:
    """Return what becomes of a field about whose settings others decide, and the place of one. "said":
    they say the same, or it says nothing more; "beside": they replace it; "other": they say something else.
    None: others do not decide about all of its settings.

    Args:
        settings: the field's settings; None: they have to be worked out.
    """
    names = list(row.settings if settings is None else settings)
    if value is True and any(is_within(claims, each) for each in names):
        return "said", -1
    if not names or not all(name in claims for name in names):
        return None
    places = {name: claims[name][-1] for name in names}
    if settings is None:
        same = [_of(claimed, places[name], name) == value for name in names]
        return ("said", -1) if value is None or (len(names) == 1 and all(same)) else None
    for name, (ours, gives_way) in settings.items():
        place = places[name]
        theirs = _of(claimed, place, name)
        if place < 0 or ours is ... or theirs == ours:
            continue
        is_replaced = gives_way or theirs is LEFT_OUT or not ranks[place][0]
        return ("beside" if is_replaced else "other"), place
    return "said", -1


def _of(claimed: Sequence[Settings | None], place: int, name: str) -> Any:
    """Return what the field at a place says about a setting."""
    return ((claimed[place] or {}) if place >= 0 else {}).get(name, (None, False))[0]


def is_within(claims: Iterable[str], section: str) -> bool:
    """Return True if a setting in a section is among claims, so that nothing has to switch it on."""
    return any(setting.startswith(f"{section}.") for setting in claims)
