"""The formats of records, and the columns that hold the prompt and the responses. ShareGPT's format and TRL's
formats (huggingface.co/docs/trl/dataset_formats), plain or conversational, are read without conversion.

| format | columns | the prompt | recorded responses |
| --- | --- | --- | --- |
| prompt-only | `prompt` | that column | none |
| prompt-completion | `prompt`, `completion` | that column | `completion` |
| preference | `prompt`, `chosen`, `rejected` | that column | `chosen`, `rejected` |
| preference with an implicit prompt | `chosen`, `rejected` | the common beginning | the rest of both |
| unpaired preference | `prompt`, `completion`, `label` | that column | `completion`; its score is the label |
| stepwise supervision | `prompt`, `completions`, `labels` | that column | none: `completions` is not read |
| language modelling | `messages` | messages before the first learned one | `completion`: the rest |
| language modelling, plain text | `text` | none | `completion`: the text |

The columns:

* A record may have `messages` or ShareGPT's `conversations` instead of `prompt`. If it has no column with a
  response, the last message decides the format: language modelling if this message is the assistant's,
  prompt-only otherwise.
* A message is {"role", "content"} or ShareGPT's {"from", "value"}.
* The column `label` holds true (score 1) or false (score 0).
* In some preference data, such as UltraFeedback, the prompt is a text and both responses are complete
  conversations. Then, as in TRL, the prompt is the common beginning of the two conversations.
* The first well-formed record decides the format of its source. A later record that lacks a column that is
  read is malformed.
* TRL's names are the defaults of settings, so the resolved configuration shows which columns are read.

Departures from TRL:
1. Only the assistant's messages of a conversation are learned. A message of weight 0 (OpenAI's `weight`) is
   not learned. An assistant's message before the first message of a user or a tool is part of the prompt.
2. In the format language modelling, the assistant's last message is dropped if the run reads no recorded
   responses: the policy answers instead. The prompt then has all earlier messages.
3. The columns of `_UNRENDERED`, such as `tools`, are accepted and not rendered. The template also gets
   further fields of a message. The text in a column `system`, as in ShareGPT's format, is the system message
   of a prompt of messages that has none.
4. A column that the run does not read may be missing, and may hold anything that can be stored.
5. A response may be an empty text or one empty message, because a policy may end immediately. An empty
   message among several is refused.

Not handled: images. A record with the column `text` has no prompt; if the policy is to continue texts, set
`prompt_key: text`.

The end of an implicit prompt: the place at which two texts that begin alike are split into a prompt and
two responses.

The prompt is at most the common beginning of both texts. It ends

* not inside a word: "the mat" and "the man" share "the", not "the ma". A number such as 3.14 and a word such
  as don't are words too. Scripts without blanks between words are split between any two characters;
* where the tokenizer splits both texts. Otherwise no ids of a response could follow those of the prompt as
  they do in the text (`text/joining.py`);
* before a blank rather than behind it, as in TRL's `extract_prompt`. Then the blank belongs to the responses.

If no place is right for the tokenizer, the last one that splits no word is taken. If there is none, the texts
have no prompt.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Protocol

from oat.data.messages import (
    KINDS,
    OWN_FIELDS,
    as_prompt,
    conversation_of,
    ending,
    first_learned,
    is_conversation,
    kind_of,
    listed,
    messages_of,
    response_of,
    role_of,
    with_system,
)
from oat.errors import DataError, did_you_mean
from oat.types import Message, Prompt

Border = Callable[[str, str], bool]
"""A function that says whether a tokenizer splits the text that two texts make together between the two."""

_WORD = re.compile(r"\w[\w\u200d\ufe0f]*(?:(?:['\u2019]|(?<=\d)[.,](?=\d))\w+)*")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""A character of a script without blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_MOST_PLACES = 64
_REACH = 2048
"""Number of characters before the end of the common beginning among which a place is looked for."""


def implicit_end(first: str, second: str, is_border: Border) -> int:
    """Return the number of characters of the prompt that two texts share, 0 if they share no word; see the
    head of this file."""
    common = next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    places = [place for place in _places(first, second, common) if first[:place].strip()]
    for place in places[:_MOST_PLACES]:
        if all(is_border(text[:place], text[place:]) for text in (first, second)):
            return place
    return places[0] if places else 0


def _places(first: str, second: str, common: int) -> Iterator[int]:
    """Yield the places up to `common`, from the last, at which neither text has a word."""
    start = max(0, common - _REACH)
    within = _within_words(first, start, common) | _within_words(second, start, common)
    seen = dict[int, None]()
    for place in range(common, start, -1):
        for end in (_before_blank(first, place), place):
            if place not in within and end not in seen:
                seen[end] = None
                yield end


def _before_blank(text: str, place: int) -> int:
    return place - text[:place].endswith(" ")


def _within_words(text: str, start: int, most: int) -> set[int]:
    """Return the places from `start` to `most` at which a word, or a character with its marks, would be
    split."""
    within = set[int]()
    for word in _WORD.finditer(text, start):
        if word.start() > most:
            break
        within |= {
            place
            for place in range(word.start() + 1, word.end())
            if not any(map(_UNSPACED.match, text[place - 1 : place + 1]))
        }
    places = range(max(1, start), min(most + 1, len(text)))
    return within | {place for place in places if _continues(text, place)}


def _continues(text: str, place: int) -> bool:
    """Return True if the character at a place belongs to the one before it. Vowel signs, as in Hindi, and
    accents are marks. A letter behind one goes on with the word, which `_WORD` does not know."""
    before, after = text[place - 1], text[place]
    return (
        before == "\u200d"
        or after in "\u200d\ufe0f"
        or _is_mark(after)
        or (_is_mark(before) and bool(re.match(r"\w", after)) and not _UNSPACED.match(before))
    )


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


_CONVERSATIONS = ("messages", "conversations")
_UNRENDERED = ("tools", "functions", "documents", "chat_template_kwargs", "system", "system_prompt")
"""Columns that a template may be given in other libraries."""
_MAX_DEPTH = 64
_TRUTHS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}

PROMPT_ONLY = "prompt-only"
PREFERENCE = "preference"
UNPAIRED = "unpaired preference"
IMPLICIT = "preference with an implicit prompt"
CONVERSATION = "language modelling"
TEXT = "language modelling, plain text"


@dataclass(frozen=True)
class Format:
    """The format of a source's records.

    Attributes:
        name: name of the format in the table at the head of this file.
        columns: columns that a record of this format must have.
        prompt: column of the prompt; None if the format has no column for the prompt.
    """

    name: str
    columns: tuple[str, ...]
    prompt: str | None = None


class Layout:
    """The columns that hold the prompt, the reference answer and the responses in the records of a source.

    Args:
        prompt_key: column of the prompt, or of a conversation.
        reference_key: column of the reference answer, which is a string, a number, or a response.
        responses: columns of the recorded responses; empty if none are read. If `score_key` is None, the
            first response counts as the best.
        score_key: column of the responses' scores; None: see `scores_of`.
        numbers: further columns that must hold a number in every record; for each of them, the name of the
            setting that chose it, for messages.

    Attributes:
        format: format of all records. The method `prompt` sets it at the first well-formed record; before,
            it is None.
        is_border: function that says where the tokenizer can split a text (`Renderer.is_border`). A set of
            prompts that are rendered sets it.
    """

    def __init__(
        self,
        prompt_key: str = "prompt",
        reference_key: str | None = None,
        responses: Sequence[str] = (),
        score_key: str | None = None,
        numbers: Mapping[str, str] | None = None,
    ):
        self.prompt_key = prompt_key
        self.reference_key = reference_key
        self.responses = tuple(responses)
        self.score_key = score_key
        self.numbers = dict(numbers or {})
        self.format: Format | None = None
        self.is_border: Border = _anywhere

    def prompt(self, record: Any, where: str, row: int, occurrence: int) -> Prompt:
        """Return the prompt of a record. Its `columns` are those of the record, without the prompt. If one
        column holds the prompt and a response, the response gets a column of its own.

        In the result, each response is a string, or a list of messages without the prompt's messages. Such a
        message is a dict of "role", "content" and further fields.

        Args:
            where: the record's place, for messages.
            row, occurrence: the fields `row` and `occurrence` of the result.

        Raises:
            DataError: the record is malformed, or not of the source's format.
        """
        record = checked(record, where)
        form = self.format or self._recognised(record, where)
        messages, columns = self._split(record, form, where)
        for name in self.responses:
            columns[name] = response_of(
                _field(columns, name, where, "prompts.responses"), messages, f"{where}: field {name!r}"
            )
        if self.responses:
            if form.name == UNPAIRED and len(self.responses) == 1 and self.score_key is None:
                _field(columns, "label", where, "prompts.score_key")
            scores_of(columns, self.responses, self.score_key, where)
        for name, setting in self.numbers.items():
            value = _field(columns, name, where, setting)
            number = None if isinstance(value, bool) else number_of(value)
            if number is None:
                raise DataError(
                    f"{where}: field {name!r}: expected a number ({setting}), got {str(value)[:80]!r}; "
                    "mend the record, or remove it"
                )
            columns[name] = number
        reference = self._reference(columns, messages, where)
        self.format = form
        return Prompt(
            row,
            occurrence,
            with_system(messages, columns.get("system")) if self._has_messages(record, form) else messages,
            reference,
            columns,
            any(is_conversation(record.get(name)) for name in form.columns),
        )

    @property
    def _pair(self) -> tuple[str, str]:
        """The two columns of a preference: the two of `responses`, or `chosen` and `rejected` if `responses`
        does not name two."""
        return (self.responses[0], self.responses[1]) if len(self.responses) == 2 else ("chosen", "rejected")

    @property
    def _single(self) -> str:
        return self.responses[0] if len(self.responses) == 1 else "completion"

    def _recognised(self, record: Mapping[str, Any], where: str) -> Format:
        key = next(
            (
                name
                for name in (self.prompt_key, *(_CONVERSATIONS if self.prompt_key == "prompt" else ()))
                if name in record
            ),
            None,
        )
        known = _formats(key or self.prompt_key, self._pair, self._single)
        if self.responses and not {*self.responses} & {*self._pair}:
            known = tuple(f for f in known if f.name != PREFERENCE)
        found = next(
            (f for f in known if (key is None) == (f.prompt is None) and {*f.columns} <= record.keys()), None
        )
        if found is None or (key is None and self.prompt_key != "prompt"):
            nearest = max(
                known, key=lambda f: len({*f.columns} & record.keys()) - len({*f.columns} - record.keys())
            )
            raise DataError(
                f"{where}: field {self.prompt_key!r}: expected in every record, got the columns "
                f"{listed(record)}; the nearest format is {nearest.name} ({', '.join(nearest.columns)}): set "
                f"`prompt_key` or add the field ({_hint(self.prompt_key, record)})"
            )
        whole: Any = None if key in (None, "prompt") else record[key]
        is_answered = is_conversation(whole) and role_of(whole[-1]) == "assistant"
        return (
            Format(CONVERSATION, found.columns, key) if found.name == PROMPT_ONLY and is_answered else found
        )

    def _split(
        self, record: dict[str, Any], form: Format, where: str
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Return the messages of the prompt, and the record's columns without the prompt. If one column holds
        the prompt and a response, the response gets a column of its own in the result."""
        columns = {name: value for name, value in record.items() if name != form.prompt}
        if self._is_whole(record, form):
            return self._implicit(columns, where)
        if form.prompt is not None:
            place = f"{where}: field {form.prompt!r}"
            value = _field(record, form.prompt, where, "prompt_key")
            if form.name != CONVERSATION:
                return as_prompt(value, place), columns
            messages = conversation_of(value, place)
            if messages[-1].role != "assistant":
                raise DataError(
                    f"{place}: expected the last message from assistant, as in the first record, got "
                    f"{messages[-1].role}; remove the record"
                )
            start = first_learned(messages) if self.responses else len(messages) - 1
            columns[self._single] = [message.plain for message in messages[start:]]
            return ending(messages[:start], place), columns
        if form.name == TEXT:
            if not self.responses:
                raise DataError(
                    f"{where}: field 'text': expected a prompt, got a whole text; set `prompt_key: text` "
                    "to have texts continued"
                )
            text = columns.pop("text", None)
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{where}: field 'text': expected text, got "
                    f"{kind_of(text) if not isinstance(text, str) else 'none'}; remove the record"
                )
            return (), {**columns, self._single: text}
        return self._implicit(columns, where)

    def _is_whole(self, record: Mapping[str, Any], form: Format) -> bool:
        """Return True if the prompt of a preference is a text, `responses` names two columns, and both
        columns hold complete conversations: the first message of each is not the assistant's."""
        pair = [record.get(name) for name in self._pair]
        is_beside = (
            form.name == PREFERENCE
            and self.responses == self._pair
            and isinstance(record.get(form.prompt or ""), str)
        )
        return is_beside and all(
            isinstance(value, list)
            and is_conversation(value)
            and role_of(value[0]) not in (None, "assistant")
            for value in pair
        )

    def _has_messages(self, record: Mapping[str, Any], form: Format) -> bool:
        """Return True if the prompt of a record is made of messages, and not of a text."""
        is_common = form.prompt is None or self._is_whole(record, form)
        return isinstance(record.get(self._pair[0] if is_common else form.prompt or ""), list)

    def _implicit(self, columns: dict[str, Any], where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Return the prompt of a preference, which is the common beginning of both responses, and the columns
        with this beginning cut off from the responses. The common beginning of two texts ends at
        `implicit_end`."""
        pair = [_field(columns, name, where, "prompts.responses") for name in self._pair]
        place = f"{where}: fields {self._pair[0]!r} and {self._pair[1]!r}"
        if all(isinstance(value, str) for value in pair):
            first, second = pair
            size = implicit_end(first, second, self.is_border)
            if not first[:size].strip():
                raise DataError(
                    f"{place}: expected texts that begin with a common prompt, got none; write the prompt "
                    "as a field of its own"
                )
            return (Message("user", first[:size]),), {
                **columns,
                self._pair[0]: first[size:],
                self._pair[1]: second[size:],
            }
        first, second = (
            conversation_of(value, f"{where}: field {name!r}")
            for name, value in zip(self._pair, pair, strict=True)
        )
        size = sum(
            1 for _ in takewhile(lambda both: both[0] == both[1], zip(first[:-1], second[:-1], strict=False))
        )
        if not size:
            raise DataError(
                f"{place}: expected conversations that begin with a common prompt, got none; write the "
                "prompt as a field of its own"
            )
        rest = {
            name: [message.plain for message in messages[size:]]
            for name, messages in zip(self._pair, (first, second), strict=True)
        }
        return ending(first[:size], place), {**columns, **rest}

    def _reference(self, columns: Mapping[str, Any], messages: tuple[Message, ...], where: str) -> str | None:
        if self.reference_key is None:
            return None
        place = f"{where}: field {self.reference_key!r}"
        if self.reference_key not in columns:
            raise DataError(
                f"{place} (prompts.reference_key): expected in every record, got none; add the field, or "
                f"name another column ({_hint(self.reference_key, columns)})"
            )
        value = columns[self.reference_key]
        if isinstance(value, dict) or is_conversation(value):
            value = messages_of(value, messages, place)[-1].content
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(
                f"{place}: expected a string or a number, got {kind_of(value)}; write the answer as a string"
            )
        return str(value)


class Reads(Protocol):
    """A function that returns True if the template reads the field of messages with the given name."""

    def __call__(self, field: str, *, beside_calls: bool = False) -> bool:
        """See `ChatTemplate.reads`."""


def unrendered(record: Mapping[str, Any], prompt: Prompt, reads: Reads) -> set[str]:
    """Return the names of a record's parts that are not rendered: columns such as `tools`, and the fields of
    messages that the template does not read. The field `weight` counts as read, because it sets the loss
    mask; a column counts as read if its text is a message of the prompt.

    Args:
        prompt: the record's prompt.
        reads: returns True if the template reads the field with the given name, in a message with calls of
            tools or without.
    """
    fields = {
        (name, bool(entry.get("tool_calls")))
        for value in record.values()
        if is_conversation(value)
        for entry in value
        if role_of(entry)
        for name, part in entry.items()
        if part is not None and name not in OWN_FIELDS and name != "weight"
    }
    names = {name for name, has_calls in fields if not reads(name, beside_calls=has_calls)}
    said = [None, *(message.content.strip() for message in prompt.messages)]
    given = {name: record.get(name) for name in _UNRENDERED}
    return names | {
        name
        for name, value in given.items()
        if value and (value.strip() or None if isinstance(value, str) else value) not in said
    }


def scores_of(
    columns: Mapping[str, Any], responses: Sequence[str], score_key: str | None, where: str
) -> list[float]:
    """Return one score per response of a record:

    * If `score_key` names a column: the numbers in this column.
    * If there is one response and a column `label`: 1 for a true label, 0 for a false label.
    * Otherwise: 1 for the first response, 0 for each further response.

    Raises:
        DataError: the column of scores does not hold one number per response, or a label is neither true nor
            false.
    """
    if score_key is None and len(responses) == 1 and "label" in columns:
        label = _TRUTHS.get(str(columns["label"]).lower())
        if label is None:
            got = repr(columns["label"])[:40]
            raise DataError(
                f"{where}: field 'label': expected true or false, got {got}; rename the column, or set "
                "`prompts.score_key`"
            )
        return [label]
    if score_key is None:
        return [1.0] + [0.0] * (len(responses) - 1)
    value = _field(columns, score_key, where, "prompts.score_key")
    scores = [number_of(score) for score in (value if isinstance(value, list) else [value])]
    found = [score for score in scores if score is not None]
    if len(scores) != len(responses) or len(found) != len(scores):
        raise DataError(
            f"{where}: field {score_key!r}: expected {len(responses)} numbers, one a response, got "
            f"{str(value)[:80]}; mend the record"
        )
    return found


def number_of(value: Any) -> float | None:
    """Return a value as a finite number: a number, a number written as text (as in CSV), 1 for true, or 0 for
    false. Return None for any other value."""
    truth = _TRUTHS.get(str(value).lower())
    try:
        found = (
            math.nan if not isinstance(value, int | float | str) else float(value) if truth is None else truth
        )
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _formats(prompt: str, pair: tuple[str, str], single: str) -> tuple[Format, ...]:
    """Return the known formats, with a layout's names of columns. The formats with a column for the prompt
    come before those without. In each of these two parts, formats with more columns come first."""
    return (
        Format(PREFERENCE, (prompt, *pair), prompt),
        Format(UNPAIRED, (prompt, single, "label"), prompt),
        Format("stepwise supervision", (prompt, "completions", "labels"), prompt),
        Format("prompt-completion", (prompt, single), prompt),
        Format(PROMPT_ONLY, (prompt,), prompt),
        Format(IMPLICIT, pair),
        Format(TEXT, ("text",)),
    )


def _anywhere(before: str, after: str) -> bool:
    return True


def checked(record: Any, where: str) -> dict[str, Any]:
    """Check that a record holds only plain values that can be stored, and return the record as a dict.

    Raises:
        DataError: the record is no mapping, or one of its fields holds a value that cannot be stored.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            f"{where}: expected a JSON object, got {kind_of(record)}; write {{...}} with the prompt as a "
            "field"
        )
    for name, value in record.items():
        trouble = (_trouble(name) if isinstance(name, str) else "a name that is no text") or _trouble(value)
        if trouble:
            raise DataError(
                f"{where}: field {repr(name)[:80]}: expected text and numbers that can be stored, got "
                f"{trouble}; remove it"
            )
    return dict(record)


def _trouble(value: Any, depth: int = 0) -> str | None:
    """Return a description of the first part of a value that cannot be stored; None if every part can be
    stored."""
    if depth > _MAX_DEPTH:
        return f"values nested deeper than {_MAX_DEPTH}"
    if type(value) not in KINDS:
        return f"a value of the type {type(value).__name__}"
    if isinstance(value, str):
        if "\0" in value:
            return "a NUL character"
        lone = next((c for c in value if "\ud800" <= c <= "\udfff"), None) if not value.isascii() else None
        return f"the lone surrogate U+{ord(lone):04X}" if lone else None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "a whole number beyond 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite, or too large for 64 bits"
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        return "a name that is no text"
    parts: list[Any] = (
        [*value.keys(), *value.values()]
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else []
    )
    return next((trouble for part in parts if (trouble := _trouble(part, depth + 1))), None)


def _field(record: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    if key not in record:
        raise DataError(
            f"{where}: field {key!r}: expected in every record, got none; set `{setting}` or add the "
            f"field ({_hint(key, record)})"
        )
    return record[key]


def _hint(name: str, record: Mapping[str, Any]) -> str:
    return did_you_mean(name, (each[:80] for each in islice(record, 20)))
