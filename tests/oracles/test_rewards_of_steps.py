"""Oracles that reward the steps of a response: functions, classes, workers, mixtures and preferences; what
the contract refuses."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_group, make_questions

from oat.errors import ConfigError, ContractError, OracleError
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.isolated import Isolated
from oat.oracles.make import build_oracle, make_oracle
from oat.oracles.mixture import Mixture
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.testing import FakeOracle, check_oracle
from oat.types import Answer, Kind, Question

CODE = '''
from oat.types import Answer


def letters(prompts, completions, **columns):
    """A step for each letter a: 1, and for what follows the last one: -0.5. None without a letter."""
    return [of(text) for text in completions]


def of(text):
    if not text:
        return None
    ends = [place + 1 for place, letter in enumerate(text) if letter == "a"]
    if not ends:
        return -0.5
    rest = [(len(text), -0.5)] if ends[-1] < len(text) else []
    return [(end, 1.0) for end in ends] + rest


letters.gives_steps = "characters"


def every_id(prompts, completions, completion_ids):
    return [[(place + 1, float(id)) for place, id in enumerate(ids)] for ids in completion_ids]


every_id.gives_steps = "tokens"


def length(prompts, completions, **columns):
    return [None if text == "-" else float(len(text)) for text in completions]


class InTokens:
    answers, durable, gives_steps = "score", False, "tokens"

    def submit(self, questions):
        return []

    def collect(self, tickets, seconds):
        return []
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("code") / "code.py"
    path.write_text(CODE, encoding="utf-8")
    return str(path)


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., Answer]]:
    stores: list[Store] = []

    def ask_(oracle: Oracle, *texts: str, kind: Kind = "score") -> Answer:
        stores.append(Store(tmp_path / f"{len(stores)}.sqlite"))
        ledger = Ledger(stores[-1], {"o": oracle}, Seeds(0), labels="threshold", deadline_s=60.0)
        groups = [make_group(0, *texts)]
        ledger.ask(0, 0, groups, make_questions(groups, kind, 0, oracle="o"))
        return ledger.take_feedback(0, 1).items[0].answer

    yield ask_
    for store in stores:
        store.close()


class Odd(FakeOracle):
    """An oracle whose answers about candidates of three characters have two steps each, and some changes."""

    gives_steps = "characters"

    def __init__(self, **changes: Any):
        super().__init__(lambda question: [0.75] * question.size)
        self.changes = changes

    def _answer(self, question: Question) -> Answer:
        steps = tuple(((1, 0.25), (3, 0.5)) for _ in question.candidates)
        sources = {"x": (1.0,) * len(question.candidates)}
        return replace(super()._answer(question), **{"steps": steps, "sources": sources, **self.changes})


FINE = ((1, 0.25), (3, 0.5))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"steps": 3}, "`steps` of the answer to .* is 3; give a tuple"),
    "of one candidate": ({"steps": (FINE,)}, "has the steps of 1 candidates; give 2 entries, in order"),
    "no list": ({"steps": (FINE, 0.5)}, "for candidate 1 of .* is 0.5; give a list of pairs"),
    "no pair": ({"steps": (FINE, (3, 0.75))}, "for candidate 1 of .* has 3; give pairs of an end"),
    "a text": ({"steps": (FINE, ("ab",))}, "for candidate 1 of .* has 'ab'; give pairs of an end"),
    "half an end": ({"steps": (FINE, ((1.5, 0.75),))}, r"has \(1.5, 0.75\); give pairs of an end"),
    "a bool for an end": ({"steps": (FINE, ((True, 0.75),))}, r"has \(True, 0.75\); give pairs"),
    "an end of 0": ({"steps": (FINE, ((0, 0.75),))}, "has the end 0 at the beginning; give ends above 0"),
    "a negative end": ({"steps": (FINE, ((-1, 0.75),))}, "has the end -1 at the beginning"),
    "equal ends": ({"steps": (FINE, ((2, 0.5), (2, 0.25)))}, "has the end 2 after the end 2; give ends"),
    "ends that fall": ({"steps": (FINE, ((3, 0.5), (1, 0.25)))}, "has the end 1 after the end 3"),
    "an end outside": (
        {"steps": (FINE, ((4, 0.75),))},
        "has the end 4, and the response has 3 characters; give ends up to 3",
    ),
    "NaN": ({"steps": (FINE, ((3, math.nan),))}, "has the reward nan at 3; give a finite number"),
    "infinity": ({"steps": (FINE, ((3, math.inf),))}, "has the reward inf at 3"),
    "no reward": ({"steps": (FINE, ((3, None),))}, "has the reward None at 3"),
    "another sum": (
        {"values": (0.75, 0.7)},
        "gives candidate 1 the value 0.7 and steps whose rewards add up to 0.75; give their sum",
    ),
    "a sum beyond floats": (
        {"steps": (FINE, ((1, 1.7e308), (3, 1.7e308)))},
        "gives candidate 1 the value 0.75 and steps whose rewards add up to inf",
    ),
    "another unit": (
        {"step_unit": "tokens"},
        "has steps in tokens, and the oracle's `gives_steps` is 'characters'; set it to \"tokens\"",
    ),
    "no unit": ({"step_unit": "words"}, "`step_unit` of the answer to .* is 'words'; give \"characters\" or"),
    "no dict": ({"sources": [1.0]}, "`sources` of the answer to .* is .*; give a dict of scores by the name"),
    "a source of one": (
        {"sources": {"x": (1.0,)}},
        r"has \(1.0,\) for 'x'; give a finite number or None for each of the 2 candidates",
    ),
    "a source of NaN": ({"sources": {"x": (1.0, math.nan)}}, r"has \(1.0, nan\) for 'x'; give a finite"),
    "a source of text": ({"sources": {"x": "12"}}, "has '12' for 'x'; give a finite number or None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_step_reward_is_refused(ask: Callable[..., Answer], name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(OracleError, match=f"oracle o: .*{words}"):
        ask(Odd(**changes), "abc", "dea")


def test_steps_of_an_oracle_that_declares_none(ask: Callable[..., Answer]) -> None:
    oracle = Odd()
    oracle.gives_steps = None
    with pytest.raises(OracleError, match='and the oracle\'s `gives_steps` is None; set it to "characters"'):
        ask(oracle, "abc", "dea")


def test_what_means_the_same_is_taken_as_plain_numbers(ask: Callable[..., Answer]) -> None:
    given = [np.array([[1, 0.25], [3, 0.5]]), [[np.int64(1), Fraction(1, 4)], (3, np.float32(0.5))]]
    sources = {"x": np.array([1.0, 2.0]), "y": [None, 3]}
    answer = ask(Odd(steps=given, values=(0.75, 0.75 + 1e-9), sources=sources), "abc", "dea")
    assert answer.steps == (FINE, FINE)
    assert answer.values == (0.75, 0.75), "the exact sum stands for a rounded one"
    assert answer.sources == {"x": (1.0, 2.0), "y": (None, 3.0)}
    kinds = {type(number) for own in answer.steps for pair in own for number in pair}
    assert kinds == {int, float}


def test_without_a_value_there_are_no_steps(ask: Callable[..., Answer]) -> None:
    answer = ask(Odd(marks=("failed", "ok"), values=(0.0, 0.75), steps=("?", FINE)), "abc", "dea")
    assert (answer.steps, answer.step_unit) == (((), FINE), "characters")
    nobody = ask(Odd(marks=("failed", "abstain"), step_unit="characters"), "abc", "dea")
    assert nobody.steps == ()


def test_a_comparison_has_none(ask: Callable[..., Answer]) -> None:
    oracle = Odd(steps=(FINE,))
    oracle.answers = "compare"
    with pytest.raises(OracleError, match="has steps; a comparison has none"):
        ask(oracle, "abc", "dea", kind="compare")
    preferred = ask(Preferences(Odd()), "abc", "dea", kind="compare")
    assert (preferred.marks, preferred.steps) == (("tie",), ())
    assert preferred.scores == (0.75, 0.75)
    assert preferred.sources == {"x": (1.0, 1.0)}


def test_a_function_returns_pairs(ask: Callable[..., Answer], code: str) -> None:
    oracle = build_oracle(f"{code}:letters", {})
    assert (oracle.gives_steps, oracle.cacheable) == ("characters", True)
    answer = ask(oracle, "abab", "bb", "", "aa")
    assert answer.steps == (((1, 1.0), (3, 1.0), (4, -0.5)), (), (), ((1, 1.0), (2, 1.0)))
    assert answer.values == (1.5, -0.5, 0.0, 2.0)
    assert answer.marks == ("ok", "ok", "abstain", "ok")
    check_oracle(f"{code}:letters")


def test_a_function_rewards_tokens(ask: Callable[..., Answer], code: str) -> None:
    oracle = build_oracle(f"{code}:every_id", {})
    assert (oracle.gives_steps, oracle.cacheable) == ("tokens", False)
    answer = ask(oracle, "abc", "")
    assert (answer.steps, answer.step_unit) == ((((1, 0.0), (2, 1.0), (3, 2.0)), ()), "tokens")
    assert answer.values == (3.0, 0.0)


def test_a_worker_returns_pairs(ask: Callable[..., Answer], code: str) -> None:
    oracle = Isolated(f"{code}:letters", timeout_s=30.0)
    assert oracle.gives_steps == "characters"
    answer = ask(oracle, "abab", "bb", "")
    oracle.close()
    assert answer.steps == (((1, 1.0), (3, 1.0), (4, -0.5)), (), ())
    assert (answer.values, answer.marks) == ((1.5, -0.5, 0.0), ("ok", "ok", "abstain"))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([(0, 1.0)], "value 1, a list of the steps of @, has the end 0 at the beginning; give ends above 0"),
        ([(-1, 1.0)], "value 1, a list of the steps of @, has the end -1 at the beginning; give ends"),
        ([(2, 1.0), (1, 1.0)], "value 1, a list of the steps of @, has the end 1 after the end 2; give ends"),
        ([(4, 1.0)], "the entry of `steps` for @ has the end 4, and the response has 3 characters; give end"),
        ([(n, 1.0) for n in range(1, 9)], "the entry of `steps` for @ has the end 4, and the response has"),
        ([(1, math.nan)], "value 1, a list of the steps of @, has the reward nan at 1; give a finite"),
        ([(math.inf, 1.0)], "value 1, a list of the steps of @, has .*inf, 1.0.*; give pairs of an end"),
        ([1.0], "value 1, a list of the steps of @, has 1.0; give pairs"),
        ("ab", "returned 'ab' as value 1, @; return a finite number"),
    ],
)
def test_what_a_function_may_not_return(ask: Callable[..., Answer], returned: Any, words: str) -> None:
    """Every message names the oracle, its setting, the question, the prompt's record and the response."""

    def reward(completions: list[str]) -> list[Any]:
        return [0.5 if text == "ok" else returned for text in completions]

    reward.gives_steps = "characters"  # type: ignore[attr-defined]
    place = r"candidate 1 of question train/0/0/0/0 \(record 1, score 'ok', 'abc'\)"
    with pytest.raises(OracleError, match=words.replace("@", place)) as seen:
        ask(CallableOracle(reward, "reward"), "ok", "abc")
    assert str(seen.value).startswith(("reward", "oracle o: "))
    assert str(seen.value).endswith(" (oracle.name)")


def test_an_end_outside_the_text_names_the_question(ask: Callable[..., Answer]) -> None:
    def reward(completions: list[str]) -> list[Any]:
        return [[(len(text) + 1, 1.0)] for text in completions]

    reward.gives_steps = "characters"  # type: ignore[attr-defined]
    with pytest.raises(OracleError, match=r"oracle o: .*question train/0/0/0/0.*has the end 4, and the resp"):
        ask(CallableOracle(reward, "reward"), "abc")
    with pytest.raises(ContractError, match="has the end"):
        check_oracle(reward)


def test_arrays_and_partials(ask: Callable[..., Answer]) -> None:
    def reward(completions: list[str], scale: float) -> list[Any]:
        return [torch.tensor([[1, scale], [2, -scale]]) for _ in completions]

    reward.gives_steps = "characters"  # type: ignore[attr-defined]
    answer = ask(CallableOracle(functools.partial(reward, scale=0.5), "reward"), "abc")
    assert answer.steps == (((1, 0.5), (2, -0.5)),)


def test_a_list_of_a_function_that_declares_nothing() -> None:
    oracle = CallableOracle(lambda completions: [[(1, 1.0)] for _ in completions], "reward")
    tickets = oracle.submit(make_questions([make_group(0, "a")], "score", 0, oracle="o"))
    with pytest.raises(OracleError, match=r"return a finite number.*or set its attribute `gives_steps`"):
        oracle.collect(tickets, 1.0)


def test_declarations_that_are_none(code: str) -> None:
    def reward(completions: list[str]) -> list[float]:
        return []

    reward.gives_steps = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match='`gives_steps` of reward is True; give "characters" or "tokens"'):
        CallableOracle(reward, "reward")

    def compare(prompts: Any, first: Any, second: Any) -> list[float]:
        return []

    compare.gives_steps = "characters"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"compare compares two responses.*a comparison has no steps"):
        CallableComparison(compare, "compare")
    with pytest.raises(ConfigError, match=r"InTokens gives rewards of steps in tokens.*`cacheable = False`"):
        build_oracle(f"{code}:InTokens", {})
    oracle = make_oracle(FakeOracle(lambda question: 0.0), "fake", {})
    oracle.oracle.gives_steps = "lines"  # type: ignore[attr-defined]
    with pytest.raises(OracleError, match="`gives_steps` of oracle FakeOracle is 'lines'; give \"characters"):
        _ = oracle.gives_steps


def mixed(code: str, **changes: Any) -> Mixture:
    first = {"name": f"{code}:letters", "label": "letters", "weight": 2.0, **changes}
    return Mixture([first, {"name": f"{code}:length", "label": "length", "weight": 0.1}])


def test_a_mixture_by_hand(ask: Callable[..., Answer], code: str) -> None:
    """What is about a response as a whole comes at its end, with the reward of a step that ends there."""
    oracle = mixed(code)
    assert (oracle.gives_steps, oracle.cacheable) == ("characters", True)
    answer = ask(oracle, "abab", "bb", "a", "")
    assert answer.steps == (((1, 2.0), (3, 2.0), (4, -1.0 + 0.4)), (), ((1, 2.1),), ())
    assert answer.values == (math.fsum([2.0, 2.0, -0.6]), -1.0 + 0.2, 2.1, 0.0)
    assert answer.sources == {"letters": (1.5, -0.5, 1.0, None), "length": (4.0, 2.0, 1.0, 0.0)}


def test_a_normalised_mixture_by_hand(ask: Callable[..., Answer], code: str) -> None:
    oracle = mixed(code, normalise="fixed", mean=0.5, std=4.0)
    answer = ask(oracle, "ab", "-a", "bb")
    share = -2.0 * 0.5 / 4.0
    assert answer.steps[0] == ((1, 0.5), (2, math.fsum([-0.25, share, 0.2])))
    assert answer.steps[1] == ((2, 0.5 + share + 0.2),)
    assert answer.steps[2] == ()
    assert answer.values == pytest.approx((0.5 - 0.25 + share + 0.2, 0.45, 2 * (-1.0 / 4) + 0.2))
    assert answer.sources == {"letters": (0.5, 1.0, -0.5), "length": (2.0, 2.0, 2.0)}


def test_a_mixture_where_a_source_gives_nothing(ask: Callable[..., Answer], code: str) -> None:
    answer = ask(mixed(code), "-", "")
    assert (answer.values, answer.steps) == ((-1.0, 0.0), ())
    assert answer.sources == {"letters": (-0.5, None), "length": (None, 0.0)}


def test_a_mixture_of_two_units_is_refused(code: str) -> None:
    sources = [{"name": f"{code}:letters", "label": "a"}, {"name": f"{code}:every_id", "label": "b"}]
    with pytest.raises(ConfigError, match="two units, a in characters and b in tokens; let all of them"):
        Mixture(sources)


def test_a_mixture_names_the_source_that_breaks_the_contract(ask: Callable[..., Answer], code: str) -> None:
    oracle = mixed(code)
    oracle._sources["letters"].oracle.function = lambda completions: [  # type: ignore[attr-defined]
        [(99, 1.0)] for _ in completions
    ]
    with pytest.raises(OracleError, match=r"oracle letters: .*has the end 99, and the response has 3"):
        ask(oracle, "abc")


def test_answers_that_are_known_again_must_have_equal_steps() -> None:
    class Restless(Odd):
        """Moves the first step with each answer."""

        def _answer(self, question: Question) -> Answer:
            answer = super()._answer(question)
            place = 1 + len(self.asked) % 2
            return replace(answer, steps=tuple(((place, 0.25), (3, 0.5)) for _ in question.candidates))

    def questions() -> list[Question]:
        return make_questions([make_group(0, "abc", "dea")], "score", 0, oracle="o")

    check_oracle(Odd(), questions())
    with pytest.raises(ContractError, match=r"answered \(\(\d, 0.25\).*must not be used again"):
        check_oracle(Restless(), questions())
