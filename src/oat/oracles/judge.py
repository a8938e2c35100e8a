"""The oracle `judge`: a language model at any endpoint that speaks OpenAI's chat completions (POST
{url}/chat/completions). The page for users is docs/oracles/judge.md.

`mode: compare` asks which of two responses is better. `mode: score` asks for a number for each response. A
verdict is read from the reply's text and from the log-probabilities of its token (judge_verdicts.py). So is a
score, if a digit tells it about (`is_of_digits`). In three cases the text alone is read: `reads` is `text`;
`reads` is `auto`, and the endpoint gives no log-probabilities; or a digit does not tell a score. The texts
that are sent are in judge_prompts.py.

If a reply has no verdict, the option `invalid` says what follows: the judge is asked again, or the value
is marked `abstain` or `tie`. No verdict is drawn at random.

If the judge has a budget, the most that a question can cost is set aside before it is asked. This is the
price of `tries` tries for each call. Each try counts with the most tokens that it can take:

* one prompt token for each byte of the texts, because no token is shorter than a byte;
* `template_tokens` for the endpoint's chat template;
* `max_tokens` for the reply.

The price of an answer comes from the usage that the replies report. If a try does not report a number of
tokens, or reports something that is none, such as 0, this number is the most that the try can take, because
the endpoint may charge for it.

The key is read from the environment and sent in one header. It is in no file, message or metric. The judged
responses and all replies are not trusted. The endpoint's owner is trusted, and sees the texts.

Not handled: calls that were under way at a kill, which are made again and may be paid twice.
"""

import hashlib
import inspect
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import Any

from oat.errors import (
    ClosedError,
    ConfigError,
    NoReplyError,
    OatError,
    OracleError,
    OutageError,
    RefusalError,
    warn,
)
from oat.oracles.base import Mean, Oracle
from oat.oracles.http_client import HttpClient
from oat.oracles.judge_calls import ALTERNATIVES, REFUSES_ALL, Call, Calls, OpenQuestion, own_question
from oat.oracles.judge_config import OPERATION, JudgeConfig, is_of_digits, judge_config, key_of
from oat.oracles.judge_prompts import TIE, comparison, scoring
from oat.oracles.judge_replies import ChatCompletion, read_completion
from oat.oracles.judge_texts import score_reader, verdict_reader
from oat.oracles.judge_verdicts import MISSING, read_reply
from oat.types import Answer, Key, Kind, Mark, Message, Price, Question

_PATH = "/chat/completions"
_SHOWN = 80
_READING = 4
"""The version of how replies are read. Answers that were read in another way are not used again."""


class Judge(Oracle):
    """An oracle that asks a chat model. The options are those of `JudgeConfig`. The endpoint is not called
    before the first question.

    Raises:
        ConfigError: an option is wrong (`judge_config`), there is no URL, a URL or the key cannot be used, or
            the variable that `key_env` names is not set.
    """

    __signature__ = inspect.signature(JudgeConfig)
    when_it_abstains = (
        "its replies have no verdict; ask it one question yourself: a model that thinks first needs a higher "
        "max_tokens, others are read or asked in another way (its options reads, ties and mode; "
        "docs/oracles/judge.md)"
    )

    def __init__(self, **options: Any):
        self.config = c = judge_config(options)
        self.answers: Kind = c.mode
        self.names_cost = c.price_in is not None
        self.version, self.max_outage_s = self._version(), c.max_outage_s
        key, source = key_of(c.key_env)
        named = c.url or os.environ.get("OAI_URL") or ()
        urls = [named] if isinstance(named, str) else named
        if not urls:
            raise ConfigError(
                "the oracle judge has no `url`; give the base of an endpoint, such as "
                "http://127.0.0.1:8000/v1, or set OAI_URL"
            )
        self.where_asked = f"{c.model} at {', '.join(urls)}"
        bases = [url.rstrip("/").removesuffix(_PATH) for url in urls]
        limits: dict[str, Any] = {
            "timeout_s": c.timeout_s,
            "max_outage_s": c.max_outage_s,
            "concurrency": c.concurrency,
        }
        self._client = HttpClient(bases, token=key, token_from=source, **limits)
        self._masked = lambda text: text.replace(key, "[key]") if key else text
        self._reads = c.reads if c.mode == "compare" or is_of_digits(c) else "text"
        self._has_logprobs: bool | None = False if self._reads == "text" else None
        self._refuses_logprobs = False
        self._alternatives = ALTERNATIVES[c.mode]
        self._changed = threading.Condition()
        self._open: dict[str, OpenQuestion] = {}
        self._flow = Calls(c.concurrency, needs_logprobs=self._reads == "logprobs")
        self._is_bound = False
        self._warned = set[str]()
        self._replies = 0
        self._invalid = 0
        self._pairs = 0
        self._bias = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Latency, outages and retries of the HTTP client, and two metrics of replies:

        * `oracle/invalid_frac`: the share of replies without a verdict or score;
        * `oracle/position_bias`: the probability that the response shown first wins, minus one half. It is
          the mean over the pairs that were shown in both orders.
        """
        found = {f"oracle/{name}": self._client.counts[name] for name in ("latency_s", "outages", "retries")}
        if self._replies:
            found["oracle/invalid_frac"] = Mean(self._invalid, self._replies)
        if self._pairs:
            found["oracle/position_bias"] = Mean(self._bias, self._pairs)
        return found

    def bind(self) -> None:
        """Tell the judge that a budget in tokens or money limits it. From now on, a try with the status 502
        or 504 counts as if it had taken the most tokens that it can take."""
        self._is_bound = True

    def price(self, question: Question) -> Price:
        """Return the price of a question if each call takes all its tries, and each try takes the most
        tokens."""
        c, calls = self.config, self._calls(question)
        return self._price(
            question.size, c.tries * sum(call.bound for call in calls), c.tries * c.max_tokens * len(calls)
        )

    def submit(self, questions: Sequence[Question]) -> list[str]:
        asked = [
            OpenQuestion(question, calls, len(calls))
            for question in questions
            for calls in [self._calls(question)]
        ]
        with self._changed:
            self._open |= {str(opened.question.key): opened for opened in asked}
            self._flow.add(asked)
        self._go_on()
        return [str(question.key) for question in questions]

    def collect(self, tickets: Sequence[str], seconds: float) -> list[tuple[str, Answer]]:
        """Return answers to questions of `tickets`, each with its ticket. If none is ready, wait at most
        `seconds` for the first. If some questions have answers and others have errors that end the run,
        return the answers now, and raise an error at the next call.

        Raises:
            OutageError: the endpoint has not answered for `max_outage_s`.
            ClosedError: the endpoint refuses every question, for example for the key or the credit, and no
                other call is under way.
            OracleError: `reads` is "logprobs", and the endpoint gives no log-probabilities; or the HTTP
                client fails.
        """
        with self._changed:
            self._changed.wait_for(lambda: any(self._is_there(ticket) for ticket in tickets), timeout=seconds)
            there = {ticket: self._open[ticket] for ticket in tickets if self._is_there(ticket)}
            fatal = {
                ticket: error
                for ticket, opened in there.items()
                if (error := self._fatal(opened)) is not None
            }
            if fatal and len(fatal) == len(there):
                raise next(iter(fatal.values()))
            answered = [ticket for ticket in there if ticket not in fatal]
            for ticket in answered:
                del self._open[ticket]
        return [(ticket, self._answer(there[ticket])) for ticket in answered]

    def close(self) -> None:
        """End the calls that are under way, and the connections."""
        self._client.close()

    def _is_there(self, ticket: str) -> bool:
        """Return True if all calls of a question have ended, and no refusal of them is open. A question that
        ends the run comes after the calls under way: their replies are paid for, and may be answers."""
        opened = self._open.get(ticket)
        if opened is None or opened.left or any(call.refused_at is not None for call in opened.calls):
            return False
        is_closed = any(isinstance(call.error, ClosedError) for call in opened.calls)
        return not is_closed or not self._flow.under_way

    def _calls(self, question: Question) -> list[Call]:
        c, calls = self.config, list[Call]()
        common: dict[str, Any] = {
            "rubric": c.rubric,
            "has_reference": c.reference and question.reference is not None,
        }
        asked: list[tuple[tuple[int, ...], tuple[str, str]]]
        if c.mode == "score":
            common |= {"low": c.range[0], "high": c.range[1], "is_whole": c.max_tokens == 1}
            asked = [
                ((place,), scoring(question, text, **common))
                for place, text in enumerate(question.candidates)
            ]
        else:
            orders = {"both": [(0, 1), (1, 0)], "one": [(0, 1)], "random": [self._drawn(question)]}[c.orders]
            asked = [(order, comparison(question, order, ties=c.ties, **common)) for order in orders]
        for order, (instructions, material) in asked:
            texts = (
                {"system": instructions, "user": material}
                if c.instructions == "system"
                else {"user": f"{instructions}\n\n{material}"}
            )
            bound = c.template_tokens + sum(len(text.encode()) for text in texts.values())
            calls.append(
                Call(order, [{"role": role, "content": text} for role, text in texts.items()], bound)
            )
        return calls

    def _drawn(self, question: Question) -> tuple[int, int]:
        """Return the order in which the judge sees a pair if `orders` is "random". A hash of the judge
        model's name and the two texts decides which text comes first, so the same two texts always have the
        same order."""
        texts = sorted(question.candidates)
        is_turned = hashlib.sha256(json.dumps([self.config.model, texts]).encode()).digest()[0] & 1
        return (1, 0) if (question.candidates[0] == texts[0]) == is_turned else (0, 1)

    def _go_on(self) -> None:
        """Send the calls that are due, or the judge's own question about refusals."""
        with self._changed:
            due, refused = self._flow.due(), self._flow.to_probe()
            due += self._flow.due()
        for opened, call in due:
            self._ask(opened, call)
        if refused is not None:
            self._probe(refused)

    def _probe(self, refused: Call) -> None:
        """Ask a short question of the judge's own (head of judge_calls.py). A refused call has a try left, so
        the try of this question is counted there, with at most what is set aside for a try."""
        c, own = self.config, self._calls(own_question(self.answers))[0]
        own.bound = min(own.bound, refused.bound)
        own.wants = refused.wants if self._reads == "logprobs" else 0
        with self._changed:
            self._flow.sends(own)
        failed = partial(refused.took, own.bound, c.max_tokens)
        future = self._post(own, 1, failed)
        future.add_done_callback(partial(self._probed, refused, own))

    def _probed(self, refused: Call, own: Call, future: "Future[ChatCompletion]") -> None:
        """Take the end of the judge's own question. This runs on the client's thread."""
        if future.cancelled():
            return
        error, first = future.exception(), refused.error
        with self._changed:
            self._flow.probed()
            if error is None:
                refused.took(*own.counted(future.result(), self.config.max_tokens))
            if isinstance(error, RefusalError) and isinstance(first, RefusalError):
                self._flow.end(
                    ClosedError(REFUSES_ALL.format(first.status, first.said), first.status, first.said)
                )
            elif isinstance(error, OutageError):
                self._flow.end(error)
            else:
                self._flow.explain(own)
            self._changed.notify_all()
        self._go_on()

    def _ask(self, opened: OpenQuestion, call: Call) -> None:
        """Send a call. It asks for as many alternatives as the endpoint gives, so far as is known, and for
        none if the text alone is read."""
        c = self.config
        is_given = self._has_logprobs is not False and not self._refuses_logprobs
        call.wants = min(call.wants, self._alternatives) if is_given else 0
        future = self._post(call, c.tries - call.tries, lambda: call.took(call.bound, c.max_tokens))
        future.add_done_callback(partial(self._ended, opened, call))

    def _post(self, call: Call, tries: int, has_failed: Callable[[], None]) -> "Future[ChatCompletion]":
        """Send the request of a call.

        Args:
            tries: largest number of tries.
            has_failed: called after each failed try.
        """
        c = self.config
        logprobs = {"logprobs": True, "top_logprobs": call.wants} if call.wants else {}
        body = {
            "model": c.model,
            "messages": call.messages,
            c.tokens_field: c.max_tokens,
            "temperature": 0,
            **logprobs,
            **c.extra,
        }
        sent = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        return self._client.post(
            _PATH,
            sent,
            partial(read_completion, most_tokens=c.max_tokens),
            deadline_s=c.max_outage_s + c.tries * c.timeout_s,
            max_tries=tries,
            has_failed=has_failed,
            counts_gateways=self._is_bound,
        )

    def _ended(self, opened: OpenQuestion, call: Call, future: "Future[ChatCompletion]") -> None:
        """Take the result of a call. If another try is due, send the call again; otherwise end it. This runs
        on the client's thread."""
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._take_reply(call, future.result())
            if (
                call.value is None
                and call.error is None
                and self.config.invalid == "retry"
                and call.tries < self.config.tries
            ):
                return self._ask(opened, call)
        else:
            call.error = (
                error
                if isinstance(error, OatError)
                else OracleError(f"the judge's client failed: {type(error).__name__}")
            )
            fewer = call.fewer(needs_logprobs=self._reads == "logprobs")
            if isinstance(error, RefusalError) and error.names_logprobs and fewer is not None:
                call.error, call.wants = None, fewer
                return self._ask(opened, call)
        with self._changed:
            self._flow.has_ended(opened, call)
            self._changed.notify_all()
        return self._go_on()

    def _take_reply(self, call: Call, reply: ChatCompletion) -> None:
        """Set the value or the error of a call from a reply, and count the tokens of the try."""
        c = self.config
        call.took(*call.counted(reply, c.max_tokens))
        call.is_uncounted |= None in (reply.prompt_tokens, reply.completion_tokens)
        has_tokens = reply.tokens is not None
        is_without = not has_tokens and bool(reply.answer) and reply.end != "broken"
        if is_without and call.wants and self._reads == "logprobs" and not self._has_logprobs:
            call.error = OracleError(
                f"{c.model} gives no log-probabilities; set oracle.reads to text or auto, or ask an "
                "endpoint that has them"
            )
            return
        if has_tokens and call.wants:
            self._has_logprobs, self._alternatives = True, min(self._alternatives, call.wants)
        elif is_without and not call.wants:
            self._refuses_logprobs = True
        elif is_without and self._has_logprobs is None:
            self._has_logprobs = False
        self._replies += 1
        self._read(call, reply)
        call.said, call.lacks = self._masked(reply.said)[:_SHOWN], self._masked(call.lacks)
        self._invalid += call.value is None

    def _read(self, call: Call, reply: ChatCompletion) -> None:
        """Read the verdict or the score of a reply into its call."""
        c = self.config
        if c.mode == "score":
            reader = score_reader(*c.range, are_whole=c.max_tokens == 1)
            scores = read_reply(reply, reader, self._reads)
            call.lacks, call.unused = scores.lacks, scores.unused if call.wants else ""
            if scores.shares is not None:
                call.value = math.fsum(score * share for score, share in scores.shares.items())
            return
        verdicts = read_reply(reply, verdict_reader(("0", "1", TIE) if c.ties else ("0", "1")), self._reads)
        call.lacks, call.unused = verdicts.lacks, verdicts.unused if call.wants else ""
        if verdicts.shares is not None:
            call.tie = verdicts.shares.get(TIE, 0.0)
            call.value = verdicts.shares.get("0", 0.0) + call.tie / 2

    def _fatal(self, opened: OpenQuestion) -> OatError | None:
        """Return the error of a question if every other question would meet it as well; None otherwise."""
        for call in opened.calls:
            error = call.error
            if isinstance(error, ClosedError):
                return ClosedError(f"the judge {self.config.model}: {error}", error.status, error.said)
            if error is not None and not isinstance(error, NoReplyError | RefusalError):
                return error
        return None

    def _answer(self, opened: OpenQuestion) -> Answer:
        question, calls = opened.question, opened.calls
        self._warn_of(calls)
        values, marks = self._scores(calls) if question.kind == "score" else self._comparison(calls)
        spent = self._price(
            question.size,
            sum(call.prompt_tokens for call in calls),
            sum(call.completion_tokens for call in calls),
        )
        seconds = time.monotonic() - opened.since
        return Answer(
            question.key,
            values,
            marks,
            spent.queries,
            spent.cost,
            by="judge",
            seconds=seconds,
            tokens=spent.tokens,
        )

    def _scores(self, calls: Sequence[Call]) -> tuple[tuple[float, ...], tuple[Mark, ...]]:
        return tuple(call.value or 0.0 for call in calls), tuple(self._mark(call) for call in calls)

    def _comparison(self, calls: Sequence[Call]) -> tuple[tuple[float, ...], tuple[Mark, ...]]:
        """Return the value and the mark of a comparison. The value is the probability that the first
        candidate wins, averaged over the orders in which the judge saw the candidates. If the judge
        gave no verdict in one order, the comparison has the mark of this order."""
        if amiss := [mark for call in calls if (mark := self._mark(call)) != "ok"]:
            return (0.5,), (amiss[0],)
        shown = [call.value for call in calls if call.value is not None]
        if len(calls) == 2:
            self._pairs += 1
            self._bias += sum(shown) / 2 - 0.5
        p = sum(
            value if call.order == (0, 1) else 1 - value for call, value in zip(calls, shown, strict=True)
        ) / len(calls)
        tie = sum(call.tie for call in calls) / len(calls)
        is_tie = abs(p - 0.5) <= self.config.tie_width or tie >= max(p, 1 - p) - tie / 2
        return ((0.5,), ("tie",)) if is_tie else ((min(max(p, 0.0), 1.0),), ("ok",))

    def _mark(self, call: Call) -> Mark:
        if call.error is not None:
            return "failed"
        if call.value is None:
            return "tie" if self.config.invalid == "tie" else "abstain"
        return "ok"

    def _price(self, queries: int, prompt_tokens: int, completion_tokens: int) -> Price:
        c = self.config
        cost = (prompt_tokens * (c.price_in or 0.0) + completion_tokens * (c.price_out or 0.0)) / 1e6
        return Price(queries, prompt_tokens + completion_tokens, cost)

    def _warn_of(self, calls: Sequence[Call]) -> None:
        """Give each kind of warning about calls at most once."""
        c = self.config
        name, is_priced = f"the judge {c.model}", self._is_bound or c.price_in is not None
        found = {
            kind: text
            for call in calls
            for kind, text in call.complaints(name, c.max_tokens, is_priced=is_priced).items()
        }
        if self._reads == "auto" and (self._refuses_logprobs or self._has_logprobs is False):
            found.pop(MISSING, None)
            found["logprobs"] = (
                f"{name} gives no log-probabilities{' any more' if self._has_logprobs else ''}, so verdicts "
                "and scores are read from its text alone; a new run with oracle.reads: text reads every "
                "reply alike"
            )
        for kind in found.keys() - self._warned:
            self._warned.add(kind)
            warn(found[kind])

    def _version(self) -> str:
        """Return a hash of the options that can change an answer, such as the model, of how replies are read,
        and of the messages that the templates make of an empty prompt and two empty responses. So the version
        changes with the judge's instructions and templates."""
        asked = Question(
            Key("", 0, 0, 0), self.config.mode, (Message("user", ""),), ("", ""), (0, 1), reference=""
        )
        texts = [call.messages for call in self._calls(asked)]
        options = {
            f.name: getattr(self.config, f.name) for f in fields(self.config) if f.name not in OPERATION
        }
        return hashlib.sha256(json.dumps([options, texts, _READING], sort_keys=True).encode()).hexdigest()[
            :16
        ]
