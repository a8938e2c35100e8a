"""An answered question is not paid twice: canonical items, repeats, pairs with one known score, and questions
that are always asked again."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, make_group, make_questions, named, oat

from oat.commands.digest import digest_run
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableComparison, CallableOracle
from oat.oracles.preferences import Preferences
from oat.reports.accounts import accounts
from oat.seeds import Seeds
from oat.types import Feedback, Group, Kind


class Counted:
    """Functions that count their questions."""

    def __init__(self, values: Sequence[float] = ()):
        self.asked: list[tuple[str, ...]] = []
        self.values = list(values)

    def score(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        self.asked += zip(prompts, completions, strict=True)
        return [self.values.pop(0) if self.values else float(len(text)) for text in completions]

    score.reads_group = False

    def compare(
        self, prompts: Sequence[str], first: Sequence[str], second: Sequence[str], **columns: Any
    ) -> list[float]:
        self.asked += zip(first, second, strict=True)
        return [
            self.values.pop(0) if self.values else 0.8 if a > b else 0.3
            for a, b in zip(first, second, strict=True)
        ]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Ledger]:
    def make(oracle: Oracle, repeats: int = 1, **options: Any) -> Ledger:
        return Ledger(
            Store(tmp_path / "ledger.sqlite"),
            {"o": oracle},
            Seeds(0),
            labels="threshold",
            deadline_s=60.0,
            repeats=repeats,
            **options,
        )

    return make


@pytest.mark.parametrize(("known", "version"), [({}, "2"), ({"o": "1"}, "1"), ({"o": ""}, "")])
def test_a_known_version_stands_for_the_oracles_own(
    opened: Callable[..., Ledger], known: dict[str, str], version: str
) -> None:
    """A version that the run recorded replaces the oracle's own. An empty version does too: the oracle had
    none when the run began."""
    oracle = CallableOracle(Counted().score, "counted")
    oracle.version = "2"
    assert opened(oracle, known_versions=known).cache.versions == {"o": version}


def step(
    ledger: Ledger, number: int, *groups: Group, kind: Kind = "compare", purpose: str = "train"
) -> Feedback:
    ledger.ask(
        number, 0, groups, make_questions(list(groups), kind, number, oracle="o", purpose=purpose), purpose
    )
    return ledger.take_feedback(number, len(groups), purpose=purpose)


def test_a_pair_is_known_in_either_order(opened: Callable[..., Ledger]) -> None:
    counted = Counted([0.8])
    ledger = opened(CallableComparison(counted.compare, "counted"))
    first = step(ledger, 0, make_group(0, "aa", "b"))
    again, turned = step(ledger, 1, make_group(0, "aa", "b")), step(ledger, 2, make_group(0, "b", "aa"))
    assert [feedback.items[0].answer.values[0] for feedback in (first, again, turned)] == pytest.approx(
        [0.8, 0.8, 0.2]
    )
    assert [feedback.items[0].label for feedback in (first, again, turned)] == [0, 0, 1]
    assert [feedback.queries for feedback in (first, again, turned)] == [1, 1, 1]
    assert counted.asked == [("aa", "b")]


def test_another_prompt_reference_or_column_is_another_question(opened: Callable[..., Ledger]) -> None:
    counted = Counted()
    ledger = opened(CallableOracle(counted.score, "counted"))
    groups = [
        make_group(0, "a"),
        make_group(1, "a"),
        make_group(0, "a", reference="x"),
        make_group(0, "a", columns={"level": 1}),
    ]
    for number, group in enumerate(groups):
        step(ledger, number, group, kind="score")
    assert len(counted.asked) == 4


def test_of_a_half_known_question_only_the_rest_is_asked(opened: Callable[..., Ledger]) -> None:
    counted = Counted()
    ledger = opened(CallableOracle(counted.score, "counted"))
    step(ledger, 0, make_group(0, "a", "bb"), kind="score")
    (item,) = step(ledger, 1, make_group(0, "ccc", "bb", "dddd", "a"), kind="score").items
    assert (item.answer.values, item.answer.marks, item.answer.queries) == (
        (3.0, 2.0, 4.0, 1.0),
        ("ok",) * 4,
        2,
    )
    assert counted.asked == [("p0", "a"), ("p0", "bb"), ("p0", "ccc"), ("p0", "dddd")]
    assert item.question.candidates == ("ccc", "bb", "dddd", "a")
    assert ledger.store.spent("train").queries == 4


def test_repeats_are_answers_of_their_own_and_then_a_mean(opened: Callable[..., Ledger]) -> None:
    counted = Counted([1.0, 2.0, 6.0, 99.0])
    ledger = opened(CallableOracle(counted.score, "counted"), repeats=3)
    found = [
        step(ledger, number, make_group(0, "a"), kind="score").items[0].answer.values for number in range(5)
    ]
    assert found == [(1.0,), (2.0,), (6.0,), (3.0,), (3.0,)]
    assert len(counted.asked) == 3


def test_none_is_kept_where_that_is_wanted(opened: Callable[..., Ledger]) -> None:
    counted = Counted()
    ledger = opened(CallableOracle(counted.score, "counted"), repeats=0)
    for number in range(3):
        step(ledger, number, make_group(0, "a"), kind="score")
    assert len(counted.asked) == 3


def test_an_oracle_may_say_that_it_is_no_function(opened: Callable[..., Ledger]) -> None:
    counted = Counted()
    oracle = CallableOracle(counted.score, "counted")
    oracle.cacheable = False
    for number, ledger in enumerate((opened(Preferences(oracle)), opened(Preferences(oracle)))):
        step(ledger, number, make_group(0, "a", "bb"))
    assert len(counted.asked) == 4


def test_ties_are_known_and_missing_answers_are_not(opened: Callable[..., Ledger]) -> None:
    replies: list[float | None] = [0.5, None, 0.7]
    ledger = opened(
        Preferences(
            CallableOracle(
                lambda prompts, completions: [1.0 if p == "p0" else replies[1] for p in prompts], "o"
            )
        )
    )
    tie = [step(ledger, number, make_group(0, "a", "b")).items[0].answer for number in (0, 1)]
    assert [(answer.marks, answer.queries) for answer in tie] == [(("tie",), 2), (("tie",), 0)]
    missing = [step(ledger, number, make_group(1, "a", "b")).items[0].answer for number in (2, 3)]
    assert [(answer.marks, answer.queries) for answer in missing] == [(("abstain",), 2)] * 2


def test_purposes_share_no_answers(opened: Callable[..., Ledger]) -> None:
    counted = Counted()
    ledger = opened(CallableOracle(counted.score, "counted"))
    step(ledger, 0, make_group(0, "a"), kind="score", purpose="eval")
    assert step(ledger, 0, make_group(0, "a"), kind="score").queries == 1
    assert (len(counted.asked), ledger.store.spent("eval").queries) == (2, 1)


@pytest.mark.slow(instead="tests/ledger/test_cache_awaited.py, for answers that are awaited", seconds=1.6)
def test_a_killed_run_knows_what_the_unbroken_one_knew(world: World, tmp_path: Path) -> None:
    """A killed run continues like the unbroken one and uses the same earlier answers. There are two prompts,
    and responses have one token, so many questions were answered before."""
    changes = {
        "oracle.whole_groups": False,
        "algorithm.prompts": 2,
        "sampling.max_new_tokens": 1,
        "prompts.max_prompts": 2,
        "stop.max_steps": 6,
    }
    configs = []
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
        configs.append(world.config("grpo", tmp_path / name, changes))
    assert oat("train", configs[0]) == 0
    place, log = named("answers are recorded"), tmp_path / "log"
    assert forked(lambda: kill_at(*place, 9) or oat("train", configs[1]), log) < 0
    assert forked(lambda: oat("train", configs[1]), log) == 0
    runs = [tmp_path / name / "grpo" for name in ("unbroken", "killed")]
    assert digest_run(runs[0]) == digest_run(runs[1])
    (train, _) = accounts(Store(runs[0] / "ledger.sqlite"))
    assert 0 < train.queries < 6 * 2 * 3
    assert train.cached > 0


def test_what_another_version_of_a_reward_said_is_not_known(world: World, tmp_path: Path) -> None:
    """The file of a reward function is corrected before the run is continued. Its old answers are not used
    again, so no step learns from old and new values together."""
    file = tmp_path / "mended.py"
    file.write_text(
        "def reward(prompts, completions):\n    return [float(text.count('a')) for text in completions]\n"
    )
    config = world.config(
        "grpo",
        tmp_path,
        {
            "oracle.name": f"{file}:reward",
            "oracle.whole_groups": False,
            "stop.max_steps": 3,
            "sampling.max_new_tokens": 1,
            "prompts.max_prompts": 4,
        },
    )
    assert oat("train", config) == 0
    file.write_text(
        "def reward(prompts, completions):\n    return [100.0 + text.count('a') for text in completions]\n"
    )
    with pytest.warns(UserWarning, match=r"mended.py:reward has changed since this run last asked it"):
        assert oat("train", config, "--stop.max_steps", 6, "--accept-changed", "reward") == 0
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        values = {
            step: [value for row in store.taken("train", step) for value in store.answer(row)[0].values]
            for step in range(6)
        }
        (train, _) = accounts(store)
    assert max(max(values[step]) for step in range(3)) < 100 <= min(min(values[step]) for step in range(3, 6))
    assert train.cached > 0
