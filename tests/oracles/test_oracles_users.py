"""A user's oracle need not inherit from `Oracle`. Missing members have defaults, and existing members are
checked for their type."""

from typing import Any

import pytest

from oat.errors import ConfigError, OatWarning, OracleError
from oat.oracles.base import MEMBERS, Oracle, Wrapper
from oat.oracles.make import build_oracle, make_oracle
from oat.oracles.users import UsersOracle
from oat.testing import FakeOracle
from oat.types import Answer, Key, Message, Price, Question
from oat.types.part import RunFacts

QUESTION = Question(
    Key("train", 0, 0, 0), "score", (Message("user", "?"),), ("a", "b"), (0, 1), oracle="mine"
)

BOO = r"RuntimeError: boo \(line \d+ of test_oracles_users\.py\)"
FACTS = RunFacts("cpu", 8, True, False, 0, False, False, False)
CALLS, FILES = {"user/calls": 1.0}, {"file": {"text": "1"}}


class Bare:
    """An oracle with the required members only."""

    answers = "score"
    durable = False

    def submit(self, questions):
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        return [(ticket, Answer(QUESTION.key, (1.0, 2.0), ("ok", "ok"), 2)) for ticket in tickets]


def users(**members: Any) -> Oracle:
    return make_oracle(type("Mine", (Bare,), members), "mine", {})


def used(oracle: Oracle, member: str) -> Any:
    """Return the value of a member; if it is callable, the result of a call."""
    found = getattr(oracle, member)
    arguments = {"price": (QUESTION,), "check_columns": (["a"], False)}.get(member, ())
    return found(*arguments) if callable(found) else found


def test_what_is_left_out_has_the_default_of_the_base_class() -> None:
    class Plain(Oracle):
        answers = "score"
        submit, collect = Bare.submit, Bare.collect

    others = {"name", "sources", "submit", "collect", "price", "check_columns", "tell"}
    others |= {"tell_opening", "bind", "drop", "close"}
    for bare, plain in ((users(), Plain()), (UsersOracle(Plain()), Plain())):
        for member in set(MEMBERS) - others:
            assert getattr(bare, member) == getattr(plain, member), member
        assert (bare.sources, plain.sources) == (None, ()), "which sources its answers have is not known"
        assert bare.price(QUESTION) == plain.price(QUESTION) == Price(2)
        bare.check_columns([], False)
        bare.bind()
        bare.drop(["1"])
        bare.close()
    tickets = users().submit([QUESTION])
    assert users().collect(tickets, 0.0) == [(tickets[0], Answer(QUESTION.key, (1.0, 2.0), ("ok", "ok"), 2))]


@pytest.mark.parametrize("base", [object, Oracle])
def test_what_it_has_is_read(base: type) -> None:
    heard: list[Any] = []

    class Mine(base):  # type: ignore[misc]
        answers, durable, name, is_relative, names_cost = "score", True, "mine", True, False
        cacheable, reads_group, version, max_outage_s = 0, 1, 3, 2.5
        metrics, made_of = CALLS, FILES
        submit, collect = Bare.submit, Bare.collect

        def price(self, question):
            return Price(1, 2, 3.0)

        def check_columns(self, columns, has_reference):
            heard.append((columns, has_reference))

        def tell(self, run):
            heard.append(run)

        def bind(self):
            heard.append("bound")

        def close(self):
            heard.append("closed")

    oracle = make_oracle(Mine(), "python:mine", {})
    oracle.tell(FACTS)
    assert heard == ([FACTS] if base is Oracle else []), "a method of a class of the user's own is its own"
    heard.clear()
    assert (oracle.answers, oracle.durable, oracle.name) == ("score", True, "mine")
    assert (oracle.cacheable, oracle.is_relative, oracle.names_cost) == (False, True, False)
    assert oracle.reads_group is True
    assert (oracle.version, oracle.max_outage_s, oracle.made_of) == ("3", 2.5, FILES)
    assert (oracle.metrics, oracle.names_price) == (CALLS, True)
    assert oracle.price(QUESTION) == Price(1, 2, 3.0)
    oracle.check_columns(["a"], True)
    oracle.bind()
    oracle.close()
    assert heard == [(["a"], True), "bound", "closed"]


@pytest.mark.parametrize(
    ("declared", "labels"),
    [(["x", "y"], ("x", "y")), ({"x": 1}, None), ([3], None), ((), None), (None, None)],
)
def test_it_may_declare_its_sources(declared: Any, labels: tuple[str, ...] | None) -> None:
    """An attribute of another type is the user's own, which an older class may have."""
    assert users(sources=declared).sources == labels


def test_its_members_are_read_anew_each_time() -> None:
    class Mine(Bare):
        calls = 0

        @property
        def metrics(self):
            self.calls += 1
            return {"user/calls": self.calls}

    oracle = make_oracle(Mine, "mine", {})
    assert [oracle.metrics, oracle.metrics] == [{"user/calls": 1}, {"user/calls": 2}]


@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("cacheable", "no", "is 'no'; give True or False"),
        ("cacheable", lambda self: False, "is <.*; give True or False"),
        ("is_relative", [], r"is \[\]; give True or False"),
        ("names_cost", "yes", "is 'yes'; give True or False"),
        ("max_outage_s", "300", "is '300'; give seconds"),
        ("version", lambda self: "1", "is <.*; give a text"),
        ("made_of", "mine.py", "is 'mine.py'; give a dict of plain values by file and field"),
        ("metrics", lambda self: {}, "is <.*; give numbers by name"),
        ("price", 3, "is 3; make it a method"),
        ("bind", True, "is True; make it a method"),
        ("check_columns", ["a"], r"is \['a'\]; make it a method"),
    ],
)
def test_a_member_of_a_wrong_kind_is_named(member: str, value: Any, words: str) -> None:
    oracle = users(**{member: value})
    with pytest.raises(OracleError, match=f"`{member}` of oracle Mine {words}, or leave it out"):
        used(oracle, member)


@pytest.mark.parametrize(
    "member", ["version", "made_of", "cacheable", "is_relative", "max_outage_s", "price", "close"]
)
def test_a_member_that_raises_is_named(member: str) -> None:
    def boo(oracle):
        raise RuntimeError("boo")

    sick = UsersOracle(type("Sick", (), {member: property(boo)})())
    words = f"`{member}` of oracle Sick raised {BOO}; give a value, or leave it out"
    with pytest.raises(OracleError, match=words):
        used(sick, member)


def test_what_its_methods_raise_is_named() -> None:
    def boo(*arguments):
        raise RuntimeError("boo")

    sick = users(price=boo, bind=boo, close=boo, check_columns=boo, metrics=property(boo))
    with pytest.raises(OracleError, match=f"`check_columns` of oracle Mine raised {BOO}; repair"):
        sick.check_columns(["answer"], True)
    with pytest.raises(OracleError, match=f"`price` of oracle mine raised {BOO}, asked about train/0/0/0"):
        sick.price(QUESTION)
    with pytest.raises(OracleError, match=f"`bind` of oracle Mine raised {BOO}; repair it"):
        sick.bind()
    with pytest.raises(OracleError, match=f"`metrics` of oracle Mine raised {BOO}; give numbers by name"):
        _ = sick.metrics
    with pytest.warns(OatWarning, match="oracle Mine could not be closed: RuntimeError: boo"):
        sick.close()
    with pytest.raises(OracleError, match=r"`price` of oracle mine returned 3; return an oat.types.Price"):
        users(price=lambda self, question: 3).price(QUESTION)


def test_a_subclass_without_its_methods_is_none() -> None:
    with pytest.raises(ConfigError, match="the oracle mine lacks submit and collect"):
        make_oracle(type("Empty", (Oracle,), {"answers": "score"}), "mine", {})
    with pytest.raises(ConfigError, match="the oracle mine must have `answers`"):
        make_oracle(type("Vague", (Oracle,), {"submit": Bare.submit, "collect": Bare.collect}), "mine", {})


def test_its_version_is_that_of_its_file_unless_it_says_one(tmp_path) -> None:
    text = (
        "class Mine:\n    answers, durable = 'score', False\n"
        "    submit = collect = lambda *arguments: []\n\n\n"
        "class Said(Mine):\n    version = ''\n    made_of = {'a': {}}\n"
    )
    (tmp_path / "mine.py").write_text(text)
    mine, said = (build_oracle(f"{tmp_path / 'mine.py'}:{name}", {}) for name in ("Mine", "Said"))
    assert len(mine.version or "") == 16
    assert [place.rpartition("/")[2] for place in mine.made_of] == ["mine.py"]
    assert (said.version, said.made_of) == ("", {"a": {}})


def test_a_wrapper_hands_on_every_member() -> None:
    inner = FakeOracle(lambda question: 1.0)
    inner.cacheable, inner.version, inner.max_outage_s, inner.made_of = False, "v", 1.0, {"a": {}}
    wrapper = Wrapper(inner)
    for member in MEMBERS:
        assert getattr(wrapper, member) == getattr(inner, member), member
    wrapper.name = "outer"
    assert (wrapper.name, inner.name) == ("outer", "")
