"""`oat chat`: a conversation with a model in a terminal, or line by line through a pipe."""

import codecs
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from oat.build.speaker import NO_TEMPLATE, Speaker
from oat.errors import ConfigError, DataError, OatError, printable
from oat.types import Message

_END, _ANEW = "/exit", "/new"
_UNFINISHED = "\ufffd"
"""What a tokenizer decodes a part of a character to."""


def chat(speaker: Speaker, *, continues: bool = False) -> None:
    """Answer what is typed, line by line, until there is no more, or `/exit`. `/new` forgets what was said.

    Args:
        continues: text is to be continued as it stands, by a model without a template.

    Raises:
        ConfigError: the model has no template, and nobody asked for that.
        DataError: a line of a pipe leaves no room for an answer.
    """
    if not speaker.is_chat and not continues:
        raise ConfigError(
            f"{speaker.name} has no chat template, so nothing says where a turn ends; with --template "
            f"{NO_TEMPLATE} it continues what you type, and "
            "--template chatml, or a .jinja file, gives it one"
        )
    is_seen = sys.stdin.isatty() and sys.stdout.isatty()
    if is_seen:
        what = (
            "continues what you type"
            if not speaker.is_chat
            else "answers, and remembers"
            if speaker.remembers
            else "answers each line by itself"
        )
        print(
            printable(f"{speaker.name} {what}; {_END} ends, {_ANEW} begins anew, Ctrl-C cuts an answer"),
            flush=True,
        )
    messages: list[Message] = []
    for turn, line in enumerate(_typed() if is_seen else _piped()):
        if line == _END:
            return
        if line == _ANEW:
            messages = []
            continue
        try:
            asked = _fitting(speaker, [*(messages if speaker.remembers else []), Message("user", line)])
            messages = [*asked, Message("assistant", _say(speaker, asked, turn, is_seen=is_seen))]
        except OatError as error:
            if not is_seen:
                raise
            print(f"oat chat: {error}", file=sys.stderr)


def _typed() -> Iterator[str]:
    """Lines of a terminal, which may be edited while they are typed; those without a text are left out."""
    with suppress(ImportError):
        importlib.import_module("readline")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(flush=True)
            return
        if line.strip():
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _piped() -> Iterator[str]:
    """Lines of the standard input; those without a text are left out.

    Raises:
        DataError: one is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the standard input, line {number}: expected UTF-8 ({error}); convert it"
            ) from None
        if text.strip():
            yield text


def _fitting(speaker: Speaker, messages: list[Message]) -> list[Message]:
    """The conversation without as many of its earliest turns as leave too little room for an answer.

    Raises:
        DataError: its last message alone leaves none.
    """
    if speaker.context is None:
        return messages
    wanted = min(speaker.sampling.max_new_tokens, speaker.context // 4)
    while len(messages) > 1 and len(speaker.renderer.prompt(messages)) + wanted > speaker.context:
        messages = messages[2:]
    size = len(speaker.renderer.prompt(messages))
    if size >= speaker.context:
        raise DataError(
            f"what you said is {size} tokens long as the model reads it, and its context holds "
            f"{speaker.context}; say less"
        )
    return messages


def _say(speaker: Speaker, messages: Sequence[Message], turn: int, *, is_seen: bool) -> str:
    """Print an answer as it comes; returns it. In a terminal Ctrl-C cuts it."""
    shown = ""
    try:
        for completion in speaker.answer(messages, turn):
            text, is_last = speaker.renderer.text(completion.ids), completion.finish_reason != "aborted"
            text = text if is_last else _certain(text, speaker.renderer.stop)
            if is_last or text.startswith(shown):
                print(printable(text[len(shown) :]), end="", flush=True)
                shown = text
        if is_seen and completion.finish_reason == "length":
            print(f" [cut off after {len(completion.ids)} tokens]", end="")
    except KeyboardInterrupt:
        if not is_seen:
            raise
    print(flush=True)
    return shown


def _certain(text: str, stops: Sequence[str]) -> str:
    """A text that grows, without the end of it that may become something else: half a character, or the
    beginning of a stop string."""
    text = text.rstrip(_UNFINISHED)
    held = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return text[: len(text) - max(held, default=0)]
