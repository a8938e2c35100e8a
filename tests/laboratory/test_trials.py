"""The laboratory's trials, its table, and `oat bench explore`."""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import oat

from oat.explore.find_rule import Chooser, find_rule
from oat.explore.settings import ModelLabelsConfig
from oat.laboratory import agents as agents_module
from oat.laboratory import report
from oat.laboratory.agents import AGENTS, MEMBERS
from oat.laboratory.report import Case, queries_to, ratios, read_curves, run_cases, table
from oat.laboratory.trial import PROMPTS, RATES, Curve, learn_policy, learn_rewards
from oat.laboratory.worlds import (
    SIZE,
)


def rule(name: str) -> Chooser:
    return find_rule(name, {})


@pytest.mark.parametrize(("agent", "rounds"), [("ideal", 25), ("ensemble", 12)])
def test_an_agent_learns_an_easy_world(agent: str, rounds: int) -> None:
    """A regret of 1 is that of a random choice, and 0 that of the best one. Each pair is a query."""
    curve = learn_rewards("independent", agent, rule("passive"), 5, rounds)
    assert curve.queries == [PROMPTS * number for number in range(1, rounds + 1)]
    assert (len(curve.regrets), curve.clashes) == (rounds, 0.0)
    assert min(curve.regrets) >= 0
    assert max(curve.regrets) < 1.05
    assert np.mean(curve.regrets[-3:]) < 0.65 * np.mean(curve.regrets[:2])


def test_a_seed_decides_a_trial_and_all_rules_see_the_same_prompts() -> None:
    shown: list[list[np.ndarray]] = []

    def watching(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        shown[-1].append(rewards_MBG)
        return np.tile([len(shown) % 2, 2], (len(valid_BG), 1))

    for seed in (4, 4, 5):
        shown.append([])
        learn_rewards("centred", "ideal", watching, seed, 2)
    np.testing.assert_array_equal(shown[0][0], shown[1][0])
    assert not np.array_equal(shown[0][0], shown[2][0])
    assert not np.array_equal(shown[0][1], shown[1][1]), "the rules chose other pairs, so beliefs differ"
    one, same = (learn_rewards("centred", "ideal", rule("bai_ts"), 4, 4) for _ in range(2))
    assert one == same


def test_an_agent_may_be_made_by_a_function() -> None:
    named = learn_rewards("independent", "ideal", rule("bai_ts"), 4, 3)
    assert learn_rewards("independent", AGENTS["ideal"], rule("bai_ts"), 4, 3) == named


@pytest.mark.parametrize("learn", [learn_rewards, learn_policy])
def test_clashes_cost_nothing_and_teach_nothing(learn: Any) -> None:
    def clashing(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        pairs_B2 = np.argsort(~valid_BG, axis=1, kind="stable")[:, :2]
        pairs_B2[: len(pairs_B2) // 4, 1] = pairs_B2[: len(pairs_B2) // 4, 0]
        return pairs_B2

    curve = learn("independent", "ideal", clashing, 1, 3)
    assert curve.clashes == 0.25
    assert curve.queries == [12, 24, 36]
    only = learn("independent", "ideal", lambda rewards, valid, generator: np.zeros((PROMPTS, 2), int), 1, 3)
    assert (only.clashes, only.queries) == (1.0, [0, 0, 0])
    assert len(set(only.regrets)) == 1, "nothing was learned"


def test_a_policy_learns_and_one_without_a_rate_does_not() -> None:
    still = learn_policy("independent", "ideal", rule("passive"), 3, 3, rate=0.0)
    assert still.regrets == pytest.approx([1.0] * 3, rel=1e-9), "it is uniform"
    curve = learn_policy("independent", "ideal", rule("passive"), 3, 10, rate=10.0)
    assert curve.regrets[-1] < 0.6
    assert curve.queries == [PROMPTS * number for number in range(1, 11)]


def test_labels_of_the_agent_are_learned_after_the_burn_in_and_cost_nothing() -> None:
    rounds, labels = 8, ModelLabelsConfig(share=1.0, burn_in=3, burn_in_pairs=0)
    without = learn_policy("independent", "ideal", rule("passive"), 3, rounds)
    mixed = learn_policy("independent", "ideal", rule("passive"), 3, rounds, labels)
    assert mixed.regrets[:3] == without.regrets[:3]
    assert all(mixed.regrets[place] != without.regrets[place] for place in range(3, rounds))
    assert mixed.queries == without.queries
    counted = ModelLabelsConfig(share=1.0, burn_in=0, burn_in_pairs=3 * PROMPTS)
    assert learn_policy("independent", "ideal", rule("passive"), 3, rounds, counted) == mixed
    none = replace(labels, share=0.0)
    assert learn_policy("independent", "ideal", rule("passive"), 3, rounds, none) == without


def test_equal_responses_of_a_policy_are_one_candidate() -> None:
    """A policy that has learned draws some responses twice. Rules see the first of them as a candidate."""
    repeated = 0

    def watching(rewards_MBG: np.ndarray, valid_BG: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        nonlocal repeated
        for place, valid_G in enumerate(valid_BG):
            seen = [column.tobytes() for column in np.ascontiguousarray(rewards_MBG[:, place].T[valid_G])]
            assert len(set(seen)) == len(seen)
            repeated += SIZE - len(seen)
        return rule("passive")(rewards_MBG, valid_BG, generator)

    learn_policy("independent", "ideal", watching, 3, 6, rate=30.0)
    assert repeated > 100


# the table


def curve_of(*regrets: float, per_round: int = PROMPTS) -> Curve:
    return Curve([per_round * (number + 1) for number in range(len(regrets))], list(regrets), 0.0)


@pytest.mark.parametrize(
    ("regrets", "rounds"),
    [
        ((0.1, 0.1, 0.9), 1),
        ((0.9, 0.2, 0.2), 2),
        ((0.9, 0.1, 0.9, 0.1, 0.1), 4),
        ((0.9, 0.21, 0.19), 3),
        ((0.9, 0.9, 0.9), 3),
        ((0.1, 0.9, 0.1), 3),
        ((0.1,), 1),
    ],
)
def test_the_threshold_must_be_reached_twice_in_a_row(regrets: tuple[float, ...], rounds: int) -> None:
    """Otherwise the trial counts with all of its queries."""
    assert queries_to(curve_of(*regrets), 0.2) == PROMPTS * rounds


def test_a_trial_that_asks_little_and_learns_nothing_counts_with_the_budget() -> None:
    assert queries_to(curve_of(0.9, 0.9, per_round=3), 0.2) == 2 * PROMPTS
    assert queries_to(curve_of(0.9, 0.1, 0.1, per_round=3), 0.2) == 6


def cases(arms: dict[str, Sequence[Curve]], **place: Any) -> dict[Case, Curve]:
    """Return trials of several arms with consecutive seeds."""
    world, agent = place.get("world", "noisy"), place.get("agent", "ideal")
    return {
        Case(world, agent, arm, 1000 + seed): curve
        for arm, curves in arms.items()
        for seed, curve in enumerate(curves)
    }


def reaching(round: int, rounds: int = 12) -> Curve:
    """Return a curve that reaches the threshold in this round, from 1, and stays there."""
    return curve_of(*(0.5 if number < round else 0.1 for number in range(1, rounds + 1)))


SLOW_TRIALS = [reaching(8), reaching(4), reaching(6), reaching(10)]


def test_ratios_by_hand() -> None:
    """The baseline needs 8, 4, 6 and 10 rounds, so 7 in the median. An arm that needs half as many with
    each seed has a ratio of one half in every resample."""
    found = ratios(
        cases(
            {
                "passive": SLOW_TRIALS,
                "half": [reaching(4), reaching(2), reaching(3), reaching(5)],
                "mixed": [reaching(1), reaching(9), reaching(3), reaching(2)],
                "never": [reaching(99)] * 4,
            }
        ),
        "noisy",
        "ideal",
    )
    assert set(found) == {"passive", "half", "mixed", "never"}
    base = found["passive"]
    assert (base.queries, base.ratio, base.low, base.high, base.censored) == (7 * PROMPTS, 1.0, 1.0, 1.0, 0)
    half = found["half"]
    assert (half.queries, half.ratio, half.low, half.high, half.censored) == (3.5 * PROMPTS, 0.5, 0.5, 0.5, 0)
    mixed = found["mixed"]
    assert mixed.queries == 2.5 * PROMPTS
    assert mixed.ratio == pytest.approx(25 / 70)
    assert mixed.low < mixed.ratio < mixed.high
    never = found["never"]
    assert (never.queries, never.censored) == (12 * PROMPTS, 4)


def test_the_table_has_a_row_for_each_arm_and_a_column_for_each_place() -> None:
    some = cases({"passive": SLOW_TRIALS, "half": [reaching(4), reaching(2), reaching(3), reaching(5)]})
    other = cases({"passive": SLOW_TRIALS, "never": [reaching(99)] * 4}, world="mlp", agent="ensemble")
    labelled = {
        replace(case, share=0.25, rate=3.0): curve for case, curve in cases({"half": SLOW_TRIALS}).items()
    }
    assert table({**some, **other, **labelled}).splitlines() == [
        "| rule | noisy, ideal | mlp, ensemble |",
        "| --- | --- | --- |",
        "| passive | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) |",
        "| half | 0.50 (0.50-0.50) |  |",
        f"| never |  | {_never(other)} |",
        "| half + labels 0.25 | 1.00 (1.00-1.00) |  |",
    ]


def _never(found: dict[Case, Curve]) -> str:
    ratio = ratios(found, "mlp", "ensemble")["never"]
    assert ratio.ratio == pytest.approx(120 / 70)
    return f"1.71 ({ratio.low:.2f}-{ratio.high:.2f}, 4 never)"


# the command

USERS_RULE = '''
from pathlib import Path

import numpy as np


def mine(rewards_MBG, valid_BG, generator):
    """Note each call, and choose the first and the last candidate."""
    with Path(__file__).with_suffix(".calls").open("a") as file:
        file.write("x")
    return np.tile([0, valid_BG.shape[1] - 1], (len(valid_BG), 1))
'''


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(report, "ROUNDS", 3)
    return 3


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return the file of a user's rule."""
    (tmp_path / "mine.py").write_text(USERS_RULE, encoding="utf-8")
    return tmp_path / "mine.py"


def calls(mine: Path) -> int:
    return len(mine.with_suffix(".calls").read_text()) if mine.with_suffix(".calls").exists() else 0


def bench(out: Path, *flags: object) -> int:
    places = ("--worlds", "independent", "--agents", "ideal")
    return oat("bench", "explore", *places, "--out", out, *flags)


def test_it_writes_curves_a_table_and_a_picture(
    few_rounds: int, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline is always among the rules."""
    out, name = tmp_path / "deep" / "out", f"{mine}:mine"
    assert bench(out, "--rules", name, "--seeds", 2) == 0
    printed = capsys.readouterr().out
    written = sorted(file.name for file in out.iterdir())
    assert written == ["curves.csv", "regret.png", "rules.json", "table.md"]
    with (out / "curves.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["world"], line["agent"], line["rule"], line["seed"]) for line in lines] == [
        ("independent", "ideal", rule, str(report.FIRST_SEED + seed))
        for rule in ("passive", name)
        for seed in range(2)
    ]
    for line in lines:
        assert line["queries"] == "16 32 48"
        assert len(line["regrets"].split()) == few_rounds
        assert (line["clashes"], line["share"], line["rate"]) == ("0.0", "", "")
    shown = (out / "table.md").read_text()
    assert shown.splitlines()[0] == "| rule | independent, ideal |"
    assert [line.split(" | ")[0] for line in shown.splitlines()[2:]] == ["| passive", f"| {name}"]
    assert printed.startswith(shown)
    assert (
        f"relative to passive: median over 2 seeds, with 95 % intervals\ncurves: {out}/curves.csv" in printed
    )
    assert (out / "regret.png").read_bytes().startswith(b"\x89PNG")
    assert calls(mine) == 2 * few_rounds


def test_the_curves_are_those_of_the_trials(few_rounds: int, tmp_path: Path) -> None:
    assert bench(tmp_path / "out", "--rules", "uniform", "--seeds", 1) == 0
    found = read_curves(tmp_path / "out" / "curves.csv")
    for name in ("passive", "uniform"):
        curve = learn_rewards("independent", "ideal", rule(name), report.FIRST_SEED, few_rounds)
        stored = found[Case("independent", "ideal", name, report.FIRST_SEED)]
        assert (stored.queries, stored.clashes) == (curve.queries, curve.clashes)
        assert stored.regrets == pytest.approx(curve.regrets, abs=1e-4)


def test_trials_that_are_there_are_not_run_again(
    few_rounds: int, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those of a command that was ended on its way. New seeds are added behind them."""
    flags = ("--rules", f"{mine}:mine", "--seeds")
    out = tmp_path / "out"
    assert bench(out, *flags, 2) == 0
    curves, shown, done = (out / "curves.csv").read_bytes(), (out / "table.md").read_text(), calls(mine)
    assert bench(out, *flags, 2) == 0
    assert (calls(mine), (out / "curves.csv").read_bytes()) == (done, curves)
    assert (out / "table.md").read_text() == shown
    assert bench(out, *flags, 3) == 0
    assert calls(mine) == done + few_rounds
    assert (out / "curves.csv").read_bytes().startswith(curves)
    *_, last = curves.splitlines(keepends=True)
    (out / "curves.csv").write_bytes(curves.removesuffix(last))
    assert bench(out, *flags, 2) == 0
    assert calls(mine) == done + 2 * few_rounds
    assert (out / "curves.csv").read_bytes() == curves
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--rules", "bai"), "there is no rule 'bai'; did you mean `bai_ts`"),
        (("--rules", "absent.py:rule"), "absent.py"),
        (("--worlds", "moon"), "there is no world 'moon'"),
        (("--agents", "idealist"), "there is no agent 'idealist'; did you mean `ideal`"),
        (("--seeds", "0"), "--seeds and --jobs are at least 1"),
        (("--jobs", "0"), "--seeds and --jobs are at least 1"),
        (("--policy", "1.5"), "a share of --policy is from 0 to 1"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert bench(tmp_path / "out", *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "a,b\n1,2",
        lambda text: text.replace("16 32 48", "16 many 48", 1),
        lambda text: text.rpartition(",")[0] + "\n",
    ],
    ids=["another file", "a word among numbers", "a line without its end"],
)
def test_a_file_of_other_curves_is_refused(
    few_rounds: int, tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays as it is, also if its last line has no end."""
    out = tmp_path / "out"
    assert bench(out, "--rules", "passive", "--seeds", 1) == 0
    (out / "curves.csv").write_text(damage((out / "curves.csv").read_text()))
    before = (out / "curves.csv").read_bytes()
    assert bench(out, "--rules", "passive", "--seeds", 2) == 2
    error = capsys.readouterr().err
    assert f"{out / 'curves.csv'}:" in error
    assert "give another --out" in error
    assert (out / "curves.csv").read_bytes() == before


def test_a_users_rule_that_breaks_the_contract_is_named(
    few_rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text("def rule(rewards, valid, generator):\n    return None\n")
    assert bench(tmp_path / "out", "--rules", f"{tmp_path / 'wrong.py'}:rule", "--seeds", 1) == 1
    assert "wrong.py:rule returned None for 16 prompts" in capsys.readouterr().err


def test_without_matplotlib_there_is_no_picture(
    few_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert bench(tmp_path / "out", "--rules", "passive", "--seeds", 1) == 0
    assert "no picture, since matplotlib is missing" in capsys.readouterr().out
    assert not (tmp_path / "out" / "regret.png").exists()


def test_a_policy_may_learn_too_also_from_the_agents_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm gets the learning rate with the least regret on seeds that no figure uses, and there is an arm
    without labels."""
    monkeypatch.setattr(report, "ROUNDS", 7)
    monkeypatch.setattr(report, "TUNING_SEEDS", 2)
    out = tmp_path / "out"
    assert bench(out, "--rules", "passive", "--seeds", 1, "--policy", 0.5) == 0
    tried, found = read_curves(out / "tuning.csv"), read_curves(out / "curves.csv")
    assert {(case.share, case.rate, case.seed) for case in tried} == {
        (share, rate, seed) for share in (0.0, 0.5) for rate in RATES for seed in (0, 1)
    }
    assert [case.share for case in found] == [0.0, 0.5]
    for case in found:
        regrets = {
            rate: np.mean([tried[replace(case, rate=rate, seed=seed)].regrets for seed in (0, 1)])
            for rate in RATES
        }
        assert case.rate == min(RATES, key=regrets.__getitem__)
        assert case.seed == report.FIRST_SEED
        labels = ModelLabelsConfig(share=0.5) if case.share else None
        curve = learn_policy("independent", "ideal", rule("passive"), case.seed, 7, labels, case.rate)
        assert found[case].regrets == pytest.approx(curve.regrets, abs=1e-4)
    without, mixed = found.values()
    assert without.regrets != mixed.regrets
    arms = [line.split(" | ")[0] for line in (out / "table.md").read_text().splitlines()[2:]]
    assert arms == ["| passive", "| passive + labels 0.5"]


@pytest.mark.slow(instead="the other tests of the file, in one process", seconds=1.9)
def test_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are written in their order. The environment is as before."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    some = [Case("independent", "ideal", name, seed) for name in ("passive", "uniform") for seed in (1, 2)]
    alone = run_cases(some, tmp_path / "alone.csv", 1)
    assert run_cases(some, tmp_path / "together.csv", 2) == alone
    assert (tmp_path / "together.csv").read_bytes() == (tmp_path / "alone.csv").read_bytes()
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_the_agents_are_those_that_the_documentation_names() -> None:
    assert set(AGENTS) == {"ideal", "ensemble"}
    assert agents_module.ENSEMBLE.members == MEMBERS


def test_trials_of_a_changed_rule_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their old rows are removed. A rule of ours is not run again."""
    monkeypatch.setattr(report, "ROUNDS", 3)
    name = f"{tmp_path / 'mine.py'}:mine"
    cases = [Case("redundant", "ideal", each, 1) for each in (name, "passive")]
    found = []
    for pair in ("[0, 1]", "[2, 3]"):
        text = "import numpy as np\n\n\ndef mine(rewards_MBG, valid_BG, generator):\n"
        (tmp_path / "mine.py").write_text(text + f"    return np.tile({pair}, (len(valid_BG), 1))\n")
        found.append(run_cases(cases, tmp_path / "curves.csv", 1))
    assert found[0][cases[0]] != found[1][cases[0]]
    assert found[0][cases[1]] == found[1][cases[1]]
    assert read_curves(tmp_path / "curves.csv") == found[1]
    assert len((tmp_path / "curves.csv").read_text().splitlines()) == 1 + 2


def test_a_rule_may_be_an_object_that_can_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROUNDS", 2)
    (tmp_path / "called.py").write_text(
        "import numpy as np\n\n\nclass Rule:\n    def __call__(self, rewards_MBG, valid_BG, generator):\n"
        "        return np.tile([0, 1], (len(valid_BG), 1))\n\n\nrule = Rule()\n",
        encoding="utf-8",
    )
    case = Case("redundant", "ideal", f"{tmp_path / 'called.py'}:rule", 1)
    assert run_cases([case], tmp_path / "curves.csv", 1) == run_cases([case], tmp_path / "curves.csv", 1)
