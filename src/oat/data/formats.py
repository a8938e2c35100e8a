"""The formats of records: which columns hold the prompt and the responses. TRL's (huggingface.co/docs/trl/dataset_formats) are read as they
stand, plain or conversational, and so is ShareGPT's.

| format | columns | the prompt | recorded responses |
| --- | --- | --- | --- |
| prompt-only | `prompt` | that column | none |
| prompt-completion | `prompt`, `completion` | that column | `completion` |
| preference | `prompt`, `chosen`, `rejected` | that column | `chosen`, `rejected` |
| preference with an implicit prompt | `chosen`, `rejected` | what both begin with | what follows in each |
| unpaired preference | `prompt`, `completion`, `label` | that column | `completion`, worth 1 where the label is true, else 0 |
| stepwise supervision | `prompt`, `completions`, `labels` | that column | none: no algorithm here learns from steps |
| language modelling | `messages` | the messages before the assistant's first answer | `completion`: the rest, which ends with an assistant's |
| language modelling, plain text | `text` | none | `completion`: the text |

`messages` and ShareGPT's `conversations` also take the place of `prompt` where there is no such column. A message is {"role", "content"} or
ShareGPT's {"from", "value"}.

Where the prompt of a preference is a text and both responses are whole conversations, as in UltraFeedback, the prompt is what these begin with, as
TRL has it.

Departures from TRL:
1. Of a conversation the assistant's messages are learned, and nothing else of it, but for those of weight 0 (OpenAI's `weight`). What it says before
   anybody has asked is part of the prompt. Where no recorded responses are read, the last message is what the policy says instead.
2. The column `tools` is accepted and not rendered. What messages say beside role and text is handed to the template.
3. Columns that the run does not read are not held against the format.

Not handled: images; texts to continue online without `prompt_key: text`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from typing import Any

from oat.errors import DataError, did_you_mean
from oat.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant", **{role: role for role in ROLES}}
_OWN_FIELDS = frozenset({"role", "content", "from", "value"})
"""Of a message: its role and its text, by the names that they may have."""
_CONVERSATIONS = ("messages", "conversations")
_INSTEAD = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that do for its text."""
_MAX_DEPTH = 64
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
_TRUTHS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}

PROMPT_ONLY, PREFERENCE, UNPAIRED, IMPLICIT, CONVERSATION, TEXT = (
    "prompt-only",
    "preference",
    "unpaired preference",
    "preference with an implicit prompt",
    "language modelling",
    "language modelling, plain text",
)


@dataclass(frozen=True)
class Format:
    """What a source's records are.

    Attributes:
        name: as the head of this file names it.
        columns: that tell it.
        prompt: the column of the prompt, or None.
    """

    name: str
    columns: tuple[str, ...]
    prompt: str | None = None


class Layout:
    """Where the records of one source have their prompt, reference and responses. The first record decides the format of all.

    Args:
        prompt_key: column of the prompt, or of a conversation.
        reference_key: column of the reference: a string, a number, or a response.
        responses: columns of recorded responses, the best first; empty: nobody reads any.
        score_key: column of their scores.
        numbers: by further columns that have a number in every record, the settings that name them.

    Attributes:
        format: of the source; None before its first record.
    """

    def __init__(
        self,
        prompt_key: str = "prompt",
        reference_key: str | None = None,
        responses: Sequence[str] = (),
        score_key: str | None = None,
        numbers: Mapping[str, str] | None = None,
    ):
        self.prompt_key, self.reference_key, self.responses, self.score_key = prompt_key, reference_key, tuple(responses), score_key
        self.numbers = dict(numbers or {})
        self.format: Format | None = None

    def prompt(self, record: Any, where: str, row: int, occurrence: int) -> Prompt:
        """The prompt of a record.

        A prompt is a string (one user message) or a list of messages. The other columns stay under their names; those of the responses
        become strings, or lists of {"role", "content"} and further fields without the prompt.

        Raises:
            DataError: the record is malformed, or not of the format; names `where`, the field, what was expected and found, and what to do.
        """
        record = checked(record, where)
        form = self.format or self._recognised(record, where)
        messages, columns = self._split(record, form, where)
        for name in self.responses:
            columns[name] = _response(_field(columns, name, where, "prompts.responses"), messages, f"{where}: field {name!r}")
        if self.responses:
            if form.name == UNPAIRED and len(self.responses) == 1 and self.score_key is None:
                _field(columns, "label", where, "prompts.score_key")
            scores_of(columns, self.responses, self.score_key, where)
        for name, setting in self.numbers.items():
            value = _field(columns, name, where, setting)
            number = None if isinstance(value, bool) else number_of(value)
            if number is None:
                raise DataError(f"{where}: field {name!r}: expected a number ({setting}), got {str(value)[:80]!r}; mend the record, or remove it")
            columns[name] = number
        reference = self._reference(columns, messages, where)
        self.format = form
        return Prompt(row, occurrence, messages, reference, columns, any(_is_conversation(record.get(name)) for name in form.columns))

    @property
    def _pair(self) -> tuple[str, str]:
        """The two columns of a preference, under the names they have here."""
        return (self.responses[0], self.responses[1]) if len(self.responses) == 2 else ("chosen", "rejected")

    @property
    def _single(self) -> str:
        return self.responses[0] if len(self.responses) == 1 else "completion"

    def _recognised(self, record: Mapping[str, Any], where: str) -> Format:
        key = next((name for name in (self.prompt_key, *(_CONVERSATIONS if self.prompt_key == "prompt" else ())) if name in record), None)
        known = _formats(key or self.prompt_key, self._pair, self._single)
        if self.responses and not {*self.responses} & {*self._pair}:
            known = tuple(f for f in known if f.name != PREFERENCE)
        found = next((f for f in known if (key is None) == (f.prompt is None) and {*f.columns} <= record.keys()), None)
        if found is None or (key is None and self.prompt_key != "prompt"):
            nearest = max(known, key=lambda f: len({*f.columns} & record.keys()) - len({*f.columns} - record.keys()))
            raise DataError(
                f"{where}: field {self.prompt_key!r}: expected in every record, got the columns {_listed(record)}; the nearest format is "
                f"{nearest.name} ({', '.join(nearest.columns)}): set `prompt_key` or add the field ({_hint(self.prompt_key, record)})"
            )
        whole: Any = None if key in (None, "prompt") else record[key]
        is_answered = _is_conversation(whole) and _role(whole[-1]) == "assistant"
        return Format(CONVERSATION, found.columns, key) if found.name == PROMPT_ONLY and is_answered else found

    def _split(self, record: dict[str, Any], form: Format, where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """The messages of the prompt, and the other columns."""
        columns = {name: value for name, value in record.items() if name != form.prompt}
        if self._is_whole(record, form):
            return self._implicit(columns, where)
        if form.prompt is not None:
            value, place = _field(record, form.prompt, where, "prompt_key"), f"{where}: field {form.prompt!r}"
            if form.name != CONVERSATION:
                return _as_prompt(value, place), columns
            messages = _conversation(value, place)
            if messages[-1].role != "assistant":
                raise DataError(
                    f"{place}: expected the last message from assistant, as in the first record, got {messages[-1].role}; remove the record"
                )
            start = _first_learned(messages) if self.responses else len(messages) - 1
            columns[self._single] = [message.plain for message in messages[start:]]
            return _ending(messages[:start], place), columns
        if form.name == TEXT:
            if not self.responses:
                raise DataError(f"{where}: field 'text': expected a prompt, got a whole text; set `prompt_key: text` to have texts continued")
            text = columns.pop("text", None)
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{where}: field 'text': expected text, got {_kind(text) if not isinstance(text, str) else 'none'}; remove the record"
                )
            return (), {**columns, self._single: text}
        return self._implicit(columns, where)

    def _is_whole(self, record: Mapping[str, Any], form: Format) -> bool:
        """Whether both responses of a preference are conversations that begin before the assistant's turn, beside a prompt that is a text."""
        pair = [record.get(name) for name in self._pair]
        is_beside = form.name == PREFERENCE and self.responses == self._pair and isinstance(record.get(form.prompt or ""), str)
        return is_beside and all(isinstance(value, list) and _is_conversation(value) and _role(value[0]) not in (None, "assistant") for value in pair)

    def _implicit(self, columns: dict[str, Any], where: str) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """As TRL's `extract_prompt`: of texts a blank before the first difference belongs to the responses."""
        pair = [_field(columns, name, where, "prompts.responses") for name in self._pair]
        place = f"{where}: fields {self._pair[0]!r} and {self._pair[1]!r}"
        if all(isinstance(value, str) for value in pair):
            first, second = pair
            size = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))
            size -= first[:size].endswith(" ")
            if not first[:size].strip():
                raise DataError(f"{place}: expected texts that begin with a common prompt, got none; write the prompt as a field of its own")
            return (Message("user", first[:size]),), {**columns, self._pair[0]: first[size:], self._pair[1]: second[size:]}
        first, second = (_conversation(value, f"{where}: field {name!r}") for name, value in zip(self._pair, pair, strict=True))
        size = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first[:-1], second[:-1], strict=False)))
        if not size:
            raise DataError(f"{place}: expected conversations that begin with a common prompt, got none; write the prompt as a field of its own")
        rest = {name: [message.plain for message in messages[size:]] for name, messages in zip(self._pair, (first, second), strict=True)}
        return _ending(first[:size], place), {**columns, **rest}

    def _reference(self, columns: Mapping[str, Any], messages: tuple[Message, ...], where: str) -> str | None:
        if self.reference_key is None:
            return None
        value, place = _field(columns, self.reference_key, where, "reference_key"), f"{where}: field {self.reference_key!r}"
        if isinstance(value, dict) or _is_conversation(value):
            value = _messages_of(value, messages, place)[-1].content
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(f"{place}: expected a string or a number, got {_kind(value)}; write the answer as a string")
        return str(value)


def unrendered(record: Mapping[str, Any], reads: Callable[[str], bool]) -> set[str]:
    """Names of what a record has and nobody renders: the column `tools`, and fields of messages. A `weight` is for the loss mask.

    Args:
        reads: whether the template reads a field.
    """
    messages = [entry for value in record.values() if _is_conversation(value) for entry in value if _role(entry)]
    names = {name for entry in messages for name, value in entry.items() if value is not None} - _OWN_FIELDS - {"weight"}
    return {name for name in names if not reads(name)} | ({"tools"} if record.get("tools") else set())


def scores_of(columns: Mapping[str, Any], responses: Sequence[str], score_key: str | None, where: str) -> list[float]:
    """The scores of a record's responses: those of `score_key`; of one response its `label`, if there is one; else 1 for the first, 0 for others.

    Raises:
        DataError: the scores are not one number a response, or a label is neither true nor false.
    """
    if score_key is None and len(responses) == 1 and "label" in columns:
        label = _TRUTHS.get(str(columns["label"]).lower())
        if label is None:
            got = repr(columns["label"])[:40]
            raise DataError(f"{where}: field 'label': expected true or false, got {got}; rename the column, or set `prompts.score_key`")
        return [label]
    if score_key is None:
        return [1.0] + [0.0] * (len(responses) - 1)
    value = _field(columns, score_key, where, "prompts.score_key")
    scores = [number_of(score) for score in (value if isinstance(value, list) else [value])]
    found = [score for score in scores if score is not None]
    if len(scores) != len(responses) or len(found) != len(scores):
        raise DataError(f"{where}: field {score_key!r}: expected {len(responses)} numbers, one a response, got {str(value)[:80]}; mend the record")
    return found


def number_of(value: Any) -> float | None:
    """A number, also one that stands as text, as in a CSV, and 1 or 0 for a truth; None of anything else."""
    truth = _TRUTHS.get(str(value).lower())
    try:
        found = math.nan if not isinstance(value, int | float | str) else float(value) if truth is None else truth
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _formats(prompt: str, pair: tuple[str, str], single: str) -> tuple[Format, ...]:
    """Those with more columns come first."""
    return (
        Format(PREFERENCE, (prompt, *pair), prompt),
        Format(UNPAIRED, (prompt, single, "label"), prompt),
        Format("stepwise supervision", (prompt, "completions", "labels"), prompt),
        Format("prompt-completion", (prompt, single), prompt),
        Format(PROMPT_ONLY, (prompt,), prompt),
        Format(IMPLICIT, pair),
        Format(TEXT, ("text",)),
    )


def checked(record: Any, where: str) -> dict[str, Any]:
    """A record of plain values that can be stored.

    Raises:
        DataError: it is none; names the field.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected a JSON object, got {_kind(record)}; write {{...}} with the prompt as a field")
    for name, value in record.items():
        trouble = (_trouble(name) if isinstance(name, str) else "a name that is no text") or _trouble(value)
        if trouble:
            raise DataError(f"{where}: field {repr(name)[:80]}: expected text and numbers that can be stored, got {trouble}; remove it")
    return dict(record)


def _trouble(value: Any, depth: int = 0) -> str | None:
    """What in a value cannot be stored, or None."""
    if depth > _MAX_DEPTH:
        return f"values nested deeper than {_MAX_DEPTH}"
    if type(value) not in _KINDS:
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
    parts: list[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((trouble for part in parts if (trouble := _trouble(part, depth + 1))), None)


def _field(record: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    if key not in record:
        raise DataError(f"{where}: field {key!r}: expected in every record, got none; set `{setting}` or add the field ({_hint(key, record)})")
    return record[key]


def _as_prompt(value: Any, where: str) -> tuple[Message, ...]:
    return _ending(_conversation([{"role": "user", "content": value}] if isinstance(value, str) else value, where), where)


def _conversation(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise DataError(f"{where}: expected a string or a list of messages, got {_kind(value)}; write the prompt as text")
    if not value:
        raise DataError(f"{where}: expected a prompt, got an empty list; write at least one message or remove the record")
    messages = tuple(_message(entry, f"{where}, message {number}") for number, entry in enumerate(value, start=1) if not _is_empty_system(entry))
    if not messages:
        raise DataError(f"{where}: expected a prompt, got nothing but an empty system message; write at least one message or remove the record")
    return messages


def _first_learned(messages: tuple[Message, ...]) -> int:
    """The number of the assistant's first answer that is learned; of the last message where none is."""
    answers = (n for n in range(1, len(messages)) if messages[n].role == "assistant" and messages[n - 1].role in ("user", "tool"))
    return next((number for number in answers if messages[number].fields.get("weight", 1)), len(messages) - 1)


def _is_empty_system(entry: Any) -> bool:
    """As tables have it in conversations without a system message."""
    said = entry.get("value" if entry.get("from") is not None else "content", "?") if _role(entry) == "system" else "?"
    return said is None or (isinstance(said, str) and not said.strip())


def _ending(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    last = messages[-1].role if messages else "none"
    if last not in ("user", "tool"):
        raise DataError(f"{where}: expected the last message from user or tool, got {last}; end the prompt with what is to be answered")
    return messages


def _response(value: Any, prompt: tuple[Message, ...], where: str) -> str | list[dict[str, Any]]:
    """A response as text, or as messages from the assistant's first to its last, without the prompt where they repeat it. One that ends at once is
    empty: as a text, or as one message with nothing but an empty text."""
    if isinstance(value, str):
        return value
    messages = _messages_of(value, prompt, where)
    if len(messages) == 1 and not messages[0].fields:
        return [messages[0].plain]
    if not all(message.content.strip() or message.role == "tool" or _says_otherwise(message.fields) for message in messages):
        raise DataError(f"{where}: expected text in every message of a response, got none; remove the record")
    if not any(message.fields.get("weight", 1) for message in messages if message.role == "assistant"):
        raise DataError(f"{where}: expected a message of weight 1, got weight 0 on all of the assistant's; remove the record, or the weights")
    if any(first.role == second.role == "assistant" for first, second in pairwise(messages)):
        raise DataError(f"{where}: expected that somebody answers the assistant, got two of its messages in a row; join them")
    return [message.plain for message in messages]


def _messages_of(value: Any, prompt: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    messages = _conversation([value] if isinstance(value, dict) else value, where)
    messages = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        got = ", ".join(message.role for message in messages) or "the prompt alone"
        raise DataError(f"{where}: expected a response, or messages that end with an assistant's, got {got}; name another column")
    return messages


def _message(entry: Any, where: str) -> Message:
    """Fields that are null do not count: tables write so what a message lacks."""
    keys = ("from", "value") if isinstance(entry, dict) and entry.get("from") is not None else ("role", "content")
    said = _without_null(entry) if isinstance(entry, dict) else {}
    fields = {name: value for name, value in said.items() if name not in keys}
    role, needs_none = _role(entry), _role(entry) == "assistant" and _says_otherwise(fields)
    if not isinstance(entry, dict) or keys[0] not in entry or (keys[1] not in entry and not needs_none) or fields.keys() & _OWN_FIELDS:
        got = f"the fields {_listed(entry)}" if isinstance(entry, dict) else _kind(entry)
        raise DataError(f'{where}: expected {{"role": ..., "content": ...}}, got {got}; write role and text in these two fields')
    if role is None:
        valid = ROLES if keys[0] == "role" else _SHAREGPT
        found = entry[keys[0]]
        raise DataError(f"{where}: expected a role, got {repr(found)[:80]}; {did_you_mean(str(found)[:80], valid)}")
    content = "" if needs_none and entry.get(keys[1]) is None else _text(entry[keys[1]], where)
    if not content.strip() and role not in ("assistant", "tool"):
        raise DataError(f"{where}: expected text, got an empty message; write the prompt or remove the record")
    weight = fields.get("weight", 0)
    if weight not in (0, 1) or (weight and role != "assistant"):
        raise DataError(f"{where}: expected weight 0, or 1 on an assistant's message, got {repr(weight)[:40]} on {role}'s; remove it")
    return Message(role, content, fields)


def _says_otherwise(fields: Mapping[str, Any]) -> bool:
    """Whether an assistant's message has tool calls or reasoning, so that it needs no text."""
    return any(fields.get(name) for name in _INSTEAD)


def _text(content: Any, where: str) -> str:
    """Content as text; of a list of parts their texts, with nothing between them."""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}, part {number}") for number, part in enumerate(content, start=1))
    if not isinstance(content, str):
        raise DataError(f"{where}: expected a string as content, got {_kind(content)}; write the message as text")
    return content


def _part(part: Any, where: str) -> str:
    given = _without_null(part)
    if not isinstance(given, dict) or given.keys() != {"type", "text"} or given["type"] != "text" or not isinstance(given["text"], str):
        kind = given.get("type") if isinstance(given, dict) else None
        got = f"a part of the type {repr(kind)[:40]}" if kind not in (None, "text") else _kind(part)
        raise DataError(f'{where}: expected {{"type": "text", "text": ...}}, got {got}; only text is read: remove the part, or the record')
    return given["text"]


def _without_null(value: Any) -> Any:
    """Tables fill in nulls at every depth."""
    if isinstance(value, dict):
        return {name: _without_null(part) for name, part in value.items() if part is not None}
    return [_without_null(part) for part in value] if isinstance(value, list) else value


def _role(entry: Any) -> str | None:
    """Of a message, or None where it has none that we know."""
    if not isinstance(entry, dict):
        return None
    sender = entry.get("from")
    name = entry.get("role") if sender is None else _SHAREGPT.get(sender) if isinstance(sender, str) else None
    return name if isinstance(name, str) and name in ROLES else None


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _listed(names: Iterable[str]) -> str:
    """Names for a message; data may have long ones, and many."""
    return ", ".join(repr(name)[:80] for name in islice(names, 20)) or "none"


def _hint(name: str, record: Mapping[str, Any]) -> str:
    return did_you_mean(name, (each[:80] for each in islice(record, 20)))


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), f"a value of the type {type(value).__name__}")
