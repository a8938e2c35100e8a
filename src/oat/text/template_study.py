"""The study of a chat template. The functions render conversations with the template to find three things:
the text around a response, the template's control tokens, and changes that it makes to earlier messages."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oat.errors import TemplateError, warn
from oat.text.chat_template import CHATML_TOKENS, RESPONSE, USER, ChatTemplate, proposal, special_tokens
from oat.text.openings import Openings, common_length
from oat.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SYSTEM = Message("system", "oatsystem")
_TOOL = Message("tool", "oattool")


@dataclass(frozen=True)
class Turn:
    """The text that a template writes before and after a response. The defaults are for plain prompts, which
    have no template.

    Attributes:
        end_id: id of the token that ends a turn. This is the first added token in `closing` that may be a
            control token. If there is none, it is the tokenizer's end-of-text, or None if it has none.
        later_text: the text that ends a response which further messages follow; `end_text` in most templates.
        end_text: the text of `closing` from its beginning to the end of this token. If `closing` has no such
            token: the text of the end-of-text. "" if `end_id` is None.
        opening: the text before a response to `USER`: the message and the generation prompt.
        lead: white space that the template writes between `opening` and the text of a response.
        closing: the text from the end of a response to the end of the conversation.
        begun: the part of `opening` that begins the response, such as `<think>`.
    """

    end_id: int | None
    end_text: str = ""
    later_text: str = ""
    opening: str = ""
    lead: str = ""
    closing: str = ""
    begun: str = ""

    @property
    def ends(self) -> str:
        """The texts that the template writes behind a response."""
        return self.later_text + self.closing

    @property
    def trailing(self) -> str:
        """The text that the template writes after the end of a turn, often a line break."""
        return self.closing.removeprefix(self.end_text) if self.closing.startswith(self.end_text) else ""


def study_turn(chat: ChatTemplate, openings: Openings) -> Turn:
    """Return the text that a template writes before and after a response.

    Raises:
        TemplateError: the template cannot render a response, or leaves it out.
    """
    opening = chat.render([USER], generate=True)
    before, _, _ = chat.render([USER, RESPONSE], generate=False).partition(RESPONSE.content)
    closing = chat.behind_response(generate=False)
    lead = before.removeprefix(opening) if before.startswith(opening) else ""
    end_id = chat.tokenizer.eos_token_id
    end_text = "" if end_id is None else str(chat.tokenizer.eos_token)
    marks = _marks(chat.tokenizer)
    for id in map(int, chat.ids(closing)):
        if id in marks and marks[id] in closing:
            end_id = id
            end_text = closing[: closing.index(marks[id]) + len(marks[id])]
            break
    return Turn(
        end_id,
        end_text,
        _later_end(chat, opening, end_text, marks),
        opening,
        lead=lead if lead.isspace() else "",
        closing=closing,
        begun=openings.of([USER], opening).text,
    )


def _later_end(chat: ChatTemplate, opening: str, end_text: str, marks: Mapping[int, str]) -> str:
    """Return the text with which a template ends a response if a message of the user follows.

    Some templates end the last response with a token of its own, and earlier ones with the token that ends
    every message: gpt-oss has <|return|> and <|end|>. If a text behind an earlier response begins neither
    with `end_text` nor with the token that ends a message of the user, the result is `end_text`.
    """
    behind, of_user = "", opening.rpartition(USER.content)[2]
    with suppress(TemplateError):  # a template may write no further messages
        behind = chat.behind_response([USER], generate=True)
    ends = [
        min((mark for mark in marks.values() if mark in text), key=text.index, default="")
        for text in (behind, of_user)
    ]
    if behind.startswith(end_text) or not ends[0] or ends[0] != ends[1]:
        return end_text
    return behind[: behind.index(ends[0]) + len(ends[0])]


def check_chatml(chat: ChatTemplate) -> None:
    """Check that the tokenizer has the tokens of ChatML.

    Raises:
        TemplateError: it lacks one.
    """
    for token in CHATML_TOKENS:
        if len(chat.ids(token)) != 1:
            raise TemplateError(
                f"the chatml template needs {token} as one token, and this tokenizer has none; add it "
                f"to the tokenizer and the model, or {proposal(chat.tokenizer)}"
            )


def study_control(chat: ChatTemplate, template: str) -> set[str]:
    """Return the texts of a template's control tokens: the tokenizer's special tokens, and the added tokens
    that the template names or writes. An added token that is a plain word is a control token only if
    it is also a special token.

    Args:
        template: the template's text, before a date is written into it.

    Raises:
        TemplateError: the template cannot render a conversation.
    """
    written = template + chat.render([USER], generate=True)
    for messages in ([USER, RESPONSE], [USER, RESPONSE, USER]):
        written += chat.render(messages, generate=False)
    for messages in ([_SYSTEM, USER], [USER, RESPONSE, _TOOL]):
        with suppress(TemplateError):  # not every template has these roles
            written += chat.render(messages, generate=True)
    marks = _marks(chat.tokenizer).values()
    return special_tokens(chat.tokenizer) | {text for text in marks if text in written}


def look_for_rewriting(chat: ChatTemplate, *, is_refused: bool) -> None:
    """Warn if a template rewrites history: it changes or shortens earlier messages when further messages
    follow.

    Args:
        is_refused: True raises an error instead of the warning.

    Raises:
        TemplateError: the template rewrites history and `is_refused`, or it cannot render a conversation.
    """
    answer = Message("assistant", "<think>\noatreasoning\n</think>\n\noatanswer")
    first, second, third = (Message("user", text) for text in ("oatfirst", "oatsecond", "oatthird"))
    messages = [first, answer, second, answer, third]
    for length in range(1, len(messages)):
        earlier = chat.render(messages[:length], generate=False)
        later = chat.render(messages[: length + 1], generate=False)
        head, end, _ = earlier.rpartition(messages[length - 1].content.split()[-1])
        head += end
        drops = later.count("oatreasoning") < messages[: length + 1].count(answer)
        if later.startswith(head) and not drops:
            continue
        changed = head[common_length(head, later) :][:40]
        what = (
            "drops the reasoning between <think> and </think>"
            if drops
            else f"changes an earlier message, here {changed!r}"
        )
        rewrites = f"the chat template rewrites history: in a conversation of {length + 1} messages it {what}"
        if is_refused:
            raise TemplateError(
                f"{rewrites}; in episodes of several turns a response must stay as it was sampled: "
                "choose a template that only adds to what it wrote, such as chatml"
            )
        warn(
            f"{rewrites}. Here responses stay as they were sampled; for episodes of several turns choose a "
            "template that keeps earlier messages, or the model meets other histories in use than in training"
        )
        return


def _marks(tokenizer: "PreTrainedTokenizerFast") -> dict[int, str]:
    """Return the added tokens that may be control tokens, by id: all except blank tokens and plain words."""
    return {
        int(id): token.content
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and not token.content.strip().isalnum()
    }
