"""A reward function may look at the group, as with TRL: it gets every response of a group, equal ones too, in
one call and in order, whatever else is asked or collected at the same time."""

import collections
import functools
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import ask, question

from oat.errors import ConfigError, ContractError, OatWarning, OracleError
from oat.oracles import callables
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.isolated import Isolated
from oat.oracles.make import build_oracle, is_shown_groups
from oat.oracles.mixture import Mixture
from oat.oracles.preferences import Preferences
from oat.oracles.whole_groups import TrainerState, round_of
from oat.testing import check_oracle
from oat.types import Key, Message, Question
from oat.types.part import RunFacts

CODE = '''
import collections


def rarity(prompts, completions, **columns):
    """The share of a response among the responses of its prompt, and its place among them."""
    pairs = [*zip(map(str, prompts), map(str, completions))]
    counts, before = collections.Counter(pairs), collections.Counter(map(str, prompts))
    place = {prompt: 0 for prompt in before}
    found = []
    for pair in pairs:
        place[pair[0]] += 1
        found.append(1.0 / counts[pair] + 10.0 * place[pair[0]])
    return found


def alone(prompts, completions):
    return [float(len(text)) for text in completions]


alone.reads_group = False


def states(completions, trainer_state):
    return [float(trainer_state.global_step)] * len(completions)


def may_have_a_state(completions, trainer_state=None):
    return [-1.0 if trainer_state is None else float(trainer_state.max_steps)] * len(completions)


def marked(prompts, completions):
    return [0.0] * len(completions)


marked.reads_group = True


def of_queries(queries, prompts):
    return [float(queries.count(query)) for query in queries]


class Caller:
    def __call__(self, prompts, completions):
        return [0.0] * len(completions)


caller = Caller()


def compare(prompts, first, second):
    return [0.5 for _ in first]
'''
FACTS = RunFacts("cpu", 8, True, False, 0, False, False, False, max_steps=7)
CHAT = (Message("system", "be brief"), Message("user", "?"))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("code") / "rewards.py"
    file.write_text(CODE, encoding="utf-8")
    return str(file)


def expected(asked: Question) -> tuple[float, ...]:
    """The values of `rarity`, from the question's own group alone."""
    counts = collections.Counter(asked.candidates)
    return tuple(1.0 / counts[text] + 10.0 * (1 + place) for place, text in enumerate(asked.candidates))


class Watched:
    """The function `rarity`, plain or async, and its calls: lists of pairs of a prompt and a response."""

    def __init__(self, code: str, is_async: bool):
        self.rarity = build_oracle(f"{code}:rarity", {}).function  # type: ignore[attr-defined]
        self.calls: list[list[tuple[str, str]]] = []
        self.oracle = CallableOracle(self.late if is_async else self.now, "rarity")

    def now(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        self.calls.append([(str(prompt), text) for prompt, text in zip(prompts, texts, strict=True)])
        return self.rarity(prompts, completions)

    async def late(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return self.now(prompts, completions, **columns)


@st.composite
def asked_groups(draw: st.DrawFn) -> list[Question]:
    """Groups of up to three rounds of two steps, with few prompts and few texts, so that equals abound."""
    made = []
    for occurrence in range(draw(st.integers(1, 7))):
        texts = draw(st.lists(st.sampled_from(["", "a", "b", "a b"]), min_size=1, max_size=5))
        messages = draw(st.sampled_from([(Message("user", "p"),), (Message("user", "q"),), CHAT]))
        purpose, step, round_ = draw(st.sampled_from([("train", 0, 0), ("train", 1, 0), ("eval", 1, 1)]))
        each = question(occurrence, texts, messages=messages, level=occurrence % 2)
        made.append(replace(each, key=Key(purpose, step, round_, occurrence)))
    return made


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_a_function_sees_each_group_whole_and_in_order(
    code: str, is_async: bool, data: st.DataObject
) -> None:
    questions = data.draw(asked_groups())
    watched = Watched(code, is_async)
    cut = data.draw(st.integers(0, len(questions)))
    tickets, answers = list[str](), dict[str, Any]()
    for part in (questions[:cut], questions[cut:]):
        tickets += watched.oracle.submit(part)
        if data.draw(st.booleans()):
            some = data.draw(st.permutations(tickets))[: data.draw(st.integers(0, len(tickets)))]
            answers.update(watched.oracle.collect(some, 10.0))
    while len(answers) < len(tickets):
        answers.update(watched.oracle.collect(tickets, 10.0))
    assert [answers[ticket].values for ticket in tickets] == [expected(each) for each in questions]
    assert [answers[ticket].queries for ticket in tickets] == [len(each.candidates) for each in questions]
    shown = collections.Counter[tuple[tuple[str, ...], ...]]()
    for call in watched.calls:
        groups = [
            (prompt, [text for _, text in own])
            for prompt, own in itertools.groupby(call, lambda pair: pair[0])
        ]
        prompts = [prompt for prompt, _ in groups]
        assert len({*prompts}) == len(prompts), "a group lies together, and no call has two of one prompt"
        shown.update(tuple(texts) for _, texts in groups)
    assert shown == collections.Counter(each.candidates for each in questions)


def test_rounds_are_not_mixed_and_calls_do_not_depend_on_what_is_collected(code: str) -> None:
    """A call has the groups of one round, whichever answer is fetched first."""
    rounds = [
        [
            replace(question(n, ["a"], messages=(Message("user", f"p{n}"),)), key=Key("train", step, 0, n))
            for n in own
        ]
        for step, own in enumerate(((0, 1), (2, 3)))
    ]
    calls = []
    for first in (0, 3):
        watched = Watched(code, False)
        tickets = watched.oracle.submit([*rounds[0], *rounds[1]])
        watched.oracle.collect([tickets[first]], 1.0)
        watched.oracle.collect(tickets, 1.0)
        calls.append(sorted(watched.calls))
    assert calls[0] == calls[1]
    assert [[prompt for prompt, _ in call] for call in calls[0]] == [["p0", "p1"], ["p2", "p3"]]


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("rarity", True),
        ("marked", True),
        ("of_queries", True),
        ("caller", True),
        ("states", True),
        ("alone", False),
        ("compare", False),
    ],
)
def test_which_oracles_get_whole_groups(code: str, name: str, reads: bool) -> None:
    oracle = build_oracle(f"{code}:{name}", {})
    assert oracle.reads_group is is_shown_groups(f"{code}:{name}") is reads
    oracle.tell(replace(FACTS, whole_groups=False))
    assert oracle.reads_group is False


def test_our_own_oracles_get_no_whole_groups(code: str) -> None:
    for name, options in {
        "exact_match": {},
        "gsm8k": {},
        "countdown": {},
        "math": {"symbolic": False},
        "format": {"template": "<a>...</a>"},
        "regex": {"pattern": "a", "engine": "re2"},
        "length": {"target": 3},
        "judge": {"model": "m", "url": "http://127.0.0.1:1/v1"},
    }.items():
        assert build_oracle(name, options).reads_group is False, name
    assert Preferences(CallableOracle(lambda completions: [], "mine")).reads_group is False
    assert Mixture([{"name": "gsm8k"}, {"name": f"{code}:alone"}]).reads_group is False


def test_a_partial_and_a_method_may_declare_it() -> None:
    class Rewards:
        def score(self, completions: Sequence[str], scale: float) -> list[float]:
            return [scale] * len(completions)

        score.reads_group = False  # type: ignore[attr-defined]

    assert CallableOracle(functools.partial(Rewards().score, scale=2.0), "mine").reads_group is False


@pytest.mark.parametrize("declared", ["no", 0, 1.0])
def test_another_declaration_is_refused(declared: object) -> None:
    def reward(completions: Sequence[str]) -> list[float]:
        return []

    reward.reads_group = declared  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="`reads_group` of mine"):
        CallableOracle(reward, "mine")


def test_one_such_source_makes_a_mixture_read_groups(code: str) -> None:
    sources = [{"name": f"{code}:rarity"}, {"name": "length", "target": 2, "unit": "characters"}]
    mixture = Mixture(sources)
    assert mixture.reads_group
    asked = question(0, ["a", "a", "b"])
    (answer,) = ask(mixture, asked)
    assert answer.sources[f"{code}:rarity"] == expected(asked)
    assert answer.queries == 6, "each source is asked about each response"
    mixture.tell(replace(FACTS, whole_groups=False))
    assert not mixture.reads_group


def test_the_oracle_isolated_shows_a_response_at_a_time(code: str) -> None:
    with pytest.raises(ConfigError, match="marked declares `reads_group`"):
        Isolated(f"{code}:marked")
    with pytest.warns(OatWarning, match="one response at a time"):
        oracle = Isolated(f"{code}:states", timeout_s=60.0)
    assert oracle.cacheable
    assert not oracle.reads_group
    with pytest.raises(ConfigError, match="needs `trainer_state`"):
        oracle.check_columns(["level"], False)
    oracle.close()


def test_trainer_state(code: str) -> None:
    """A function with this parameter learns the step that asks. Its rewards are used for no later step."""
    oracle = build_oracle(f"{code}:states", {})
    oracle.tell(FACTS)
    oracle.check_columns([], False)
    asked = [replace(question(n, ["a", "b"]), key=Key("train", n, 0, n)) for n in (0, 5)]
    assert [answer.values for answer in ask(oracle, *asked)] == [(0.0, 0.0), (5.0, 5.0)]
    assert not oracle.cacheable
    assert not Preferences(oracle).cacheable, "nor is the preference that is made of them"
    check_oracle(oracle.function, [question(0, ["a"])])  # type: ignore[attr-defined]
    oracle.tell(replace(FACTS, whole_groups=False))
    with pytest.raises(ConfigError, match="needs `trainer_state`"):
        oracle.check_columns([], False)


def test_an_optional_trainer_state(code: str) -> None:
    oracle = build_oracle(f"{code}:may_have_a_state", {})
    oracle.tell(FACTS)
    assert ask(oracle, question(0, ["a"]))[0].values == (7.0,)
    oracle.tell(replace(FACTS, whole_groups=False))
    assert oracle.cacheable
    assert ask(oracle, question(0, ["a"]))[0].values == (-1.0,), "a reward that is used again knows no step"
    unlimited = build_oracle(f"{code}:may_have_a_state", {})
    unlimited.tell(replace(FACTS, max_steps=None))
    with pytest.raises(OracleError, match=r"no max_steps: stop\.max_steps is not set"):
        ask(unlimited, question(0, ["a"]))


def test_a_trainer_state_has_what_it_says() -> None:
    assert (TrainerState(3, 9).global_step, TrainerState(3, 9).max_steps) == (3, 9)
    assert getattr(TrainerState(3, None), "max_steps", -1) == -1
    with pytest.raises(AttributeError, match="no epoch: it has global_step and max_steps"):
        TrainerState(3, 9).epoch  # noqa: B018
    with pytest.raises(ConfigError, match="needs `trainer_state`"):
        CallableComparison(lambda prompts, first, second, trainer_state: [], "mine").check_columns([], False)


def test_a_column_called_trainer_state_is_a_column() -> None:
    oracle = CallableOracle(
        lambda completions, trainer_state: [float(each) for each in trainer_state], "mine"
    )
    assert ask(oracle, question(0, ["a", "b"], trainer_state=4))[0].values == (4.0, 4.0)


def test_the_check_of_an_oracle_knows_groups(code: str) -> None:
    def of_the_call(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [float(completions.count(text)) for text in completions]

    check_oracle(f"{code}:rarity")
    with pytest.raises(ContractError, match="the rewards of a group must be a function of its prompt"):
        check_oracle(of_the_call)
    of_the_call.reads_group = False  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="when asked"):
        check_oracle(of_the_call)


def test_a_call_that_fails_leaves_its_round_open(code: str) -> None:
    """The answers of other calls are not asked for again."""
    calls: list[list[str]] = []

    def reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        calls.append([*completions])
        if completions == ["b"] and len(calls) < 3:
            raise ValueError("not now")
        return [1.0] * len(completions)

    oracle = CallableOracle(reward, "mine")
    tickets = oracle.submit([question(0, ["a"]), question(1, ["b"])])
    with pytest.raises(OracleError, match="not now"):
        oracle.collect(tickets, 1.0)
    assert [ticket for ticket, _ in oracle.collect(tickets, 1.0)] == tickets
    assert calls == [["a"], ["b"], ["b"]]


def test_questions_are_submitted_while_others_are_collected(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread submits at every point of the walk through the open questions."""
    oracle = build_oracle(f"{code}:rarity", {})
    late: list[str] = []

    def submit_and_read(asked: Question) -> tuple[str, int, int]:
        thread = threading.Thread(target=lambda: late.extend(oracle.submit([question(2 + len(late), ["c"])])))
        thread.start()
        thread.join()
        return round_of(asked)

    monkeypatch.setattr(callables, "round_of", submit_and_read)
    tickets = oracle.submit([question(0, ["a"]), question(1, ["b"])])
    assert [ticket for ticket, _ in oracle.collect(tickets, 1.0)] == tickets
    monkeypatch.undo()
    assert late
    assert [ticket for ticket, _ in oracle.collect(late, 1.0)] == late
