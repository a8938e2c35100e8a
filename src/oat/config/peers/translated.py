"""What names of other libraries are called here, as text: one of them in sentences (`answer.py`), several in
lines."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oat.config.peers.adapters import ADAPTER, scaled
from oat.config.peers.answer import AS_DATASET, DATASET, Answer, Given, Leaf, sentences
from oat.config.peers.batches import (
    BETAS,
    SIZES,
    betas,
    optimiser_steps,
    part_of,
    rounded,
    step_of,
    undivided,
)
from oat.config.peers.claims import Settings, best, is_within, lost, rank
from oat.config.peers.copied import arguments, block, code, is_python, plain
from oat.config.peers.faults import fault_of, near_value, refused
from oat.config.peers.joined import DATA, SCHEDULE, SINKS, configured, schedule_of, sinks_of
from oat.config.peers.kept import is_given, with_own
from oat.config.peers.kl import KL, kl_of
from oat.config.peers.objects import GIVEN
from oat.config.peers.rewards import REWARDS, oracle_of
from oat.config.peers.shown import listed
from oat.config.peers.switches import lacking
from oat.config.peers.table import LEFT_OUT, Row, family_of, find, is_read, values
from oat.config.peers.theirs import version_of, versions

_MOST_LINES = 60
"""Largest number of fields that a message translates."""
_WIDEST = 36
"""Largest number of characters before an arrow that is aligned with the others."""
_COMPARES = re.compile(r"\b[Hh]ere\b|\b[Tt]here\b(?! (?:is|are|was|were)\b)")
_OF_DEFAULTS = re.compile(r"^[Tt]he default|\bby default\b")
_ONE_DEVICE = "on one device"
_DEFAULTS = "; what TRL does by default, and differs here: docs/names.md#trls-defaults"
_MARKED = (
    "; a line with `TRL's default` is what TRL does without being told, and differs here: "
    "docs/names.md#trls-defaults"
)
Together = dict[str, tuple[Given, str, str]]
"""Settings that several fields decide together, by each of these fields: the settings, for all fields but the
first none; a remark; and the name of the first field."""


@dataclass(frozen=True)
class Beside:
    """What a message has beside the names that the tables have.

    Attributes:
        defaults: our settings for what a peer decides by default, which the user did not set.
        guesses: for each name that no table has, its value and the name that the user may have meant: one of
            a peer's, or one of ours with its section.
        note: a line on what nobody can tell from the names.
        worked_out: our settings for the user's fields that are worked out from more than these.
        own: what the user gave as sections of ours, which the block to copy keeps.
    """

    defaults: Given = field(default_factory=dict)
    guesses: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    note: str = ""
    worked_out: Given = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)


def rows_of(path: tuple[str, ...], algorithm: str | None) -> tuple[Row, ...]:
    """Return the rows of a field, but for rows that would only repeat its name."""
    own = ".".join(path).replace("-", "_")
    return tuple(row for row in find(path, algorithm) if row.settings != (own,))


def translated(
    place: str,
    leaves: Sequence[Leaf],
    algorithm: str | None,
    cls: str | None = None,
    beside: Beside = Beside(),
) -> str:
    """Return what fields are called here: one of them in sentences, several in lines, with what can be copied
    at the end. What several fields say about one setting is worked out together.

    Args:
        place: where they were set, which decides how settings are written.
        leaves: fields that a table has.
        algorithm: name of the run's algorithm; None: not known.
        cls: name of the class of a peer's whose fields they are; None: of none.
        beside: what else the message has.
    """
    is_alone = len(leaves) == 1 and not cls and not beside.guesses
    algorithm, answers = _answers(leaves, algorithm, is_alone=is_alone)
    answers = [_beside_own(answer, beside.own, algorithm) for answer in answers]
    peers = [peer for peer in versions() if any(each.row.peer == peer for each in answers)]
    of = f" ({', '.join(map(version_of, peers))})" if peers else ""
    together = _together(answers, algorithm, is_python=is_python(place))
    if is_alone and not together.keys() & REWARDS:
        return " ".join(sentences(place, answers[0])).rstrip(".") + of
    ours_of_class = _of_class(cls, answers)
    lines = [(f"{cls}", entry(place, ours_of_class))] if ours_of_class else []
    ours = {**_worked_out(answers, together, ours_of_class), **beside.worked_out}
    marked = [name for name in beside.defaults if name not in ours]
    ours |= {name: beside.defaults[name] for name in marked}
    if is_python(place) and algorithm and any(name.startswith("algorithm.") for name in ours):
        ours = {"algorithm.name": algorithm, **ours}  # an argument replaces the default `grpo`
    records = _records(place, answers, ours)
    whole, comments = with_own(place, {**ours, **records}, beside.own)
    comments |= dict.fromkeys((name for name in records if records[name] is GIVEN), AS_DATASET)
    lines += [_line(place, answer, together, ours) for answer in answers]
    lines += [
        (_named(place, name, value), _guessed(place, value, meant, algorithm))
        for name, (value, meant) in beside.guesses.items()
    ]
    wide = min(max(len(name) for name, _ in lines), _WIDEST)
    texts = [f"\n  {name:{wide}} -> {text}" for name, text in lines[:_MOST_LINES]]
    more = f"\n  ... and {len(lines) - _MOST_LINES} more" if lines[_MOST_LINES:] else ""
    wrong = [answer.row.field for answer in answers if answer.fault or answer.near] + [*beside.guesses]
    open_names = [name for name in _open_names(answers, together, ours) if not records or name != DATASET]
    copy = _to_copy(place, whole, marked, open_names, wrong, comments)
    note = f"\n{beside.note}" if beside.note else ""
    defaults = _MARKED if marked else _DEFAULTS if "TRL" in peers else ""
    end = f"\ndocs/names.md says more{of}{defaults}" if answers else ""
    return f"here these names are:{''.join(texts)}{more}{copy}{end}{note}"


def settings_of(leaves: Sequence[Leaf], algorithm: str) -> Given:
    """Return our settings for fields of a peer's, as far as they can be worked out; `...` is a value that the
    user has to choose. A field that no table has gives none."""
    chosen, answers = _answers([leaf for leaf in leaves if rows_of(leaf[0], algorithm)], algorithm)
    return _worked_out(answers, _together(answers, chosen, is_python=False), {})


def faulty(leaves: Sequence[Leaf], algorithm: str) -> set[str]:
    """Return the settings about which fields of a peer's say something that has to be worked out."""
    _, answers = _answers([leaf for leaf in leaves if rows_of(leaf[0], algorithm)], algorithm)
    return {
        setting
        for answer in answers
        if answer.given is None and answer.value is not None
        for setting in answer.row.settings
    }


def _together(answers: Sequence[Answer], algorithm: str | None, *, is_python: bool) -> Together:
    """Return the settings that several fields of TRL or peft decide together."""
    known = [answer for answer in answers if answer.row.peer in ("TRL", "peft")]
    given = {answer.row.field: answer.value for answer in known}
    raw = {answer.row.field: answer.raw for answer in answers}
    kl = {answer.row.field: answer.value for answer in answers if answer.row.field in KL}
    family = family_of(algorithm)
    step = step_of(given, algorithm) if family else None
    faults = {"algorithm.prompts": ...}, undivided(given, algorithm)
    groups = (
        (SIZES, faults if faults[1] else step and (step, _ONE_DEVICE)),
        (tuple(BETAS), betas(given)),
        (REWARDS, oracle_of(given, is_python=is_python)),
        (ADAPTER, scaled(given)),
        (DATA, configured(given)),
        (SCHEDULE, schedule_of(raw)),
        (SINKS, sinks_of(raw)),
        (KL, kl_of(kl)),
    )
    found: Together = {}
    for names, decided in groups:
        first, *others = [name for name in raw if name in names] or [""]
        if first and decided:
            found[first] = (*decided, first)
            found |= {name: ({}, "", first) for name in others}
    return found


def _of_class(cls: str | None, answers: Sequence[Answer]) -> Given:
    """Return our settings for the name of a class of a peer's, but for those that a field names."""
    named = values().get(("algorithm.name", cls or ""))
    if named is None or any("algorithm.name" in (answer.given or {}) for answer in answers):
        return {}
    said = {setting for answer in answers for setting in answer.given or {}}
    ours = named.converted(cls) or {}
    return {setting: value for setting, value in ours.items() if setting not in said}


def _worked_out(answers: Sequence[Answer], together: Together, begin: Given) -> Given:
    """Return all settings that fields give; a value that the user has to choose is `...`."""
    ours = dict(begin)
    for answer in answers:
        is_left = answer.others or answer.stranger or answer.row.field in together
        ours |= {} if is_left else answer.given or {}
    for answer in answers:
        is_right = answer.row.field in together and not answer.others and not answer.stranger
        ours |= together[answer.row.field][0] if is_right else {}
    return ours


def _records(place: str, answers: Sequence[Answer], ours: Given) -> Given:
    """Return our setting for the data that TRL's trainers take, from Python."""
    value = next((answer.value for answer in answers if answer.row.field == DATASET), None)
    if value is None or not is_python(place) or "prompts.path" in ours:
        return {}
    return {"prompts.path": value if isinstance(value, str) else GIVEN}


def _open_names(answers: Sequence[Answer], together: Together, ours: Given) -> list[str]:
    """Return the fields with a value whose settings have to be worked out by hand."""
    return [
        answer.row.field
        for answer in answers
        if answer.others
        or answer.end == "other"
        or (answer.given is None and answer.value is not None and not answer.is_decided)
        if answer.row.field not in together
        if answer.row.settings
        and not answer.stranger
        and not answer.fault
        and not answer.near
        and ours.get(answer.row.settings[0]) is not ...
        and not is_python(answer.row.settings[0])
    ]


def _line(place: str, answer: Answer, together: Together, ours: Given) -> tuple[str, str]:
    """Return a field with its value, and what stands behind the arrow. The value of a field that gives no
    setting is left out, since it may be a secret.

    Args:
        ours: the settings that all fields give.
    """
    row = answer.row
    given = answer.given
    if answer.lacks or answer.near or answer.fault:
        return _unread(place, answer)
    if answer.others:
        meanings = (
            f"{', '.join(each.settings) or 'nothing'} in {each.groups[0]}" for each in (row, *answer.others)
        )
        return row.field, " or ".join(meanings)
    if row.field in together:
        given, remark, first = together[row.field]
        text = entry(place, given) if given else f"decided with {first}"
        return _named(place, row.field, answer.value), text + (f"  ({remark})" if remark else "")
    if given:
        differs = _differing(row.remark, ours) if row.is_told(answer.value, given) else ""
        remark = f"{answer.stranger} does not read it" if answer.stranger else differs
        remark = "; ".join(filter(None, (remark, answer.rounded)))
        return _named(place, row.field, answer.value), entry(place, given) + (
            f"  ({remark})" if remark else ""
        )
    if answer.is_decided:
        unread = f"no setting: {answer.stranger} does not read it"
        return (row.field, unread) if answer.stranger else _lost(place, answer)
    if given is None and row.settings:
        return row.field, f"{', '.join(row.settings)}: {row.remark}"
    if row.settings and not row.is_told(answer.value, {}):
        return row.field, "no setting needed"
    return row.field, f"no setting{' needed' if row.settings else ''}: {row.remark}"


def _lost(place: str, answer: Answer) -> tuple[str, str]:
    """Return a field about whose settings others decide with its value, and what becomes of it."""
    row = answer.row
    if answer.end == "other":
        said = f"{', '.join(row.settings)}, but {answer.winner} says something else"
        return _named(place, row.field, answer.value), said
    if answer.end == "beside":
        is_told = row.told not in ("", "~") and row.is_told(answer.value, {})
        said = f"no setting beside {answer.winner}" + (f": {row.remark}" if is_told else "")
        return _named(place, row.field, answer.value), said
    return row.field, "said by the other names"


def _unread(place: str, answer: Answer) -> tuple[str, str]:
    """Return a field that gives no setting with its value, and why."""
    row = answer.row
    if answer.lacks:
        return row.field, f"no setting: {row.peer} {answer.lacks}"
    if answer.near:
        meant = entry(place, row.converted(answer.near) or {})
        return _named(place, row.field, answer.value), f"did you mean {answer.near}? {meant}".rstrip()
    said = f"{', '.join(row.settings)}, but the value {answer.fault}"
    return _named(place, row.field, answer.value), said


def _guessed(place: str, value: Any, meant: str, algorithm: str | None) -> str:
    """Return what stands behind the arrow of a name that no table has."""
    leaves = [((meant,), value)] if "." not in meant and rows_of((meant,), algorithm) else []
    _, answers = _answers(leaves, algorithm)
    return " ".join([f"did you mean {meant}?", *(_line(place, answer, {}, {})[1] for answer in answers)])


def _named(place: str, field: str, value: Any) -> str:
    if is_python(place):
        return f"{field}={code(value)}"
    return f"--{field} {plain(value)}" if place.startswith("--") else f"{field}: {plain(value)}"


def entry(place: str, ours: Mapping[str, Any]) -> str:
    """Return settings as they stand behind an arrow."""
    if is_python(place):
        return arguments(ours)
    if place.startswith("--"):
        return " ".join(f"--{name} {'...' if value is ... else plain(value)}" for name, value in ours.items())
    return ", ".join(f"{name}: {'...' if value is ... else plain(value)}" for name, value in ours.items())


def _differing(remark: str, ours: Given) -> str:
    """Return the first clause of a remark that says how the meaning differs; "": none does, with all of our
    settings."""
    clauses = re.split(r"; |\. ", remark.rstrip("."))
    found = next((each for each in clauses if _COMPARES.search(each) and not _OF_DEFAULTS.search(each)), "")
    unless = re.search(r"unless `([a-z_.]+)`", found)
    above_1 = re.search(r"With `([a-z_.]+)` above 1", found)
    is_said = (unless and unless[1] in ours) or (above_1 and above_1[1] not in ours)
    return "" if is_said else found


def _to_copy(
    place: str,
    ours: Given,
    marked: Sequence[str],
    open_names: Sequence[str],
    wrong: Sequence[str],
    comments: Mapping[str, str],
) -> str:
    """Return the settings with known values in a form that can be copied, and the names of the others.

    Args:
        marked: settings that a peer decides by default.
        open_names: fields whose settings the user has to work out.
        wrong: names and fields with values that the user has to correct.
        comments: comments on settings whose values cannot be written.
    """
    known = {name: value for name, value in ours.items() if value is not ... and not is_python(name)}
    if not known:
        return ""
    left = [name for name in ours if name not in known and not is_within(known, name)]
    parts = [f"choose {', '.join(left)}"] if left else []
    parts += [f"work out {', '.join(open_names)}"] if open_names else []
    parts += [f"correct {', '.join(wrong)}"] if wrong else []
    without = f" ({', and '.join(parts)} yourself)" if parts else ""
    return f"\nwrite{without}:{block(place, known, marked, comments)}"


def _answers(
    leaves: Sequence[Leaf], algorithm: str | None, *, is_alone: bool = False
) -> tuple[str | None, list[Answer]]:
    """Return the algorithm that fields name, or that of the run, and the answer about each field. About a
    setting that several fields name, one of them decides (`claims.best`).

    Args:
        is_alone: the user asks what a single field is called, so what TRL ignores has its settings too.
    """
    algorithm, found = _named_by(leaves, algorithm)
    theirs = {rows[0].field: value for rows, value in found if rows[0].peer == "TRL"}
    lacks = [lacking(rows[0].field, theirs, algorithm) if rows[0].peer == "TRL" else "" for rows, _ in found]
    steps = optimiser_steps(theirs)
    raw, found = found, [(rows, _shown(rows, value)) for rows, value in found]
    read = [not lack or is_alone for lack in lacks]
    claimed, faults, parts = _claimed(found, raw, read, theirs, algorithm)
    ranks = [rank(path, rows) for (path, _), (rows, _) in zip(leaves, found, strict=True)]
    claims = best(found, claimed, ranks)
    answers = []
    for place, (rows, value) in enumerate(found):
        settings = claimed[place]
        won = {each: ours for each, (ours, _) in (settings or {}).items() if claims[each][-1] == place}
        written = {each: ours for each, ours in won.items() if ours is not LEFT_OUT}
        given = None if settings is None else written
        end = None if won else lost(rows[0], value, settings, claims, claimed, ranks)
        is_decided = end is not None
        meant = [tuple(given)] if len(rows) == 1 and given else [row.settings for row in rows]
        are_read = any(all(is_read(setting, algorithm) for setting in each) for each in meant)
        is_asked = bool(given) or given is None or is_decided
        answers.append(
            Answer(
                rows[0],
                rows[1:],
                value,
                given,
                is_decided,
                "" if are_read or not is_asked else str(algorithm),
                faults[place],
                None if given is not None or rows[1:] else near_value(rows[0], value),
                parts[place] or (rounded(value, steps) if given and "=*/s" in rows[0].conversion else ""),
                lacks[place],
                raw[place][1],
                end[0] if end else "",
                found[end[1]][0][0].field if end and end[1] >= 0 else "",
            )
        )
    return algorithm, answers


def _claimed(
    found: Sequence[tuple[tuple[Row, ...], Any]],
    raw: Sequence[tuple[tuple[Row, ...], Any]],
    read: Sequence[bool],
    theirs: Given,
    algorithm: str | None,
) -> tuple[list[Settings | None], list[str], list[str]]:
    """Return for each field the settings about which it decides, what is wrong with its value, and how a
    share of the run became a number.

    Args:
        found: the rows and the value of each field.
        raw: the same with values that a message may not show.
        read: for each field, False if TRL ignores it.
        theirs: TRL's fields with their values.
    """
    claimed: list[Settings | None] = []
    faults, parts = [], []
    steps = optimiser_steps(theirs)
    for (rows, value), (_, given), is_meant in zip(found, raw, read, strict=True):
        number, said = part_of(rows[0].field, given, theirs) or (value, "")
        settings = rows[0].claimed(number, algorithm, steps) if is_meant else {}
        if said and settings is None:  # a share alone, such as warmup_ratio, has no other values
            settings = dict.fromkeys(rows[0].settings, (number, False))
        faults.append((fault_of(rows[0], given) or refused(settings or {})) if is_meant else "")
        claimed.append(None if faults[-1] else settings)
        parts.append(said)
    return claimed, faults, parts


def _beside_own(answer: Answer, own: Mapping[str, Any], algorithm: str | None) -> Answer:
    """Return an answer without the settings that give way to another name's and that the user set."""
    claimed = answer.row.claimed(answer.value, algorithm) or {}
    given = {
        setting: value
        for setting, value in (answer.given or {}).items()
        if not (value is not ... and claimed.get(setting, (0, False))[1] and is_given(setting, own))
    }
    return replace(answer, given=given) if given else answer


def _named_by(
    leaves: Sequence[Leaf], algorithm: str | None
) -> tuple[str | None, list[tuple[tuple[Row, ...], Any]]]:
    """Return the algorithm that fields name, or that of the run, and the rows and the value of each field. If
    a loss of TRL's is an algorithm of another family, the rows are those of TRL's class."""
    found = [(rows_of(path, algorithm), value) for path, value in leaves]
    named = [(rows[0].converted(value, algorithm) or {}).get("algorithm.name") for rows, value in found]
    ranked = sorted(
        (rank(path, rows), name)
        for (path, _), (rows, _), name in zip(leaves, found, named, strict=True)
        if isinstance(name, str) and family_of(name)
    )
    name = ranked[0][1] if ranked else None
    if name and (not family_of(algorithm) or family_of(name) == family_of(algorithm)):
        return name, [(rows_of(path, name), value) for path, value in leaves]
    is_loss = any(rows[0].field == "loss_type" for (rows, _), each in zip(found, named, strict=True) if each)
    return name if is_loss else algorithm, found


def _shown(rows: Sequence[Row], value: Any) -> Any:
    """Return a value if a message may show it as one of a field with these rows; otherwise `...`."""
    return value if any(listed(row, value) is not ... for row in rows) else ...
