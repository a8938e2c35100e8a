"""The renderer, which turns text into token ids and ids into text. All text that the policy reads or learns
from becomes tokens here.

A sampled response is not tokenised again: a later message is appended to its ids. So the learner trains on
exactly the ids that were sampled.

A control token is a special token of the tokenizer, or an added token that the template names or writes.
Control tokens in messages become ordinary text, so data cannot end a turn or begin another
(`text/control_tokens.py`). There are three exceptions:

* In the content of an assistant's or a system message, the tokens of `chat_template.OWN` keep their meaning.
* In plain prompts (`template=None`), special tokens keep their meaning, because people write their own
  formats there.
* A template may make a control token from a message's role.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from oat.errors import TemplateError
from oat.text.chat_template import USER, ChatTemplate
from oat.text.control_tokens import marked_ids
from oat.text.encoding import Encoder
from oat.text.question_forms import Example, Form
from oat.text.template_study import Turn, common_length, look_for_rewriting, study_control, study_turn
from oat.text.templates import CHATML_TOKENS, load_template, on_day, proposal
from oat.text.text_ends import text_ends
from oat.text.vocabulary import num_ids
from oat.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REASONING = re.compile(r"\s*<think>\n?")

_MOST_TAILS = 1024
"""Number of messages whose ids `Renderer.extend` keeps, since environments often say the same."""


class Renderer:
    """A renderer of messages with one tokenizer and one template.

    Args:
        template: "chatml"; "tokenizer" for the tokenizer's template; the path of a .jinja file; or None for
            plain prompts. A plain prompt is the content of one user message.
        system: content of a system message for conversations that have none; it needs a template.
        date: day that a template reads with `strftime_now("...")`, at midnight; None: today.
        stop: strings that end a response. The text of a response ends before the first of them.
        eos_ids: further ids that end a response, usually those of the model's generation config.
        question: form into which the user message of a prompt is put before it is rendered; None: no form.
        few_shot: number of worked examples that the form shows.
        has_turns: True if messages may follow a response. Then a template that changes earlier messages when
            further messages follow is an error; otherwise it is a warning.

    Attributes:
        stop_ids: ids that end a response: the tokenizer's end-of-text, the template's end of turn, and
            `eos_ids`.
        num_tokens: highest id of the tokenizer plus 1, added tokens included.
        template: text of the chat template; None for plain prompts.
        source: text of the chat template with the date written into it; "" for plain prompts.
        definition: the arguments except the tokenizer, as plain data, from which `of` makes an equal
            renderer.

    Raises:
        TemplateError: the template is missing, cannot be rendered, does not suit the tokenizer, or does not
            read the given `date`; `has_turns` is True and the template changes earlier messages; or `system`
            is given without a template.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        template: str | None,
        system: str | None = None,
        date: datetime.date | None = None,
        stop: Sequence[str] = (),
        eos_ids: Sequence[int] = (),
        has_turns: bool = False,
        question: Form | None = None,
        few_shot: int = 0,
    ):
        if template is None and system is not None:
            raise TemplateError(
                f"a system prompt needs a chat template; {proposal(tokenizer)}, or drop `render.system`"
            )
        self.tokenizer = tokenizer
        self.system = system
        self.stop = tuple(stop)
        self._question = question
        self._few_shot = few_shot
        self._last: tuple[tuple[Message, ...], np.ndarray] = ((), np.zeros(0, np.int32))
        self._tails: dict[tuple[Message, bool], np.ndarray] = {}
        self._encoder = Encoder(tokenizer)
        self._pieces: dict[int, str] = {}
        self.definition: dict[str, Any] = {
            "template": template,
            "system": system,
            "date": date and date.isoformat(),
            "stop": list(stop),
            "eos_ids": [int(i) for i in eos_ids],
            "has_turns": has_turns,
            "question": question and asdict(question),
            "few_shot": few_shot,
        }
        self.num_tokens = num_ids(tokenizer)
        self.template = None if template is None else load_template(template, tokenizer)
        self.source = "" if self.template is None else on_day(self.template, date or datetime.date.today())
        if date is not None and self.source == (self.template or ""):
            raise TemplateError(
                f"the date {date} is given, and the template reads none; remove `date`, or choose another "
                "template"
            )
        self._chat = None
        self._turn = Turn(tokenizer.eos_token_id)
        if self.template is not None:
            self._chat = ChatTemplate(tokenizer, self._encoder, self.source)
            if template == "chatml":
                self._check_chatml()
            self._turn = study_turn(self._chat)
            self._chat.set_control(study_control(self._chat, self.template))
            look_for_rewriting(self._chat, is_refused=has_turns)
        ends = {tokenizer.eos_token_id, self._turn.end_id} - {None}
        self.stop_ids: frozenset[int] = frozenset(ends | {int(i) for i in eos_ids})

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast", definition: Mapping[str, Any]) -> "Renderer":
        """Make a renderer from a tokenizer and the attribute `definition` of another renderer."""
        form, day = definition["question"], definition["date"]
        question = form and Form(
            **{
                **form,
                "examples": tuple(Example(**each) for each in form["examples"]),
                "stop": tuple(form["stop"]),
            }
        )
        return cls(
            tokenizer,
            **{**definition, "question": question, "date": day and datetime.date.fromisoformat(day)},
        )

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids that a model continues, (T,) int32. With a chat template, they end with the
        generation prompt. The result of the last call is cached.

        Raises:
            TemplateError: there are four possible faults. (1) The template refuses the conversation.
                (2) There is no template, and the conversation is not one user message. (3) The renderer puts
                questions into a form (`render.question`), and the conversation has messages besides system
                messages and one last user message. (4) The conversation has no tokens, or cannot be encoded.
        """
        given = tuple(messages)
        if given and given == self._last[0]:
            return self._last[1].copy()
        messages = self._put(given)
        if self._chat is None:
            ids = self._plain(messages)
        else:
            ids = self._ids(self._chat.render(self._with_system(messages), generate=True))
        if not len(ids):
            raise TemplateError(
                "a prompt has no tokens: the tokenizer drops all of its text; use another tokenizer, or "
                "remove the prompt"
            )
        self._last = (given, ids.copy())
        return ids

    def extend(self, ids: np.ndarray, message: Message) -> np.ndarray:
        """Append a message and the next generation prompt to a conversation that ends with a sampled
        response.

        If the response does not end with the end of its turn, for example because it was cut at
        `max_new_tokens`, the template's end of turn is added first. Without a template, only the message's
        content is appended.

        Args:
            ids: (T,) ids of the conversation, up to the end of the response.

        Returns:
            (T + S,) int32: `ids`, followed by S appended ids.

        Raises:
            TemplateError: the message is an assistant's, or the template refuses it.
        """
        said = message, self._is_ended(ids)
        if said not in self._tails:
            if len(self._tails) >= _MOST_TAILS:
                self._tails.clear()
            self._tails[said] = self._tail([message], said[1])
        return np.concatenate([np.asarray(ids, dtype=np.int32), self._tails[said]])

    def whole(self, messages: Sequence[Message], response: str) -> np.ndarray:
        """Return the ids of a complete conversation for a reward model, (T,) int32. With a chat template, the
        template renders all messages at once. Without a template, the ids are those of the prompt, the
        response and the end-of-text.

        Args:
            messages: the messages before the response.

        Raises:
            TemplateError: the template refuses the conversation, or the conversation needs a template.
        """
        if self._chat is None:
            return np.concatenate([self.prompt(messages), self.response(response)])
        conversation = [*self._with_system(messages), Message("assistant", response)]
        return self._ids(self._chat.render(conversation, generate=False))

    @property
    def trailing(self) -> np.ndarray:
        """The ids that the template writes after the end of a turn, often a line break, (T,) int32."""
        return self._ids(self._turn.trailing)

    def reads(self, field: str) -> bool:
        """Return True if the template names a field of messages, such as `tool_calls`."""
        return self.template is not None and re.search(rf"\b{re.escape(field)}\b", self.template) is not None

    def response(self, message: str | Message) -> np.ndarray:
        """Return the ids of a response from a person or a file, with its end of turn, (T,) int32.

        With a chat template, the template renders a short prompt with this response, and the text after the
        prompt is taken. It may differ from the response: Qwen3's template adds an empty block of reasoning,
        and Llama 3's template trims the text.

        The rendering is discarded in two cases: the text before or after this response is not the template's
        usual one; or the template leaves out a part of the response other than white space. Then the
        response's own text is used. If the generation prompt ends in <think>, a <think> at the beginning of
        this text is removed.

        Args:
            message: a text, or an assistant's message. The template may write the further fields of a
                message, such as reasoning and tool calls.

        Raises:
            TemplateError: there are three possible faults. (1) The prompt opens reasoning, and neither the
                response nor the template closes it. (2) The template writes fields of the response, and the
                rendering is discarded. (3) The response has no text, the template writes none of its fields,
                and its weight is not 0.
        """
        response = Message("assistant", message) if isinstance(message, str) else message
        is_text = not response.fields or self._is_text(response)
        if is_text and response.fields and response.fields.get("weight", 1) and not response.content.strip():
            raise TemplateError(
                "a response has no text, and the template writes nothing of its "
                f"{', '.join(response.fields)}; choose a template that does, or give it `weight: 0`, or "
                "remove the record"
            )
        if self._chat is None:
            ids = self._ids(response.content)
            return ids if self._turn.end_id is None else np.append(ids, np.int32(self._turn.end_id))
        return self._ids(self._response_text(self._chat, response, is_text) + self._turn.end_text)

    def recorded(
        self, prompt: Sequence[Message], response: str | Sequence[Mapping[str, Any]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the loss mask of a prompt with a recorded response.

        Args:
            prompt: the messages of the prompt. If there are none, every token of the response except the
                first is learned.
            response: a text or a list of messages. If there is no prompt, it must be a text.

        Returns:
            (T,) int32 ids; and (T,) bool, True for each token that is learned, as in `loss_mask`.

        Raises:
            TemplateError: an error of `loss_mask`; or the response has several messages, and the template
                changes an earlier message when further messages follow.
        """
        if not prompt:
            assert isinstance(response, str), "only a text has no prompt"
            ids = np.concatenate([self.prompt([Message("user", response)]), self.response("")])
            return ids, np.arange(len(ids)) > 0
        messages = (
            [Message("assistant", response)]
            if isinstance(response, str)
            else [Message.of(message) for message in response]
        )
        ids, mask = self.loss_mask([*prompt, *messages], prompt=len(prompt))
        if len(messages) > 1 and self._chat is not None:
            self._check_history(self._chat, [*self._put(prompt), *messages], ids)
        return ids, mask

    def loss_mask(self, messages: Sequence[Message], prompt: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and the loss mask of a complete conversation. The ids are built message by message,
        so the boundaries of messages are exact.

        Args:
            messages: a conversation that ends with an assistant's message. After the prompt, no two
                assistant's messages follow each other. If `prompt` is 0, the first message is not an
                assistant's. Without a template, the conversation begins with one user message and one
                response.
            prompt: number of messages at the beginning that are the prompt. None of their tokens is learned.

        Returns:
            (T,) int32 ids; and (T,) bool, True for the tokens of an assistant's message and for the end of
            its turn. For a message of weight 0, the values are False.

        Raises:
            TemplateError: the order of the messages breaks these rules, or the template refuses the messages.
        """
        turns = [
            (is_response, list(group))
            for is_response, group in groupby(
                messages[prompt:], key=lambda message: message.role == "assistant"
            )
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
        parts: list[np.ndarray] = []
        for is_response, group in turns:
            if is_response:
                parts.append(self.response(group[0]))
            else:
                parts.append(self._tail(group, self._is_ended(parts[-1])) if parts else self.prompt(group))
        learned = [is_response and bool(group[0].fields.get("weight", 1)) for is_response, group in turns]
        mask = np.concatenate(
            [np.full(len(ids), is_learned) for ids, is_learned in zip(parts, learned, strict=True)]
        )
        return np.concatenate(parts), mask

    def text(self, ids: np.ndarray) -> str:
        """Return the text of a response for oracles and people. It has no special tokens and ends before the
        first stop string."""
        return self._cut(self._text([int(i) for i in ids if int(i) not in self.stop_ids]))

    def text_ends(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of characters of `text(ids)` that are complete after each of the ids.

        Args:
            ids: (T,) ids of a response.

        Returns:
            (T,) int32, never falling. The last entry, if there is one, is the length of the text.
        """
        is_kept = np.array([int(i) not in self.stop_ids for i in ids], dtype=bool)
        kept = [int(i) for i in np.asarray(ids)[is_kept]]
        for id in kept:
            if id not in self._pieces:
                self._pieces[id] = self._text([id])
        text = self._text(kept)
        ends = np.array([0, *text_ends(kept, text, self._text, [self._pieces[id] for id in kept])], np.int32)
        return np.minimum(ends[np.cumsum(is_kept)], np.int32(len(self._cut(text))))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, special tokens included. The engine searches this text for stop strings."""
        return str(
            self.tokenizer.decode(
                [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _cut(self, text: str) -> str:
        """Return the part of a text before the first stop string."""
        return text[: min((at for at in map(text.find, self.stop) if at >= 0), default=len(text))]

    def _put(self, messages: Sequence[Message]) -> Sequence[Message]:
        """If this renderer has a form, return the conversation with its user message put into the form.
        Otherwise return the conversation unchanged.

        Raises:
            TemplateError: there is a form, and the conversation has a wrong role. The last message must be
                the user's, and all messages before it must be system messages.
        """
        if self._question is None:
            return messages
        *before, last = messages
        if last.role != "user" or any(message.role != "system" for message in before):
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"a conversation of {roles} is not one question, which `question` puts in a form; remove "
                "`render.question`"
            )
        return [*before, Message("user", self._question.render(last.content, self._few_shot))]

    def _plain(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids of a plain prompt, without the end-of-text that some tokenizers add."""
        if len(messages) != 1 or messages[0].role != "user":
            roles = ", ".join(message.role for message in messages) or "nothing"
            raise TemplateError(
                f"a conversation of {roles} needs a chat template; {proposal(self.tokenizer)}"
            )
        ids, added = self._encoder.ids(messages[0].content, adds=True)
        while ids and added[-1] and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
            added.pop()
        return np.array(ids, dtype=np.int32)

    def _is_ended(self, ids: np.ndarray) -> bool:
        """Return True if ids end with the token that ends a turn."""
        return len(ids) > 0 and int(ids[-1]) == self._turn.end_id

    def _tail(self, messages: Sequence[Message], is_ended: bool) -> np.ndarray:
        """Return the ids that follow a response: the end of its turn, the messages, and the generation
        prompt. If `is_ended`, the response has the end of its turn already, and the result does not repeat
        it. Without a template, return the ids of the messages' content."""
        if any(message.role == "assistant" for message in messages):
            raise TemplateError(
                "an assistant message cannot be appended to a response; append what the user or the "
                "environment says"
            )
        if self._chat is None:
            return self._ids("".join(message.content for message in messages))
        tail = self._chat.behind_response(messages, generate=True)
        return self._ids(tail.removeprefix(self._turn.end_text) if is_ended else tail)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system is None or any(message.role == "system" for message in messages):
            return list(messages)
        return [Message("system", self.system), *messages]

    def _response_text(self, chat: ChatTemplate, response: Message, is_text: bool) -> str:
        """Return the text of a response in a chat, up to the end of its turn. The docstring of `response`
        describes how this text is found."""
        turn = self._turn
        rendered = chat.render([USER, response], generate=False)
        written = chat.content(response)
        if turn.opens_reasoning and (opened := _REASONING.match(written)):
            written = written[opened.end() :]
        added = rendered.removeprefix(turn.opening).removesuffix(turn.closing)
        keeps_text = "".join(written.split()) in "".join(added.split())
        if rendered == turn.opening + added + turn.closing and keeps_text:
            return added
        if not is_text:
            raise TemplateError(
                f"the template writes a response with {', '.join(response.fields)} otherwise than it "
                "begins and ends other responses; remove these fields, or choose another template"
            )
        if turn.opens_reasoning and "</think>" not in written:
            raise TemplateError(
                f"the template's prompt opens <think>, and the response {response.content[:40]!r} never "
                "closes it; put its reasoning and </think> before it, or choose a template that opens none"
            )
        return turn.lead + written

    def _check_history(self, chat: ChatTemplate, messages: Sequence[Message], ids: np.ndarray) -> None:
        """Check that the text of the ids, which were built turn by turn, is the beginning of the template's
        rendering of the complete conversation. White space is ignored.

        Raises:
            TemplateError: the texts differ.
        """
        whole = self._ids(chat.render(self._with_system(messages), generate=False))
        learned, written = ("".join(self.decode(part).split()) for part in (ids, whole))
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

    def _is_text(self, response: Message) -> bool:
        """Return True if there is no template, or if the template writes only the role and the content of the
        response, and none of its further fields."""
        if self._chat is None:
            return True
        whole = self._chat.render([USER, response], generate=False)
        with suppress(TemplateError):  # the template may need the fields
            return whole == self._chat.render([USER, Message("assistant", response.content)], generate=False)
        return False

    def _ids(self, text: str) -> np.ndarray:
        return marked_ids(self._encoder, text)

    def _check_chatml(self) -> None:
        for token in CHATML_TOKENS:
            if len(self._ids(token)) != 1:
                raise TemplateError(
                    f"the chatml template needs {token} as one token, and this tokenizer has none; add it "
                    f"to the tokenizer and the model, or {proposal(self.tokenizer)}"
                )
