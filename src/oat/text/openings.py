"""What a prompt has already written of its response.

Some chat templates begin the response in the prompt, as with `<think>`. Some do so for certain conversations
only, for example if the system message has `/think`. The beginning is what stands behind the header of an
assistant's message, such as `<|im_start|>assistant`. The header is found by rendering the same conversation
with a response that a further message follows.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from oat.errors import TemplateError
from oat.text.chat_template import RESPONSE, USER, ChatTemplate
from oat.types import Message, Opening

_TAG = re.compile(
    r"<[^<>/\s][^<>\n]{0,60}>|\[[^\[\]/\s][^\[\]\n]{0,60}\]|◁[^◁▷/\s][^◁▷\n]{0,60}▷|【[^【】/\s][^【】\n]{0,60}】"
)
_TAGS_AT_THE_END = re.compile(r"(?:(?:<\|?[A-Za-z][\w:.-]{1,40}\|?>|\[[A-Z_]{2,40}\]|◁\w{2,40}▷)\s*)+\Z")
_CLOSING = re.compile(r"\s*([<\[◁【]\|?)/(\w[\w:. -]{0,60}\|?[>\]▷】])\s*")
_BEGIN = re.compile(r"begin|start", re.IGNORECASE)
_OF_THOUGHTS = re.compile(r"think|thought|reason|reflect|analysis|scratchpad", re.IGNORECASE)


class Openings:
    """The openings of the prompts of one chat template. Prompts that end alike are rendered once."""

    def __init__(self, chat: ChatTemplate):
        self._chat = chat
        self._known: dict[str, Opening] = {}

    def of(self, conversation: Sequence[Message], rendered: str) -> Opening:
        """Return what a prompt has written of its response.

        Args:
            conversation: the messages of the prompt, the system message included.
            rendered: the text of the prompt.
        """
        for tail, opening in self._known.items():
            if rendered.endswith(tail):
                return opening
        tail, begun = self._studied(conversation)
        opening = opening_of(begun)
        if tail.removesuffix(begun).strip() and rendered.endswith(tail):
            self._known[tail] = opening
        return opening

    def _studied(self, conversation: Sequence[Message]) -> tuple[str, str]:
        """Return the text of a prompt behind its last message, and the part of it that begins the
        response."""
        last = conversation[-1]
        asked = [*conversation[:-1], replace(last, content=last.content + USER.content)]
        try:
            _, found, tail = self._chat.render(asked, generate=True).rpartition(USER.content)
        except TemplateError:  # the template reads the content of this message, as JSON for example
            return "", ""
        headers = [*self._headers(asked)] if found else []
        if not headers:
            return tail, ""
        start = min(_border(tail, header) for header in headers)
        if start == len(tail):
            start = min(_start_of_closed(tail, header) for header in headers)
        begun = tail[start:]
        return tail, begun if begun.strip() else ""

    def _headers(self, asked: Sequence[Message]) -> Iterator[str]:
        """Yield what the template writes between the last message and a response: to one that a further
        message follows, and to the last one."""
        for later in ([USER], []):
            with suppress(TemplateError):  # not every template takes a further message here
                text = self._chat.render([*asked, RESPONSE, *later], generate=False)
                before, found, _ = text.rpartition(RESPONSE.content)
                _, is_there, header = before.rpartition(USER.content)
                if found and is_there:
                    yield header


def opening_of(begun: str) -> Opening:
    """Return the opening with this text."""
    tags = [tag for tag in _TAG.finditer(begun) if not _closes(tag[0], begun[tag.end() :])]
    return Opening(begun, tuple(dict.fromkeys(tag[0] for tag in tags)))


def plain_opening(prompt: str) -> Opening:
    """Return the opening of a prompt without a template: the opening tags at its very end."""
    found = _TAGS_AT_THE_END.search(prompt)
    return opening_of(found[0]) if found else Opening()


def without_opening(text: str, opening: Opening) -> str:
    """Return a recorded response without what its prompt has written already: if it begins with the opening,
    or with a part of it that begins or ends at a tag. White space may differ."""
    begun = opening.text
    tags = [*_TAG.finditer(begun)]
    starts = sorted({0, *(tag.start() for tag in tags)})
    ends = sorted({len(begun), *(tag.end() for tag in tags)}, reverse=True)
    for end, start in product(ends, starts):
        part = begun[start:end]
        if not part.strip():
            continue
        found = re.match(r"\s*" + r"\s*".join(map(re.escape, "".join(part.split()))), text)
        if found:
            rest = text[found.end() :]
            written = begun[len(begun[:end].rstrip()) :] if not begun[end:].strip() else ""
            return rest[common_length(rest, written) :]
    return text


def unclosed(text: str, opening: Opening) -> tuple[str, str] | None:
    """Return the tag of thoughts that a prompt opens and a response does not close, and the tag that would
    close it; None if there is none."""
    for tag in opening.tags:
        if _OF_THOUGHTS.search(tag) and not _closes(tag, text):
            return tag, _closings(tag)[0]
    return None


def is_closed(tag: str, text: str) -> bool:
    """Return True if a closing tag, such as `</answer>`, closes one that a text opens."""
    found = _CLOSING.fullmatch(tag)
    opened = found[1] + found[2] if found else ""
    return bool(opened) and text.rfind(opened) > text.rfind(tag.strip())


def common_length(first: str, second: str) -> int:
    """Return the length of the longest common beginning of two texts, in characters."""
    differing = (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def _border(tail: str, header: str) -> int:
    """Return where the common beginning of two texts ends. A tag is not cut."""
    size = common_length(tail, header)
    return next((tag.start() for tag in _TAG.finditer(tail) if tag.start() < size < tag.end()), size)


def _start_of_closed(tail: str, header: str) -> int:
    """Return where the tag begins that `tail` opens, and that `header`, which goes on from it, closes. Some
    templates write thoughts around every response. Without such a tag, return the length of `tail`."""
    rest = header[len(tail) :]
    return next(
        (tag.start() for tag in _TAG.finditer(tail) if tag[0] not in rest and _closes(tag[0], rest)),
        len(tail),
    )


def _closings(tag: str) -> list[str]:
    ends = [tag[0] + "/" + tag[1:]]
    if tag[1:2] in ("|", "｜"):
        ends.append(tag[:2] + "/" + tag[2:])
    if begin := _BEGIN.search(tag):
        ends.insert(0, tag[: begin.start()] + ("END" if begin[0].isupper() else "end") + tag[begin.end() :])
    return ends


def _closes(tag: str, text: str) -> bool:
    return any(end in text for end in _closings(tag))


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to its first stop string. One that closes a tag belongs to the text."""
    found = [(text.find(stop), stop) for stop in stops]
    at, stop = min((place for place in found if place[0] >= 0), default=(len(text), ""))
    return text[: at + len(stop)] if is_closed(stop, text[:at]) else text[:at]
