"""The text of a recorded response as a chat template writes it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from oat.errors import TemplateError
from oat.text.chat_template import RESPONSE, USER, ChatTemplate
from oat.text.openings import common_length, unclosed, without_opening
from oat.text.template_study import Turn
from oat.types import Message, Opening


def response_text(
    chat: ChatTemplate,
    turn: Turn,
    asked: Sequence[Message],
    opening: Opening,
    response: Message,
    is_text: bool,
) -> str:
    """Return the text of a response in a chat, up to the end of its turn. The docstring of
    `Renderer.response` describes how this text is found.

    Args:
        asked: the prompt of the response, the system message included. If `opening` is that of a short
            prompt, the response is rendered behind the short prompt.
        opening: what the prompt has written of the response.
        is_text: see `is_text`.

    Raises:
        TemplateError: see `Renderer.response`.
    """
    is_usual = opening.text == turn.begun
    before = turn.opening if is_usual else chat.render(asked, generate=True)
    rendered = chat.render([*([USER] if is_usual else asked), response], generate=False)
    new = without_opening(response.content, opening)
    written = chat.content(replace(response, content=new))
    added = rendered.removeprefix(before).removesuffix(turn.closing)
    keeps_text = "".join(written.split()) in "".join(added.split())
    if rendered == before + added + turn.closing and keeps_text:
        return added
    if not is_text:
        raise TemplateError(
            f"the template writes a response with {', '.join(response.fields)} otherwise than it "
            "begins and ends other responses; remove these fields, or choose another template"
        )
    if tags := unclosed(new, opening):
        raise TemplateError(
            f"the template's prompt opens {tags[0]}, and the response {response.content[:40]!r} never "
            f"closes it; put its reasoning and {tags[1]} before it, or choose a template that opens none"
        )
    return turn.lead + written


def whole_text(
    chat: ChatTemplate,
    turn: Turn,
    messages: Sequence[Message],
    opening: Callable[[Sequence[Message], str], Opening],
) -> str:
    """Return the text of a complete conversation, as the template renders it.

    The rendering of some templates lacks a part of the last response, such as its thoughts, or what stands
    between two of them. Others write the system message only before the generation prompt. Then the result is
    the prompt, followed by the response's own text and the usual end.

    Args:
        messages: the conversation, the system message included, with a response at its end.
        opening: function that returns what a prompt has written of its response; its arguments are the
            messages and the text of the prompt.

    Raises:
        TemplateError: the template refuses the prompt, or leaves out a message of it.
    """
    *asked, response = messages
    written = "".join(chat.content(response).split())
    with suppress(TemplateError):
        rendered = chat.complete(messages, generate=False)
        other = chat.render([*asked, RESPONSE], generate=False)
        times = ["".join(text.split()).count(written) for text in (rendered, other)]
        if not written or times[0] > times[1]:
            return rendered
    prompt = chat.complete(asked, generate=True)
    begun = opening(asked, prompt)
    if begun.tags:
        response = replace(response, content=without_opening(response.content, begun))
    return prompt + turn.lead + chat.content(response) + turn.closing


def is_text(chat: ChatTemplate | None, response: Message) -> bool:
    """Return True if there is no template, or if the template writes only the role and the content of the
    response, and none of its further fields."""
    if chat is None or not response.fields:
        return True
    whole = chat.render([USER, response], generate=False)
    with suppress(TemplateError):  # the template may need the fields
        return whole == chat.render([USER, Message("assistant", response.content)], generate=False)
    return False


def refuse_empty(response: Message) -> None:
    """Refuse a response of which the template writes only the text, if it has further fields and no text.

    Raises:
        TemplateError: the response has no text, and its weight is not 0.
    """
    if response.fields and response.fields.get("weight", 1) and not response.content.strip():
        raise TemplateError(
            "a response has no text, and the template writes nothing of its "
            f"{', '.join(response.fields)}; choose a template that does, or give it `weight: 0`, or "
            "remove the record"
        )


def refuse_other_history(learned: str, written: str) -> None:
    """Check that the text of a conversation that was built turn by turn is the beginning of what the template
    writes for the complete conversation. White space is ignored.

    Raises:
        TemplateError: the texts differ.
    """
    learned, written = ("".join(text.split()) for text in (learned, written))
    if written.startswith(learned):
        return
    same = common_length(learned, written)
    raise TemplateError(
        f"the chat template rewrites history: behind {learned[max(0, same - 30) : same]!r} it writes "
        f"{written[same : same + 30]!r} in the whole conversation, and "
        f"{learned[same : same + 30]!r} when the turn is new. To learn several turns choose a template "
        "that only adds to what it wrote, such as chatml; or have the last message alone learned, with "
        "`weight: 0` in the assistant's others"
    )


def turns_of(messages: Sequence[Message], prompt: int) -> list[tuple[bool, list[Message]]]:
    """Return the turns of a conversation in order: its first `prompt` messages, responses, and what stands
    between them. With each turn comes True if it is a response.

    Raises:
        TemplateError: the order of the messages breaks the rules of `Renderer.loss_mask`.
    """
    turns = [
        (is_response, list(group))
        for is_response, group in groupby(messages[prompt:], key=lambda message: message.role == "assistant")
    ]
    turns = [(False, list(messages[:prompt])), *turns] if prompt else turns
    alternates = (
        turns
        and turns[-1][0]
        and not turns[0][0]
        and all(len(group) == 1 for is_response, group in turns if is_response)
    )
    if not alternates:
        roles = ", ".join(message.role for message in messages) or "nothing"
        raise TemplateError(
            f"cannot mask a conversation of {roles}; every assistant message must answer another "
            "message, and one must end it"
        )
    return turns
