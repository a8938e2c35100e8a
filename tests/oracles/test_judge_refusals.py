"""What the oracle `judge` does when its endpoint refuses: it asks without log-probabilities, or the run ends
to be continued."""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from faulty_server import Reply
from fixtures import make_group, make_questions
from judge_shapes import USAGE, ZERO, reply, token
from openai_server import Says, Shown, completion, judging
from service_errors import OF_ALL, OF_ALL_IN_WORDS, OF_ONE, body

from oat.errors import ClosedError, OatWarning, OracleError, OutageError
from oat.oracles.judge import Judge
from oat.oracles.remote.client import RemoteOracle
from oat.types import Answer, Question

pytestmark = pytest.mark.usefixtures("brief_waits")
FIRST = {"0": 0.8, "1": 0.2}
ORDERS = {"compare": "one", "score": None}


@pytest.fixture
def judge() -> Iterator[Callable[..., Judge]]:
    """Yield a function that makes judges, and close them at the end."""
    made: list[Judge] = []

    def make(url: str, **options: Any) -> Judge:
        given = {"model": "m", "url": url, "orders": "one", "timeout_s": 5.0, **options}
        made.append(Judge(**{name: value for name, value in given.items() if value is not None}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def questions(*pairs: Sequence[str]) -> list[Question]:
    groups = [make_group(number, *texts) for number, texts in enumerate(pairs)]
    return make_questions(groups, "compare", 0, oracle="judge")


def ask(oracle: Any, *asked: Question) -> list[Answer]:
    tickets, found = oracle.submit(asked), dict[str, Answer]()
    while len(found) < len(tickets):
        found |= dict(oracle.collect([ticket for ticket in tickets if ticket not in found], 20.0))
    return [found[ticket] for ticket in tickets]


@pytest.mark.parametrize("status", [400, 403, 404, 422, 500, 501])
def test_log_probabilities_that_are_refused_are_asked_for_once(
    judge: Callable[..., Judge], status: int
) -> None:
    """An endpoint refuses log-probabilities by name. The judge asks again without them, and never again with
    them; no question fails. It says so once. If they are required, the run ends."""
    refusal = Reply(b'{"error": {"message": "not allowed to request logprobs"}}', status=status)
    with judging(lambda shown: refusal if "logprobs" in shown.body else "0") as (_, model, url):
        oracle = judge(url)
        with pytest.warns(OatWarning, match="read from its text alone") as warned:  # noqa: PT031
            for pair in ("a", "b"), ("c", "d"), ("e", "f"):
                (answer,) = ask(oracle, *questions(pair))
                assert (answer.values, answer.marks) == ((1.0,), ("ok",))
                assert answer.tokens == sum(model.tokens[-1]), "a refusal costs nothing"
        assert len(warned) == 1
        assert ["logprobs" in shown.body for shown in model.shown] == [True, False, False, False]
        with pytest.raises(OracleError, match=f"status {status}.*logprobs"):
            ask(judge(url, reads="logprobs"), *questions(("a", "b")))


@pytest.mark.parametrize(
    ("mode", "most", "said", "asked"),
    [
        ("score", 10, "logprobs: {asked} is greater than max allowed: {most}", [20, 10, 10]),
        ("compare", 3, "top_logprobs must be <= {most}, got {asked}", [5, 3, 3]),
        ("score", 3, "too many logprobs", [20, 5, 0, 0]),
        ("score", 5, "`top_n_tokens` must be >= 0 and <= {most}. Given: {asked}", [20, 5, 5]),
        ("score", 5, "Bad Request", [20, 5, 5]),
        ("score", 0, "Bad Request", [20, 5, 0, 0]),
        ("compare", 0, "Bad Request", [5, 0, 0]),
    ],
)
@pytest.mark.parametrize("reads", ["auto", "logprobs"])
def test_an_endpoint_that_gives_fewer_alternatives(
    judge: Callable[..., Judge], mode: Any, most: int, said: str, asked: list[int], reads: str
) -> None:
    """The judge asks for as many as the error names, else for five. If that is refused too, the text alone is
    read, or the run ends. So it is if the error does not say what it is about. One try is enough, since a
    refusal is none."""

    def says(shown: Shown) -> Says | Reply:
        wanted = shown.body.get("top_logprobs", 0)
        error = said.format(most=most, asked=wanted)
        return FIRST if wanted <= most else Reply(body(error), status=400)

    with judging(says) as (_, model, url), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        oracle = judge(url, mode=mode, reads=reads, tries=1, orders=ORDERS[mode])
        groups = [make_group(number, "a", *["b"] * (mode == "compare")) for number in range(2)]
        both = [make_questions([each], mode, 0, oracle="judge") for each in groups]
        is_lost = asked[-1] == 0
        if is_lost and reads == "logprobs":
            with pytest.raises(OracleError, match=said):
                ask(oracle, *both[0])
            return
        values = [ask(oracle, *each)[0].values[0] for each in both]
        share, whole = (0.8, 1.0) if mode == "compare" else (0.2, 0.0)
        assert values == [pytest.approx(whole if is_lost else share)] * 2
        assert [shown.body.get("top_logprobs", 0) for shown in model.shown] == asked
        assert len(warned) == is_lost


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_another_refusal_says_nothing_of_log_probabilities(judge: Callable[..., Judge], status: int) -> None:
    with judging(lambda shown: Reply(b"no such region", status=status)) as (_, model, url):
        with pytest.raises(ClosedError, match="no such region"):
            ask(judge(url), *questions(("a", "b")))
        asked = [("logprobs" in shown.body, shown.text == model.shown[0].text) for shown in model.shown]
        expected = [(True, True), (False, True), (False, False)]
        assert asked == expected[: 1 if status == 404 else 3], "a question of the judge's own comes last"


@pytest.mark.parametrize("said", [b"logprobs are not supported", b"Bad Request"])
def test_log_probabilities_that_are_refused_later_are_told(judge: Callable[..., Judge], said: bytes) -> None:
    """The endpoint gives them at first. When it refuses them, verdicts are read from texts from there on, and
    this is said once."""
    refusal = Reply(said, status=400)
    with judging(lambda shown: refusal if shown.number and "logprobs" in shown.body else FIRST) as (
        _,
        model,
        url,
    ):
        oracle = judge(url)
        assert ask(oracle, *questions(("a", "b")))[0].values == (pytest.approx(0.8),)
        with pytest.warns(OatWarning, match="no log-probabilities any more") as warned:
            later = [ask(oracle, *questions(pair))[0].values for pair in (("c", "d"), ("e", "f"))]
        assert (later, len(warned), len(model.shown)) == ([(1.0,), (1.0,)], 1, 4)


@pytest.mark.parametrize("tries", [1, 3])
def test_what_is_refused_with_and_without_log_probabilities(judge: Callable[..., Judge], tries: int) -> None:
    """An endpoint refuses log-probabilities, and some texts, and names neither. The questions with these
    texts fail, and no other. All that is billed is counted, and is no more than was set aside."""

    def says(shown: Shown) -> Says | Reply:
        is_refused = "logprobs" in shown.body or "bad" in shown.text
        return Reply(b"Bad Request", status=400) if is_refused else "0"

    texts = ["bad" if number % 5 == 0 else f"text {number}" for number in range(12)]
    asked = questions(*((text, "x") for text in texts))
    with judging(says) as (_, model, url):
        oracle = judge(url, tries=tries, orders="both")
        with pytest.warns(OatWarning) as warned:
            answers = ask(oracle, *asked)
        marks = [("failed",) if text == "bad" else ("tie",) for text in texts]
        assert [answer.marks for answer in answers] == marks
        assert sum(answer.tokens for answer in answers) == sum(map(sum, model.tokens))
        prices = [oracle.price(question) for question in asked]
        assert all(answer.tokens <= most.tokens for answer, most in zip(answers, prices, strict=True))
        assert len(warned) == 2, "a question that failed, and the lack of log-probabilities"


UNUSED = {
    "no alternatives": reply("0", [{"token": "0", "logprob": -0.5, "top_logprobs": []}]),
    "token ids": reply("0", [token("token_id:15", ("token_id:16", 0.2), p=0.8)]),
    "none in some replies": reply("0"),
}


@pytest.mark.parametrize("mode", ["compare", "score"])
def test_log_probabilities_that_cannot_be_used_are_told(judge: Callable[..., Judge], mode: Any) -> None:
    """Each reason is told once, also if usable ones came before. If the text is to be read, nothing is."""
    shapes = [reply("0", [ZERO]), *UNUSED.values(), *UNUSED.values(), reply("0", [ZERO])]

    def says(shown: Shown) -> Reply:
        return Reply(json.dumps(shapes[shown.number % len(shapes)]).encode())

    groups = [make_group(number, "a", *["b"] * (mode == "compare")) for number in range(len(shapes))]
    asked = [make_questions([each], mode, 0, oracle="judge") for each in groups]
    for reads in "auto", "text":
        with judging(says) as (_, _, url), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            oracle, told = judge(url, mode=mode, reads=reads, orders=ORDERS[mode]), list[int]()
            for each in asked:
                assert ask(oracle, *each)[0].marks == ("ok",)
                told.append(len(warned))
        assert told == ([0, 1, 2, 3, 3, 3, 3, 3] if reads == "auto" else [0] * len(shapes))
        assert len({str(each.message) for each in warned}) == len(warned)


def test_a_score_of_several_digits_needs_no_log_probabilities(judge: Callable[..., Judge]) -> None:
    with judging(lambda shown: "42") as (_, model, url):
        oracle = Judge(model="m", url=url, mode="score", range=(0, 100))
        (asked,) = make_questions([make_group(0, "a")], "score", 0, oracle="judge")
        assert ask(oracle, asked)[0].values == (42.0,)
        oracle.close()
        assert not any("logprobs" in shown.body for shown in model.shown)


@pytest.mark.sample("openrouter", "openai: quota", "an error within a reply", "nothing", "a list", seconds=2)
@pytest.mark.parametrize("name", [*OF_ALL, *OF_ALL_IN_WORDS, "an error within a reply"])
def test_an_error_that_all_would_meet_ends_the_run_to_be_continued(
    judge: Callable[..., Judge], name: str
) -> None:
    """In the middle of a run the endpoint refuses every question. What was answered is returned, no question
    fails or is paid for, and the error is that of an outage. Later the same questions are answered."""
    within = (200, {"error": {"code": 402, "message": "Insufficient credits"}})
    status, said = {**OF_ALL, **OF_ALL_IN_WORDS}.get(name, within)
    is_open = True

    def says(shown: Shown) -> Says | Reply:
        return FIRST if is_open or "good" in shown.text else Reply(body(said), status=status)

    with judging(says) as (_, model, url):
        oracle, asked = judge(url, reads="logprobs"), questions(("good", "x"), ("a", "b"), ("c", "d"))
        assert ask(oracle, *questions(("first", "x")))[0].marks == ("ok",)
        is_open = False
        tickets, found = oracle.submit(asked), dict[str, Answer]()
        with pytest.raises(ClosedError, match="run the same command again") as raised:  # noqa: PT012
            while len(found) < len(tickets):
                found |= dict(oracle.collect([ticket for ticket in tickets if ticket not in found], 20.0))
        assert isinstance(raised.value, OutageError)
        assert [answer.marks for answer in found.values()] in ([], [("ok",)])
        assert len({shown.text for shown in model.shown}) == len(model.shown), "none is tried again"
        is_open = True
        again = ask(judge(url), *asked)
        assert [answer.marks for answer in again] == [("ok",)] * 3


ONE = [name for name, (status, _) in OF_ONE.items() if status not in (429, 500, 503)]


@pytest.mark.sample("azure: filter", "pydantic", "the question's own words", "a firewall", seconds=1.0)
@pytest.mark.parametrize("name", [*ONE, "a firewall"])
def test_an_error_of_one_question_fails_it_alone(judge: Callable[..., Judge], name: str) -> None:
    """The others are answered, wherever the refused one stands, also if it is asked alone. The cost of the
    judge's own question is counted."""
    status, said = OF_ONE.get(name, (403, "<html>blocked</html>"))
    with judging(lambda shown: Reply(body(said), status=status) if "bad" in shown.text else FIRST) as (
        _,
        model,
        url,
    ):
        asked = questions(("a", "b"), ("bad", "c"), ("d", "e"), ("bad", "f"))
        for batch in asked, asked[1:2]:
            oracle, before = judge(url), sum(map(sum, model.tokens))
            with pytest.warns(OatWarning, match="counts as failed"):
                answers = ask(oracle, *batch)
            bad = ["bad" in question.candidates for question in batch]
            assert [answer.marks for answer in answers] == [("failed",) if each else ("ok",) for each in bad]
            assert sum(answer.tokens for answer in answers) == sum(map(sum, model.tokens)) - before
            prices = [oracle.price(question) for question in batch]
            assert all(answer.tokens <= most.tokens for answer, most in zip(answers, prices, strict=True))


def test_a_reply_that_was_under_way_is_no_sign_that_the_endpoint_answers(
    judge: Callable[..., Judge],
) -> None:
    """The key ends while a call is under way. Its reply comes after the other questions were refused."""

    def says(shown: Shown) -> Says | Reply:
        if "slow" in shown.text:
            return Reply(completion(FIRST), delay_s=0.3)
        return FIRST if "opening" in shown.text else Reply(b"expired", status=400)

    with judging(says) as (_, _, url):
        oracle = judge(url)
        ask(oracle, *questions(("opening", "x")))
        tickets, found = oracle.submit(questions(("slow", "x"), ("a", "b"), ("c", "d"))), dict[str, Answer]()
        with pytest.raises(ClosedError, match="expired"):  # noqa: PT012
            while len(found) < len(tickets):
                found |= dict(oracle.collect([ticket for ticket in tickets if ticket not in found], 20.0))
        assert [answer.marks for answer in found.values()] == [("ok",)], "it is paid, and kept"


@pytest.mark.parametrize(("size", "credit", "status"), [(4, 4, 400), (4, 7, 402), (16, 16, 402)])
def test_a_small_credit_brings_answers(
    judge: Callable[..., Judge], size: int, credit: int, status: int
) -> None:
    """Each start of a run finds a credit for some calls. It brings answers. At most the calls of as many
    questions as were answered, and one more, are paid for nothing."""
    texts = [f"response {number}" for number in range(size)]
    left = make_questions([make_group(n, *texts) for n in range(3)], "score", 0, oracle="judge")
    limit = 0

    def says(shown: Shown) -> Says | Reply:
        return "7" if shown.number < limit else Reply(b"it is over", status=status)

    lives = 0
    while left and (lives := lives + 1) < 9:
        with judging(says) as (_, model, url):
            oracle, found, limit = judge(url, mode="score", orders=None), dict[str, Answer](), credit
            tickets = oracle.submit(left)
            with contextlib.suppress(ClosedError):
                while len(found) < len(tickets):
                    found |= dict(oracle.collect([each for each in tickets if each not in found], 20.0))
            assert all(answer.marks == ("ok",) * size for answer in found.values())
            assert len(found) >= 1
            assert len(model.tokens) <= (2 * len(found) + 1) * size
            left = [question for question in left if str(question.key) not in found]
    assert not left


def test_a_reply_in_an_unknown_coding_ends_the_run(judge: Callable[..., Judge]) -> None:
    """All further ones would have it, and each would be paid for nothing."""
    says = Reply(b"\x0b\x02\x80", headers={"content-encoding": "br"})
    with judging(lambda shown: says) as (_, model, url):
        with pytest.raises(ClosedError, match=r"compressed \(br\)"):
            ask(judge(url), *questions(("a", "b"), ("c", "d")))
        assert len(model.shown) == 1


@pytest.mark.parametrize("status", [401, 402, 404])
def test_a_reward_server_that_refuses_all_ends_the_run_to_be_continued(status: int) -> None:
    with judging(lambda shown: "") as (server, _, _):
        server.answer = lambda asked: Reply(b"no", status=status)
        oracle = RemoteOracle(server.url)
        with pytest.raises(OutageError, match="run the same command again"):
            ask(oracle, *make_questions([make_group(0, "a")], "score", 0, oracle="remote"))
        oracle.close()


@pytest.mark.parametrize(
    "usage", [{}, None, {**USAGE, "prompt_tokens": None}, {**USAGE, "prompt_tokens": -5}]
)
def test_tokens_that_a_reply_does_not_state_count_with_the_most(
    judge: Callable[..., Judge], usage: Any
) -> None:
    """Under a price, a warning says so once. The verdict is kept."""
    raw = json.dumps(reply("0", [ZERO], usage=usage)).encode()
    with judging(lambda shown: Reply(raw)) as (_, _, url):
        oracle, asked = judge(url, tries=1, price_in=1.0, price_out=1.0), questions(("a", "b"), ("c", "d"))
        with pytest.warns(OatWarning, match="does not say how many tokens") as warned:
            answers = ask(oracle, *asked)
        most = [oracle.price(question) for question in asked]
        stated = 2 if usage and usage.get("completion_tokens") else oracle.config.max_tokens
        assert [answer.values for answer in answers] == [(pytest.approx(0.8),)] * 2
        assert [answer.tokens for answer in answers] == [
            price.tokens - oracle.config.max_tokens + stated for price in most
        ]
        assert all(0 < answer.cost <= price.cost for answer, price in zip(answers, most, strict=True))
        assert len(warned) == 1
        unpriced = judge(url, tries=1)
        assert ask(unpriced, *asked)[0].marks == ("ok",)


def test_a_reply_without_a_verdict_says_why(judge: Callable[..., Judge]) -> None:
    cut = json.dumps(reply("1. The", finish="length")).encode()
    for raw, why in (
        (cut, r"is no verdict: it was cut \(max_tokens\)"),
        (completion({"2": 1.0}), "is no verdict; what"),
    ):
        with judging(lambda shown, raw=raw: Reply(raw)) as (_, _, url), pytest.warns(OatWarning, match=why):
            ask(judge(url), *questions(("a", "b")))
