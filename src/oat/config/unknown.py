"""The message about a field that nothing reads: what it is called here, and fields with a similar name.

`oat.config.load` imports this module when it makes an error. Only then are the tables of names read.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from oat.config.part_names import fields_of_parts
from oat.config.peers.answer import Leaf
from oat.config.peers.claims import ARGUMENTS
from oat.config.peers.copied import arguments, escaped, is_python
from oat.config.peers.objects import Fields, plain
from oat.config.peers.shown import unlisted
from oat.config.peers.table import (
    FILES,
    algorithm_of,
    family_of,
    find,
    is_listed,
    is_peers,
    is_read,
    names,
    peer_of,
    readers_of,
)
from oat.config.peers.translated import Beside, rows_of, translated
from oat.config.peers.whole import beside
from oat.config.settings import Config
from oat.errors import FEW_NAMES, did_you_mean, shortened

_MOST = 4
"""Largest number of fields that a message proposes."""
_TYPO = 0.9
"""Similarity to a field of the section from which on a name is a typing error. It is then not compared with
the names of our parts' settings, whose import takes time."""
_LONGEST = 100
"""Number of characters of a name for which a similar one is sought, and which a message has."""
_LEAST_SIMILAR = 0.75
"""Smallest ratio of `difflib` for a name in another section or of a peer's."""
_MOST_GUESSES = 20
"""Largest number of unknown names for which a message seeks similar ones."""
SECTIONS_OF_ARGUMENTS = ("args", "training_args", "config")
"""Names of sections, or of objects, that scripts of other libraries give all of their settings in."""
_ASIDE = ("evaluation", "checkpoint")
"""Our sections that say nothing about learning; `steps` in them are not the steps of the run."""


def described(
    place: str,
    path: tuple[str, ...],
    valid: Sequence[str],
    hint: str,
    unknown: Mapping[str, Any],
    algorithm: str | None,
    around: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> str:
    """Return the message about the first unknown field of a section. It also says what the other ones are
    called here, or what the user may have meant by them.

    The tables of names have the first word, since they know what a name means; but a name in common use does
    not have it against a field of its own section. Otherwise the message proposes the fields of other
    sections that `_elsewhere` finds, or the field of the same section with the most similar name.

    Args:
        place: where the field was set.
        path: path of the unknown field.
        valid: names of the fields that its section has.
        hint: text that follows the field's name in the message.
        unknown: the unknown fields of its section and their values, this one first. A value may be an object
            whose fields are settings, such as TRL's GRPOConfig.
        algorithm: name of the run's algorithm; None: not known.
        around: the whole tree if the section is the tree itself; None: it is another one.
        given: the known fields of its section, with their values; None: their values are not known.
    """
    unknown = {name: _plain(name, value) for name, value in unknown.items()}
    wrong = f"{escaped(place)}: nothing reads the field `{_name(path)}`{escaped(hint)}"
    value = unknown.get(path[-1])
    cls, algorithm = _class_among([value, *unknown.values()], algorithm)
    section = _fields_of(value) if path[-1] in SECTIONS_OF_ARGUMENTS else {}
    is_section, first = bool(section), list(_leaves(path, value))
    rest = [
        leaf for name in unknown if name != path[-1] for leaf in _leaves((*path[:-1], name), unknown[name])
    ]
    first, rest = _flat(first, rest) if around is not None else (first, rest)
    rest += _theirs_within((around or {}).get("algorithm"))
    peer = "" if cls or around is None else peer_of(_within_arguments(leaf[0]) for leaf in first + rest)
    own, strange = _parted(first, valid, algorithm, peer)
    others, more_strange = _parted(rest, valid, algorithm, peer)
    leaves, is_known = own + others, bool(own)
    is_alone = len(leaves) + len(strange) + len(more_strange) == 1 and not is_section
    guesses = {} if is_alone else _guesses(strange + more_strange, path, valid, algorithm, is_section)
    if is_known or cls or len(leaves) + len(guesses) > 1:
        untold = [leaf[0] for leaf in strange + more_strange if leaf[0][-1] not in guesses]
        wrong += _unheard(untold, None if is_known or cls or is_section else path)
        wrong += _strangers([leaf[0] for leaf in strange + more_strange if leaf[0] != path], algorithm)
        near = difflib.get_close_matches(_key(path[-1]), valid, n=1, cutoff=0.85) if is_known else []
        typo = [name for name in near if not _is_said(name, path, leaves, algorithm)]
        begin = f"did you mean `{typo[0]}`? " if typo and not cls else ""
        defaults, worked_out, note, algorithm = beside(place, leaves, algorithm, cls, around, is_section)
        more = Beside(defaults, guesses, note, worked_out, _nested(path[:-1], given or {}))
        return f"{wrong}; {begin}{translated(place, leaves, algorithm, cls, more)}"
    if is_section:
        return _of_arguments(place, path, section, valid, algorithm, guesses)
    return f"{wrong}; {_of_one(place, path, value, valid, algorithm)}"


def _unheard(paths: Sequence[tuple[str, ...]], first: tuple[str, ...] | None) -> str:
    """Return what a message says about fields that no table has; "": there are none.

    Args:
        first: the one that the message is about, if it is among them.
    """
    unheard = [path for path in paths if not _is_ours(path)]
    others = dict.fromkeys(path[-1] for path in unheard if path != first)
    names = ", ".join(f"`{_name((name,))}`" for name in [*others][:_MOST])
    if first is None or len(others) == len(unheard):
        return f" (and no table has {names})" if names else ""
    return f" (no table has it, and none has {names})" if names else " (no table has it)"


def _theirs_within(section: Any) -> list[Leaf]:
    """Return the fields of our section `algorithm` that are another library's, and none of ours."""
    fields = _fields_of(section).items()
    leaves = (leaf for name, part in fields for leaf in _leaves(("algorithm", str(name)), _plain(name, part)))
    return [leaf for leaf in leaves if is_peers(".".join(leaf[0]))]


def _of_one(
    place: str, path: tuple[str, ...], value: Any, valid: Sequence[str], algorithm: str | None
) -> str:
    """Return what a message says about a field that no table has, if nothing is said about others."""
    last = _key(path[-1])
    near = difflib.get_close_matches(last, valid, n=1, cutoff=0.85)
    if _is_ours(path):
        return f"valid here: {', '.join(valid) or 'none'}"
    is_small = last == path[-1].replace("-", "_")
    if not is_small and last not in valid and _is_translated((*path[:-1], last), valid, algorithm):  # `Beta`
        return (
            f"did you mean `{last}`? {translated(place, [_meant(path, value, last, algorithm)], algorithm)}"
        )
    is_typo = bool(difflib.get_close_matches(last, valid, n=1, cutoff=_TYPO))
    near = near or _within(last, valid)
    if near and not _stands_elsewhere(path[-1], with_parts=not is_typo):
        return f"did you mean `{near[0]}`?"
    found = _beyond(place, path, value, valid, algorithm)
    if found:
        is_short = path[1:] and 0 < len(valid) <= FEW_NAMES
        return f"{found} valid here: {', '.join(valid)}" if is_short else found.rstrip(";")
    return did_you_mean(path[-1], valid)


def _parted(
    leaves: Iterable[Leaf], valid: Sequence[str], algorithm: str | None, peer: str
) -> tuple[list[Leaf], list[Leaf]]:
    """Return the fields of which the tables say what they are called, each behind the name of the peer whose
    rows alone are meant if there is one, and the other ones."""
    parts: tuple[list[Leaf], list[Leaf]] = ([], [])
    for path, value in leaves:
        sought = (peer, *path) if peer else path
        is_known = _is_translated(sought, valid, algorithm)
        parts[not is_known].append((sought if is_known else path, value))
    return parts


def _within_arguments(path: tuple[str, ...]) -> str:
    """Return the name of a field without the section of arguments that it is in."""
    return ".".join(path[1:] if path[0] in SECTIONS_OF_ARGUMENTS else path)


def _beyond(
    place: str, path: tuple[str, ...], value: Any, valid: Sequence[str], algorithm: str | None
) -> str:
    """Return what a message says about fields outside the path's own section: a name of a peer's if it is the
    most similar one of all, or else the fields that `_elsewhere` finds; "": nothing."""
    last = _key(path[-1])
    found = _elsewhere(path, valid, algorithm)
    ours = [*valid, *(name.rpartition(".")[2] for name in found)]
    theirs = difflib.get_close_matches(last, names(), n=1, cutoff=_LEAST_SIMILAR)
    if (
        theirs
        and theirs[0] != path[-1].replace("-", "_")
        and _similarity(last, theirs) > _similarity(last, ours)
        and _is_translated((*path[:-1], theirs[0]), valid, algorithm)
    ):
        said = translated(place, [_meant(path, value, theirs[0], algorithm)], algorithm)
        return f"did you mean `{theirs[0]}`? {said};"
    if found:
        return _proposed(place, found)
    others = [name for name in _elsewhere(path, valid, None) if name.endswith(f".{path[-1]}")]
    readers = ", ".join(readers_of(others[0])) if others else ""
    return f"`{others[0]}` is read by {readers}, not by {algorithm};" if readers else ""


def is_answered(name: str, value: Any, valid: Sequence[str], algorithm: str | None) -> bool:
    """Return True if the tables of names have an argument of `oat.Trainer`, or a field of its value."""
    value = _plain(name, value)
    cls, algorithm = _class_among([value], algorithm)
    return bool(cls) or any(_is_translated(path, valid, algorithm) for path, _ in _leaves((name,), value))


def described_object(place: str, path: tuple[str, ...], value: Any, algorithm: str | None) -> str:
    """Return the message about an object of another library's, such as a LoraConfig, in place of a section or
    a value of ours.

    Args:
        place, path, algorithm: as for `described`.
    """
    value = plain(value)
    cls, algorithm = _class_among([value], algorithm)
    section = path if path[-1] == "lora" else ("args",)
    leaves = [leaf for leaf in _leaves(section, value) if _is_translated(leaf[0], [], algorithm)]
    wrong = f"{place}: `{_name(path)}` takes no object of another library"
    return (
        f"{wrong}; {translated(place, leaves, algorithm, cls)}"
        if leaves or cls
        else f"{wrong} (docs/names.md)"
    )


def _plain(name: str, value: Any) -> Any:
    """Return the value of a field as plain data; of an object that has all arguments, its attributes."""
    return plain(value, is_section=name in SECTIONS_OF_ARGUMENTS)


def _is_ours(path: tuple[str, ...]) -> bool:
    """Return True for a setting of ours, if only of another algorithm or engine than the run's."""
    return ".".join(path[1:]) in fields_of_parts(path[0])


def _strangers(paths: Sequence[tuple[str, ...]], algorithm: str | None) -> str:
    """Return what a message says about settings of ours that other algorithms than the run's read; "": there
    are none."""
    found = [".".join(path) for path in paths if _is_ours(path) and readers_of(".".join(path))]
    said = [f"`{name}` is read by {', '.join(readers_of(name))}" for name in found[:_MOST]]
    return f" ({'; '.join(said)}; not by {algorithm})" if said else ""


def _nested(sections: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return fields in sections within each other."""
    return {sections[0]: _nested(sections[1:], fields)} if sections else fields


def _key(name: str) -> str:
    """Return a name in the form in which similar ones are sought."""
    return name.replace("-", "_").lower()[:_LONGEST]


def _name(path: Sequence[str]) -> str:
    return escaped(shortened(".".join(path), 2 * _LONGEST))


def _similarity(name: str, others: Sequence[str]) -> float:
    """Return the largest similarity of a name with others, as `difflib` has it."""
    return max((difflib.SequenceMatcher(None, other, name).ratio() for other in others), default=0.0)


def _stands_elsewhere(name: str, *, with_parts: bool) -> bool:
    """Return True if a field of ours has this name.

    Args:
        with_parts: False: only fields that are known without importing our parts count.
    """
    return any(name == each.rpartition(".")[2] for each in field_names(with_parts=with_parts))


def field_names(cls: Any = Config, above: str = "", *, with_parts: bool = True) -> Iterator[str]:
    """Yield the dotted names of the fields in all sections, and of the settings of our algorithms and
    engines."""
    types = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        name = f"{above}{f.name}"
        parts = [
            t for t in (types[f.name], *getattr(types[f.name], "__args__", ())) if dataclasses.is_dataclass(t)
        ]
        if f.name != "options" and (above or not parts):
            yield name
        for part in parts:
            yield from field_names(part, f"{name}.")
        if cls is Config and with_parts:
            yield from (f"{name}.{field}" for field in fields_of_parts(f.name))


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[Leaf]:
    """Yield a field and its value or, if the value is a section that no table has as a whole, those of its
    fields. Of a section that a table has as a whole, such as `model_init_kwargs`, those of its fields that a
    table has come first."""
    section = _fields_of(value)
    if section and (path[-1] == "args" or not _is_known(path) or _is_listed_within(path, section)):
        for name, part in section.items():
            yield from _leaves((*path, str(name)), part)
        return
    inner = section if path[-1].replace("-", "_") in ARGUMENTS else {}
    known = [leaf for name, part in inner.items() for leaf in _leaves((*path, str(name)), part)]
    known = [leaf for leaf in known if find(leaf[0], None) and len(leaf[0]) == len(path) + 1]
    yield from known
    if not known or len(known) < len(section):
        yield path, value


def _flat(first: list[Leaf], rest: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
    """Return the fields of a tree with each section that no table has as one, if names of a peer stand
    beside it: what is in such a section, as the seed of a mixture, is not what it is beside it."""
    if not any(len(path) == 1 and find(path, None) for path, _ in first + rest):
        return first, rest
    found = []
    for leaves in (first, rest):
        own = {path if _is_own(path) else path[:1]: value if _is_own(path) else ... for path, value in leaves}
        found.append([*own.items()])
    return found[0], found[1]


def _is_own(path: tuple[str, ...]) -> bool:
    """Return True if a name is meant by itself, or together with its sections."""
    if len(path) == 1 or path[0] in SECTIONS_OF_ARGUMENTS or path[-2].replace("-", "_") in ARGUMENTS:
        return True
    rows = find(path, None)
    return bool(rows) and ("." in rows[0].field or is_listed(path))


def _is_known(path: tuple[str, ...]) -> bool:
    """Return True if a table has a name with those of its sections that are no section of arguments."""
    return any(
        is_listed(path[start:])
        for start in range(len(path))
        if start == 0 or path[start - 1] in SECTIONS_OF_ARGUMENTS
    )


def _is_listed_within(path: tuple[str, ...], section: Mapping[Any, Any]) -> bool:
    """Return True if a table has a field of a section as a whole, such as `reward.remote_url`."""
    return any(
        _is_known((*path, str(name))) or _is_listed_within((*path, str(name)), _fields_of(part))
        for name, part in section.items()
    )


def _fields_of(value: Any) -> Mapping[str, Any]:
    """Return the fields of a section; of an object, those that the user set."""
    return value if isinstance(value, Mapping) else {}


def _class_among(values: Sequence[Any], algorithm: str | None) -> tuple[str | None, str | None]:
    """Return the name of the first class of another library's that one of the objects has, and the run's
    algorithm; if that is not of the class's family, it is the class's. (None, algorithm): none has one."""
    for named in (value.classes for value in values if isinstance(value, Fields)):
        own = algorithm_of(named)
        if own is not None:
            cls = next(name for name in named if algorithm_of([name]))
            return cls, algorithm if family_of(algorithm) == family_of(own) else own
    return None, algorithm


def _is_translated(path: tuple[str, ...], valid: Sequence[str], algorithm: str | None) -> bool:
    """Return True if the tables say what a field is called. A name in common use, which they have without its
    section, says nothing in a section aside, or where the section has a field of a similar name."""
    rows = rows_of(path, algorithm)
    if path[0] in FILES.values():
        return bool(rows)
    if _is_ours(path):
        return any(row.settings and all(is_read(each, algorithm) for each in row.settings) for row in rows)
    is_common = len(path) > 1 and bool(rows) and not rows[0].peer and not is_listed(path)
    settings = [setting.split(".") for row in rows for setting in row.settings]
    if not is_common or path[0] in [setting[0] for setting in settings]:
        return bool(rows)
    is_aside = path[0] in _ASIDE and any(len(setting) > 1 for setting in settings)
    return not is_aside and not _within(path[-1].replace("-", "_"), valid)


def _within(name: str, valid: Sequence[str]) -> list[str]:
    """Return the field, if there is one, whose words are among those of a name."""
    words = {*name.split("_")}
    return [field for field in valid if {*field.split("_")} < words][:1]


def _of_arguments(
    place: str,
    path: tuple[str, ...],
    section: Mapping[str, Any],
    valid: Sequence[str],
    algorithm: str | None,
    guesses: Mapping[str, Any],
) -> str:
    """Return the message about a section of which no table has a field, and one at most is similar to a
    name."""
    name = next(iter(guesses), next(iter(section)))
    wrong = f"{escaped(place)}: nothing reads the field `{_name((*path, name))}`"
    found = _beyond(place, (name,), section.get(name), [], algorithm)
    said = f"there is no section `{path[-1]}`"
    return f"{wrong}; {found} {said}" if found else f"{wrong}; {said}; valid: {', '.join(valid)}"


def _guesses(
    leaves: Sequence[Leaf],
    path: tuple[str, ...],
    valid: Sequence[str],
    algorithm: str | None,
    is_section: bool,
) -> dict[str, tuple[Any, str]]:
    """Return the fields that no table has, but which are similar to a name: for each its value, and the name
    of a peer's or of ours that is the most similar one.

    Args:
        path: the path of the first unknown field.
        valid: the fields of its section.
        is_section: it is a section of arguments, so the fields stand in it.
    """
    found = {}
    for where, value in leaves[:_MOST_GUESSES]:
        section = () if is_section else path[:-1]
        meant = _guess((*section, where[-1]), [] if is_section else valid, algorithm)
        if meant:
            found[where[-1]] = (_meant(where, value, meant, algorithm)[1], meant)
    return found


def _meant(path: tuple[str, ...], value: Any, name: str, algorithm: str | None) -> Leaf:
    """Return the field that the user may have meant by an unknown one, with its value if a message may show
    that."""
    rows = rows_of((name,), algorithm) if "." not in name else ()
    place = (name,) if rows else (*path[:-1], name)
    return place, unlisted(path[-1], value, name, rows)


def _guess(path: tuple[str, ...], valid: Sequence[str], algorithm: str | None) -> str:
    """Return the name that is most similar to an unknown field's: a peer's, or one of ours with its section;
    "": none is."""
    last = _key(path[-1])
    section = ".".join(path[:-1])
    if _is_ours(path):
        return ""
    near = difflib.get_close_matches(last, valid, n=1, cutoff=_LEAST_SIMILAR)
    ours = [f"{section}.{name}".strip(".") for name in near] + _elsewhere(path, valid, algorithm)[:1]
    theirs = difflib.get_close_matches(last, names(), n=1, cutoff=_LEAST_SIMILAR)
    known = [name for name in theirs if _is_translated((*path[:-1], name), valid, algorithm)]
    return max([*ours, *known], key=lambda name: _similarity(last, [name.rpartition(".")[2]]), default="")


def _proposed(place: str, found: Sequence[str]) -> str:
    written = f" (from Python: {arguments(dict.fromkeys(found[:1], ...))})" if is_python(place) else ""
    return f"did you mean {' or '.join(f'`{name}`' for name in found)}{written}?"


def _is_said(name: str, path: tuple[str, ...], leaves: Sequence[Leaf], algorithm: str | None) -> bool:
    """Return True if the tables propose the field with this name in the path's section."""
    ours = ".".join((*path[:-1], name))
    return any(ours in row.settings for leaf, _ in leaves for row in rows_of(leaf, algorithm))


def _elsewhere(path: tuple[str, ...], valid: Sequence[str], algorithm: str | None) -> list[str]:
    """Return the dotted names of at most `_MOST` fields of other sections that the run reads. The user may
    have meant one of these fields.

    They are the fields whose last part is equal to that of `path`. If there are none, they are the fields
    with the most similar last part. But if a field of the path's own section has a similar name, return none.

    Args:
        valid: the fields of the path's own section.
        algorithm: name of the run's algorithm; None: settings of every algorithm are proposed.
    """
    known = [
        name
        for name in dict.fromkeys(field_names())
        if name.rpartition(".")[0] != ".".join(path[:-1]) and is_read(name, algorithm)
    ]
    lasts = [name.rpartition(".")[2] for name in known]
    last = _key(path[-1])
    nearest = [path[-1]]
    if path[-1] not in lasts and not difflib.get_close_matches(last, valid, n=1):
        nearest = difflib.get_close_matches(last, lasts, n=1, cutoff=_LEAST_SIMILAR)
    return [name for name, last in zip(known, lasts, strict=True) if last in nearest][:_MOST]
