"""Parts own their settings (`oat.types.part`): a user's algorithm declares defaults and checks as the
algorithms of `oat` do."""

import re
from pathlib import Path

import pytest

from oat.config.load import load_config
from oat.errors import ConfigError
from oat.resolve.defaults import derived
from oat.resolve.resolve import resolve

RUN = """\
model: {path: models/tiny}
prompts: {path: train.jsonl}
sampling: {max_new_tokens: 8}
oracle: {name: exact_match}
algorithm:
  name: mine.py:Mine
learner:
  sync_every: 3
stop: {max_steps: 3}
"""
MINE = """
from __future__ import annotations

from dataclasses import dataclass

from oat.algorithms.direct import DPO, DPOConfig
from oat.errors import ConfigError
from oat.types.part import Check, Derived


@dataclass(frozen=True)
class MyConfig(DPOConfig):
    longest: int | None = None
    late: bool = False


class Mine(DPO):
    name = "mine"
    Config = MyConfig

    @staticmethod
    def defaults(config, run):
        if config.longest is None:
            return {"longest": Derived(2 * run.max_new_tokens, "twice sampling.max_new_tokens")}
        if config.longest > 100:
            raise ConfigError(f"algorithm.longest is {config.longest}; lower it")
        return {}

    @staticmethod
    def checks(config, run):
        yield Check("learner.sync_every", config.late and run.is_sampling, "it is late already; remove one")


class Broken(Mine):
    @staticmethod
    def checks(config, run):
        raise KeyError("no")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    Path("mine.py").write_text(MINE, encoding="utf-8")


def test_a_default_follows_from_the_run_and_is_said() -> None:
    resolved = resolve(*load_config("run.yaml"))
    assert resolved.config.algorithm.options["longest"] == 16
    assert "algorithm.longest: 16, twice sampling.max_new_tokens" in derived(resolved)
    given = resolve(*load_config("run.yaml", ["--algorithm.longest", "5"]))
    assert given.config.algorithm.options["longest"] == 5
    assert not any(line.startswith("algorithm.longest") for line in derived(given))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algorithm.longest", "200"], "--algorithm.longest: algorithm.longest is 200; lower it"),
        (
            ["--algorithm.late", "true"],
            "run.yaml:8: learner.sync_every is 3: it is late already; remove one",
        ),
        (
            ["--algorithm.name", "mine.py:Broken"],
            "`checks` of mine.py:Broken raised KeyError: 'no' (line 37 of mine.py); repair it",
        ),
    ],
)
def test_what_contradicts_a_part_is_refused_at_its_place(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(*load_config("run.yaml", flags))


def resolve_with(function: str, returned: str) -> None:
    wrong = f"    @staticmethod\n    def {function}(config, run):\n        return {returned}\n"
    Path("mine.py").write_text(f"{MINE}\n\nclass Wrong(Mine):\n{wrong}", encoding="utf-8")
    resolve(*load_config("run.yaml", ["--algorithm.name", "mine.py:Wrong"]))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            "{'nosuch': Derived(3, 'me')}",
            "`defaults` of mine.py:Wrong gives a value to 'nosuch', which is no",
        ),
        ("{'beta': Derived(3, 'me')}", "gives a value to algorithm.beta, which is 0.1; give values only to"),
        ("{'longest': Derived('abc', 'me')}", "`defaults` of mine.py:Wrong gives a wrong value: .*longest"),
        ("{'longest': 3}", "`defaults` of mine.py:Wrong gives 3; give an oat.types.part.Derived"),
        ("['longest']", "`defaults` of mine.py:Wrong raised"),
    ],
)
def test_defaults_that_make_no_sense(returned: str, words: str) -> None:
    """A part's defaults are refused if they would replace a value that the user set, or make a run that
    cannot be continued."""
    with pytest.raises(ConfigError, match=words):
        resolve_with("defaults", returned)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("[('a', 'b')]", r"`checks` of mine.py:Wrong returned \('a', 'b'\); return oat.types.part.Check"),
        ("[Check('evaluation.every', True, 'there is none')]", "evaluation.every is not set: there is none"),
    ],
)
def test_checks_that_make_no_sense_or_are_of_a_section_that_is_absent(returned: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_with("checks", returned)
