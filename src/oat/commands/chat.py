"""`oat chat`: talk with a model in a terminal, or line by line through a pipe."""

import argparse
import codecs
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from oat.commands.generation_options import add_generation_options, add_model, generation_options
from oat.commands.interruptible import say_loading
from oat.errors import ConfigError, DataError, OatError, printable
from oat.text.chat_template import special_tokens
from oat.text.control_tokens import any_of, is_own
from oat.types import Message

if TYPE_CHECKING:
    from oat.answering.speaker import ResponseGenerator

_EXIT = "/exit"
_NEW = "/new"
_UNFINISHED = "\ufffd"
"""The character that a tokenizer decodes from the first bytes of an incomplete character."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_generation_options(parser)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    say_loading(arguments.model)
    from oat.answering.speaker import NO_TEMPLATE, load_speaker

    chat(
        load_speaker(arguments.model, generation_options(arguments)),
        continues=arguments.template == NO_TEMPLATE,
    )
    return 0


def chat(speaker: "ResponseGenerator", *, continues: bool = False) -> None:
    """Answer each line of the standard input, until the input ends or a line is `/exit`. The line `/new`
    begins a new conversation.

    Args:
        continues: True: a model without a template continues each line as plain text.

    Raises:
        ConfigError: the model has no template, and `continues` is False.
        OatError: a line from a pipe cannot be read or answered, for example because it is not UTF-8 or leaves
            no room for an answer. In a terminal, the error is printed instead, and the chat goes on.
    """
    if not speaker.is_chat and not continues:
        from oat.answering.speaker import NO_TEMPLATE

        raise ConfigError(
            f"{speaker.name} has no chat template, so nothing says where a turn ends; with --template "
            f"{NO_TEMPLATE} it continues what you type, and --template chatml, or a .jinja file, gives it one"
        )
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if in_terminal:
        print(printable(_greeting(speaker)), flush=True)
    messages: list[Message] = []
    for turn, line in enumerate(_terminal_lines() if in_terminal else _pipe_lines()):
        if line == _EXIT:
            return
        if line == _NEW:
            messages = []
            continue
        try:
            prompt = _fitting(speaker, [*(messages if speaker.remembers else []), Message("user", line)])
            answer = _print_answer(speaker, prompt, turn, in_terminal=in_terminal)
            messages = [*prompt, Message("assistant", _remembered(speaker, answer))]
        except OatError as error:
            if not in_terminal:
                raise
            print(f"oat chat: {error}", file=sys.stderr)


def _greeting(speaker: "ResponseGenerator") -> str:
    if not speaker.is_chat:
        what = "continues what you type"
    elif speaker.remembers:
        what = "answers, and remembers"
    else:
        what = "answers each line by itself"
    if speaker.best_of:
        what += f" (the best of {speaker.best_of} each time)"
    return f"{speaker.name} {what}; {_EXIT} ends, {_NEW} begins anew, Ctrl-C cuts an answer"


def _terminal_lines() -> Iterator[str]:
    """Yield the lines that are typed in a terminal, except blank lines. If Python has `readline`, it lets the
    user edit a line."""
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


def _pipe_lines() -> Iterator[str]:
    """Yield the lines that come through a pipe, except blank lines.

    Raises:
        DataError: a line is not UTF-8.
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


def _fitting(speaker: "ResponseGenerator", messages: list[Message]) -> list[Message]:
    """Drop the earliest turns of a conversation until there is room for a response, and return the
    conversation. The room is `max_new_tokens` tokens, or a quarter of the context if that is less. The last
    message is kept even if the room after it is smaller.

    Raises:
        DataError: the last message alone leaves no room.
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


def _print_answer(
    speaker: "ResponseGenerator", messages: Sequence[Message], turn: int, *, in_terminal: bool
) -> str:
    """Print a response while it is generated, or the best of several as a whole, and return its text. In a
    terminal, Ctrl-C ends the generation; the text that was printed until then is returned."""
    shown, prompt = "", speaker.renderer.prompt(messages)
    try:
        for response in speaker.answer(messages, turn):
            text = speaker.renderer.text(response.ids, prompt)
            is_last = response.finish_reason != "aborted"
            text = text if is_last else _certain(text, speaker.renderer.stop)
            if is_last or text.startswith(shown):
                print(printable(text[len(shown) :]), end="", flush=True)
                shown = text
        if in_terminal and response.finish_reason == "length":
            print(f" [cut off after {len(response.ids)} tokens]", end="")
    except KeyboardInterrupt:
        if not in_terminal:
            raise
    print(flush=True)
    return shown


def _remembered(speaker: "ResponseGenerator", answer: str) -> str:
    """Return an answer as a part of later prompts. It has no special tokens, which a template would write as
    ordinary text, except those that a model writes within its turn, such as <think>."""
    tokens = special_tokens(speaker.renderer.tokenizer)
    return any_of(token for token in tokens if not is_own(token)).sub("", answer)


def _certain(text: str, stops: Sequence[str]) -> str:
    """Return the text of an unfinished answer without the end that later tokens may change. Such an end is an
    incomplete character, or the beginning of a stop string."""
    text = text.rstrip(_UNFINISHED)
    begun = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return text[: len(text) - max(begun, default=0)]
