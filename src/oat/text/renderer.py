"""The renderer, which turns text into token ids and ids into text. All text that the policy reads or learns
from becomes tokens here.

A sampled response is not tokenised again: a later message is appended to its ids. So the learner trains on
exactly the ids that were sampled.

A control token is a special token of the tokenizer, or an added token that the template names or writes.
Control tokens in messages become ordinary text, so data cannot end a turn or begin another
(`text/control_tokens.py`). There are three exceptions:

* In the content of an assistant's or a system message, the tokens of `control_tokens.is_own` keep their
  meaning.
* In plain prompts (`template=None`), special tokens keep their meaning, because people write their own
  formats there.
* A template may make a control token from a message's role.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from oat.errors import TemplateError
from oat.text.answers import is_text, refuse_empty, refuse_other_history, response_text, turns_of, whole_text
from oat.text.chat_template import (
    RESPONSE,
    USER,
    ChatTemplate,
    check_chatml,
    load_template,
    on_day,
    plain_prompt,
    proposal,
    special_tokens,
)
from oat.text.control_tokens import any_of, is_own, marked
from oat.text.decoding import Decoder, Ids, text_ends
from oat.text.encoding import Encoder
from oat.text.joining import Joiner
from oat.text.openings import Openings, cut, plain_opening
from oat.text.question_forms import Form
from oat.text.template_study import Turn, look_for_rewriting, study_control, study_turn
from oat.text.vocabulary import num_ids
from oat.types import Message, Opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SpecialTokens = Literal["keep", "drop"]

_MOST_TAILS = 1024
"""Number of messages whose ids `Renderer.extend` keeps, since environments often say the same."""


class Renderer:
    """A renderer of messages with one tokenizer and one template.

    Args:
        template: "chatml"; "tokenizer" for the tokenizer's template; the path of a .jinja file; or None for
            plain prompts. A plain prompt is the content of one user message.
        system: content of a system message for conversations that have none; it needs a template.
        date: day that a template reads with `strftime_now("...")`, at midnight; None: today.
        stop: strings that end a response. `text` says where its text then ends.
        eos_ids: further ids that end a response, usually those of the model's generation config.
        question: form into which the user message of a prompt is put before it is rendered; None: no form.
        few_shot: number of worked examples that the form shows.
        special_tokens: "keep": the text of a response has the special tokens that the model wrote, except
            those that end a response; "drop": it has none.
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
        special_tokens: SpecialTokens = "keep",
    ):
        if template is None and system is not None:
            raise TemplateError(
                f"a system prompt needs a chat template; {proposal(tokenizer)}, or drop `render.system`"
            )
        self.tokenizer = tokenizer
        self.system = system
        self.stop = tuple(stop)
        self._question, self._few_shot = question, few_shot
        self._last: tuple[tuple[Message, ...], np.ndarray] = ((), np.zeros(0, np.int32))
        self._tails: dict[tuple[Message, bool, str], np.ndarray] = {}
        self._encoder = Encoder(tokenizer)
        self._decoder = Decoder(tokenizer, self._encoder)
        self._joiner = Joiner(self._encoder, self._decoder)
        self._keeps_special = special_tokens == "keep"
        self._text = partial(self._decoder, keeps_special=self._keeps_special)
        self.definition: dict[str, Any] = {
            "template": template,
            "system": system,
            "date": date and date.isoformat(),
            "stop": list(stop),
            "eos_ids": [int(i) for i in eos_ids],
            "has_turns": has_turns,
            "question": question and asdict(question),
            "few_shot": few_shot,
            "special_tokens": special_tokens,
        }
        self.num_tokens = num_ids(tokenizer)
        self.template = None if template is None else load_template(template, tokenizer)
        self.source = "" if self.template is None else on_day(self.template, date or datetime.date.today())
        if date is not None and self.source == (self.template or ""):
            raise TemplateError(
                f"the date {date} is given, and the template reads none; remove it or take another template"
            )
        self._chat = self._openings = None
        self._turn = Turn(*self._decoder.end)
        if self.template is not None:
            self._chat = ChatTemplate(tokenizer, self._joiner, self.source)
            if template == "chatml":
                check_chatml(tokenizer)
            self._openings = Openings(self._chat)
            self._turn = study_turn(self._chat, self._openings)
            self._chat.set_control(study_control(self._chat, self.template), ends=self._turn.ends)
            look_for_rewriting(self._chat, is_refused=has_turns)
        ends = {tokenizer.eos_token_id, self._turn.end_id} - {None}
        self.stop_ids: frozenset[int] = frozenset(ends | {int(i) for i in eos_ids})
        self._silent = ends | {i for i in self.stop_ids if not is_own(self._decoder.added.get(i, ""))}

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast", definition: Mapping[str, Any]) -> "Renderer":
        """Make a renderer from a tokenizer and the attribute `definition` of another renderer."""
        form, day = definition["question"], definition["date"]
        given = {"question": form and Form.of(form), "date": day and datetime.date.fromisoformat(day)}
        return cls(tokenizer, **{**definition, **given})

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
        text = self._prompt_text(given)
        ids = self._joiner.plain(text) if self._chat is None else self._joiner.marked(text)
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
        is_ended, context = self._is_ended(ids), self._joiner.of_ids(np.asarray(ids))
        said = message, is_ended, context
        if said not in self._tails:
            if len(self._tails) >= _MOST_TAILS:
                self._tails.clear()
            text = self._tail([message], is_ended)
            if is_ended and int(ids[-1]) != self._turn.end_id:  # it may begin the message, as GLM's <|user|>
                text = text.removeprefix(context)
            # the context was sampled, so nobody could change it if it suits no token
            self._tails[said] = self._follow(text, context, is_strict=False)
        return np.concatenate([np.asarray(ids, dtype=np.int32), self._tails[said]])

    def whole(self, messages: Sequence[Message], response: str) -> np.ndarray:
        """Return the ids of a complete conversation for a reward model, (T,) int32. With a chat template, the
        template renders all messages at once; if it then leaves out or changes a part of the response other
        than white space, the response's own text follows the prompt (`answers.whole_text`). Without a
        template, the ids are those of the prompt, the response and the end-of-text. Special tokens in the
        response, other than those of `is_own`, become ordinary text.

        Args:
            messages: the messages before the response.

        Raises:
            TemplateError: the template refuses the conversation or leaves out a message, or there is none.
        """
        if self._chat is None:
            control = any_of(token for token in special_tokens(self.tokenizer) if not is_own(token))
            asked, context = self.prompt(messages), self._joiner.context(self._prompt_text(messages))
            said = self._joiner.marked(marked(response, control), context, keeps_blanks=True)
            end = [*[id for id in (self._turn.end_id,) if id is not None], *self._decoder.suffix[1:]]
            return np.concatenate([asked, said, np.array(end, np.int32)])
        whole = self._with_system([*messages, Message("assistant", response)])
        return self._joiner.marked(whole_text(self._chat, self._turn, whole, self._opening))

    def within(self, messages: Sequence[Message], text: str) -> np.ndarray:
        """Return the ids, (T,) int32, of a text behind a prompt, without an end. Special tokens in the text
        are read as ordinary text."""
        shown = marked(text, any_of(special_tokens(self.tokenizer)))
        context = self._joiner.context(self._prompt_text(messages))
        return self._joiner.marked(shown, context, is_strict=False)

    @property
    def trailing(self) -> np.ndarray:
        """The ids that the template writes after the end of a turn, often a line break, (T,) int32."""
        return self._joiner.marked(self._turn.trailing, self._joiner.context(self._turn.end_text))

    def opening(self, messages: Sequence[Message]) -> Opening:
        """Return what the prompt of these messages has written of its response, such as `<think>`."""
        return self._opening(self._with_system(self._asked(messages)), self._prompt_text(messages))

    @property
    def prefix(self) -> list[int]:
        """The ids that the tokenizer itself puts before every plain text."""
        return self._decoder.prefix

    def is_border(self, before: str, after: str) -> bool:
        """Return True if a prompt may end between two texts: with a template, or if the ids of the first are
        the beginning of the ids of both together."""
        return self._chat is not None or self._encoder.is_border(before, after)

    def written(self, prompt: Sequence[Message], messages: Sequence[Message]) -> str:
        """Return the text of a prompt and the messages behind it, before the tokenizer reads it."""
        conversation = [*(self._asked(prompt) if prompt else ()), *messages]
        if self._chat is None:
            return "".join(message.content for message in conversation)
        return self._chat.written(self._with_system(conversation))

    def made_ordinary(self, message: Message) -> list[str]:
        """Return the special tokens in the content of a message that are read as ordinary text."""
        return [] if self._chat is None else self._chat.made_ordinary(message)

    def reads(self, field: str, *, beside_calls: bool = False) -> bool:
        """Return True if the template reads a field of messages (`ChatTemplate.reads`)."""
        return self._chat is not None and self._chat.reads(field, beside_calls=beside_calls)

    def response(self, message: str | Message, prompt: Sequence[Message] = ()) -> np.ndarray:
        """Return the ids of a response from a person or a file, with its end of turn, (T,) int32.

        If the ids of prompt and response together begin with those of the prompt, they are the rest. If not,
        the tokenizer joins the end of the prompt with the beginning of the response; then they are ids that
        give the same text behind the prompt.

        With a chat template, the template renders a short prompt with this response, and the text after the
        prompt is taken. It may differ from the response: Qwen3's template adds an empty block of reasoning,
        and Llama 3's template trims the text.

        The rendering is discarded in two cases: the text before or after this response is not the template's
        usual one; or the template leaves out a part of the response other than white space. Then the
        response's own text is used. What the prompt has written of the response already (`opening`), such as
        <think>, is removed from the beginning of this text.

        Args:
            message: a text, or an assistant's message. The template may write the further fields of a
                message, such as reasoning and tool calls.
            prompt: the messages before the response. If there are none, a response in a chat follows a short
                prompt, and one without a template begins a text.

        Raises:
            TemplateError: there are four possible faults. (1) The prompt opens reasoning, and neither the
                response nor the template closes it. (2) The template writes fields of the response, and the
                rendering is discarded. (3) The response has no text, the template writes none of its fields,
                and its weight is not 0. (4) No ids give the text of the response behind the prompt.
        """
        response = Message("assistant", message) if isinstance(message, str) else message
        before = self._prompt_text(prompt) if prompt else self._turn.opening
        asked = self._with_system(self._asked(prompt)) if prompt else [USER]
        text = self._response_text(response, asked, before)
        return self._ended(text, self._joiner.context(before))

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
            ids, start = self.prompt([Message("user", response)]), len(self.prefix)
            ids = np.concatenate([ids[:start], self._with_end(ids[start:])])
            return ids, np.arange(len(ids)) > 0
        messages = (
            [Message("assistant", response)]
            if isinstance(response, str)
            else [Message.of(message) for message in response]
        )
        ids, mask = self.loss_mask([*prompt, *messages], prompt=len(prompt))
        if len(messages) > 1 and self._chat is not None:
            conversation = self._with_system([*self._asked(prompt), *messages])
            whole = self._joiner.marked(self._chat.render(conversation, generate=False))
            refuse_other_history(self.decode(ids), self.decode(whole))
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
        parts, masks, asked = list[np.ndarray](), list[np.ndarray](), list[Message]()
        context = text = ""
        turns = turns_of(messages, prompt)
        for place, (is_response, group) in enumerate(turns):
            if is_response:
                text = self._response_text(group[0], asked, text)
                ids, size = self._answer(text, context, is_last=place == len(turns) - 1)
                size *= bool(group[0].fields.get("weight", 1))
                text += self._turn.end_text if place == len(turns) - 1 else self._turn.later_text
            elif not parts:
                text, ids, size = self._prompt_text(group), self.prompt(group), 0
                asked = self._with_system(self._asked(group))
            else:
                asked = [USER, RESPONSE, *group]
                text, size = self._tail(group, is_ended=self._turn.end_id is not None), 0
                ids = self._follow(text, context)
            parts.append(ids)
            masks.append(np.arange(len(ids)) < size)
            context = self._joiner.context(context + text)
        return np.concatenate(parts), np.concatenate(masks)

    def text(self, ids: Ids, after: Ids = ()) -> str:
        """Return the text of a response for oracles and people, as the model wrote it. It has no tokens that
        end a response, except those of `is_own` in `eos_ids`, such as </answer>. It ends before the first
        stop string; or behind it, if that closes a tag which the text opens (`</answer>`). If
        `special_tokens` is "drop", it has no special tokens.

        Args:
            after: the ids before the response; only the last one matters. Empty: the response begins a text.
        """
        return self.cut(self._text([id for id in map(int, ids) if id not in self._silent], after))

    def text_ends(self, ids: Ids, after: Ids = ()) -> np.ndarray:
        """Return the number of characters of `text(ids, after)` that are complete after each of the ids.

        Args:
            ids: (T,) ids of a response.

        Returns:
            (T,) int32, never falling. The last entry, if there is one, is the length of the text.
        """
        is_kept = np.array([int(i) not in self._silent for i in ids], dtype=bool)
        kept = [int(i) for i in np.asarray(ids)[is_kept]]
        pieces = self._decoder.pieces(kept, after, keeps_special=self._keeps_special)
        text = self._text(kept, after)
        found = text_ends(kept, text, partial(self._text, after=after), pieces)
        ends = np.array([0, *found], np.int32)
        return np.minimum(ends[np.cumsum(is_kept)], np.int32(len(self.cut(text))))

    def decode(self, ids: Ids, after: Ids = ()) -> str:
        """Return the text of ids, special tokens included. The engine searches this text for stop strings.

        Args:
            after: as for `text`.
        """
        return self._decoder(ids, after)

    def cut(self, text: str) -> str:
        """Return a text up to its first stop string. One that closes a tag belongs to the text."""
        return cut(text, self.stop)

    def _asked(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._question is None else self._question.put(messages, self._few_shot)

    def _prompt_text(self, messages: Sequence[Message]) -> str:
        """Return the text of a prompt: with a template, up to the generation prompt, its control tokens
        marked."""
        messages = self._asked(messages)
        if self._chat is not None:
            return self._chat.complete(self._with_system(messages), generate=True)
        return plain_prompt(messages, self.tokenizer)

    def _opening(self, asked: Sequence[Message], text: str) -> Opening:
        return plain_opening(text) if self._openings is None else self._openings.of(asked, text)

    def _response_text(self, response: Message, asked: Sequence[Message], before: str) -> str:
        """Return the text of a response without the end of its turn.

        Args:
            asked: the messages of its prompt, which ends with the text `before`.
        """
        has_text_only = is_text(self._chat, response)
        if has_text_only:
            refuse_empty(response)
        if self._chat is None:
            return response.content
        opening = self._opening(asked, before)
        return response_text(self._chat, self._turn, asked, opening, response, has_text_only)

    def _answer(self, text: str, context: str, *, is_last: bool) -> tuple[np.ndarray, int]:
        """Return the ids of a response with its end, and how many of them are learned. A template may end a
        response in another way when further messages follow; then that end is not learned."""
        if is_last or self._turn.later_text == self._turn.end_text:
            ids = self._ended(text, context)
            return ids, len(ids)
        ids = self._said(text, context)
        end = self._follow(self._turn.later_text, self._joiner.context(context + text))
        return np.concatenate([ids, end]), len(ids)

    def _ended(self, text: str, context: str) -> np.ndarray:
        """Return the ids of the text of a response, with the end of its turn."""
        if self._chat is None:
            return self._with_end(self._said(text, context))
        return self._said(text + self._turn.end_text, context)

    def _with_end(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids of a plain response with an end, unless they have one, as those of many data."""
        if self._turn.end_id is None or set(ids[-1:].tolist()) & self.stop_ids:
            return ids
        return np.append(ids, np.int32(self._turn.end_id))

    def _said(self, text: str, context: str) -> np.ndarray:
        """Return the ids of the text of a response. The tokenizer may take away the white space that the
        template writes before it, but not its own."""
        own = text.removeprefix(self._turn.lead)
        said = own if self._joiner.takes_blanks(context, own) else text
        return self._follow(said, context, keeps_blanks=True)

    def _follow(self, text: str, context: str, **how: bool) -> np.ndarray:
        if self._chat is not None:
            return self._joiner.marked(text, context, **how)
        return np.array(self._joiner.following(text, context, **how), dtype=np.int32)

    def _is_ended(self, ids: np.ndarray) -> bool:
        """Return True if ids end with a token that ends a turn. The end-of-text of a document does not."""
        last = int(ids[-1]) if len(ids) else -1
        return last == self._turn.end_id or last in self.stop_ids - {self.tokenizer.eos_token_id}

    def _tail(self, messages: Sequence[Message], is_ended: bool) -> str:
        """Return the text that follows a response: the end of its turn, the messages, and the generation
        prompt. If `is_ended`, the response has an end of its turn already, and the result does not repeat
        it. Without a template, return the messages' content."""
        if any(message.role == "assistant" for message in messages):
            raise TemplateError(
                "an assistant message cannot be appended to a response; append what the user or the "
                "environment says"
            )
        if self._chat is None:
            return "".join(message.content for message in messages)
        tail = self._chat.behind_response(messages, generate=True)
        return tail.removeprefix(self._turn.later_text) if is_ended else tail

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system is None or any(message.role == "system" for message in messages):
            return list(messages)
        return [Message("system", self.system), *messages]
