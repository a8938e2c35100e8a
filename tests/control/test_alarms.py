"""Alarms in real runs: each rule is raised by a real collapse, each action has its effect, and a sound run
raises no alarm."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures import World, oat
from flat_steps import flat_steps

from oat.assemble.run import build
from oat.config.load import load_config, to_yaml
from oat.control.alarms import METRICS
from oat.errors import ConfigError
from oat.loop import LEARNED
from oat.resolve.resolve import resolve
from oat.rundir.checkpoints import Checkpoints

REWARDS = """
def constant(prompts, completions, **columns):
    return [1.0] * len(completions)


def longer(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def shorter(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]


def letters(prompts, completions, **columns):
    return [float(text.count("a")) for text in completions]
"""


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def state_of(run_dir: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found, tensors, state = Checkpoints(run_dir / "checkpoints", every=1, keep_last=1).load_step(step)
    assert found == step
    return tensors, state


@dataclass(frozen=True)
class Collapse:
    """A run in which one thing goes wrong.

    Attributes:
        rule: the alarm that must be raised.
        says: a pattern of its message.
        fields: settings of the rule, if so small a model cannot reach its defaults.
    """

    algorithm: str
    rule: str
    says: str
    reward: str
    changes: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


FAST, LONG = (
    {"learner.learning_rate": 0.1, "stop.max_steps": 24},
    {"sampling.max_new_tokens": 12, "learner.learning_rate": 0.03, "stop.max_steps": 24},
)
COLLAPSES = {
    "kl": Collapse(
        "grpo", "kl", "kl/reference is .*, above 1,", "letters", {**FAST, "algorithm.kl_coef": 1e-6}
    ),
    "entropy": Collapse("grpo", "entropy", "policy/entropy is .*, below 0.01", "letters", FAST),
    "ratio": Collapse(
        "grpo",
        "ratio",
        "policy/ratio_max is .*, above 5",
        "letters",
        {**FAST, "algorithm.epochs": 8},
        {"above": 5.0, "patience": 1},
    ),
    "vanishing": Collapse("grpo", "length", r"response/length is .*, below .* \(0.25 times", "shorter", LONG),
    "growing": Collapse(
        "grpo", "length", r"response/length is .*, above .* \(1.2 times", "longer", LONG, {"above": 1.2}
    ),
    "truncated": Collapse("grpo", "truncated", "response/truncated_frac is .*, above 0.95", "longer", LONG),
    "truncated, of comparisons": Collapse(
        "dpo", "truncated", "response/truncated_frac is .*, above 0.95", "longer", LONG
    ),
    "constant scores": Collapse(
        "grpo", "spread", "reward/zero_spread_frac is 1, above 0.99", "constant", {"stop.max_steps": 5}
    ),
    "tied comparisons": Collapse(
        "dpo", "spread", "answers/tied_frac is 1, above 0.99", "constant", {"stop.max_steps": 5}
    ),
}


@pytest.mark.sample("constant scores", "tied comparisons", seconds=6.3)
@pytest.mark.parametrize("collapse", COLLAPSES.values(), ids=COLLAPSES.keys())
def test_a_collapse_is_noticed(collapse: Collapse, world: World, tmp_path: Path) -> None:
    """A run collapses and raises the alarm for it. This alarm has its default settings, unless the model is
    too small for them. All other alarms are off."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    rules = {f"alarms.{name}.action": "off" for name in METRICS if name != collapse.rule}
    rules |= {f"alarms.{collapse.rule}.{name}": value for name, value in collapse.fields.items()}
    changes = {
        "oracle.name": f"{tmp_path / 'rewards.py'}:{collapse.reward}",
        "evaluation": None,
        **collapse.changes,
        **rules,
    }
    with pytest.warns(UserWarning, match=rf"alarm {collapse.rule}: {collapse.says}"):
        assert oat("train", world.config(collapse.algorithm, tmp_path, changes)) == 0
    rows = rows_of(tmp_path / collapse.algorithm)
    patience = collapse.fields.get("patience", 5)
    assert rows[-1]["alarms/raised"] >= 1
    assert all(row["alarms/raised"] == 0 for row in rows[1:patience])


@pytest.mark.sample("grpo", seconds=1.4)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo", "sft"])
def test_a_healthy_run_is_silent(algorithm: str, world: World, tmp_path: Path) -> None:
    changes = {"stop.max_steps": 12, **({"algorithm.threshold": 0.0} if algorithm == "sft" else {})}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*alarm")
        assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    rows = rows_of(tmp_path / algorithm)
    assert len(rows) == 13
    assert all(row["alarms/raised"] == row["alarms/rolled_back"] == 0 for row in rows[1:])


class TestActions:
    """About every second step has no variance (`flat_steps`)."""

    def test_warn_goes_on_and_counts(self, world: World, tmp_path: Path) -> None:
        config = world.config(
            "grpo", tmp_path, {**flat_steps(tmp_path, {1, 2, 4, 5, 6}, patience=2), "stop.max_steps": 8}
        )
        with pytest.warns(UserWarning, match="alarm spread") as said:
            assert oat("train", config) == 0
        texts = [str(one.message) for one in said if "alarm" in str(one.message)]
        assert [
            text.split("reward/zero_spread_frac is 1, above 0.99, for 2 steps on end")[0] for text in texts
        ] == [
            "after 3 steps: alarm spread: ",
            "after 6 steps: alarm spread: ",
        ]
        assert [row["alarms/raised"] for row in rows_of(tmp_path / "grpo")[1:]] == [0, 0, 1, 1, 1, 2, 2, 2]

    def test_stop_saves_says_why_and_stays(
        self, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = {
            **flat_steps(tmp_path, {2, 6}, patience=1, action="stop"),
            "checkpoint.every": 10,
            "evaluation.every": 10,
            "stop.max_steps": 8,
        }
        config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
        assert oat("train", config) == 3
        said = capsys.readouterr().err.splitlines()[-1]
        assert (
            "the run ended after 3 steps: alarm spread: reward/zero_spread_frac is 1, above 0.99, in one step"
        ) in said
        assert "once alarms.spread is changed" in said
        rows = rows_of(run_dir)
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert {"eval/sampled", "eval/greedy"} <= rows[3].keys()
        assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000003\n"

        before = {
            file: file.read_bytes()
            for file in run_dir.rglob("*")
            if file.is_file() and "sqlite" not in file.name
        }
        assert oat("train", config) == 3
        assert capsys.readouterr().err.splitlines()[-1] == said
        assert {
            file: file.read_bytes()
            for file in run_dir.rglob("*")
            if file.is_file() and "sqlite" not in file.name
        } == before
        assert oat("train", config, "--alarms.spread.patience", "2") == 0
        assert len(rows_of(run_dir)) == 9

    def test_roll_back_takes_back_what_was_learned_and_nothing_else(
        self, world: World, tmp_path: Path
    ) -> None:
        changes = {
            **flat_steps(tmp_path, {4}, patience=1, action="roll_back"),
            "checkpoint": {"every": 2, "keep_last": 1},
            "evaluation.every": 1,
            "learner.learning_rate": 0.03,
            "stop.max_steps": 5,
        }
        config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
        with pytest.warns(UserWarning, match="after 5 steps: back to the state after 2"):
            assert oat("train", config) == 0
        (good, at_2), (now, at_5) = state_of(run_dir, 2), state_of(run_dir, 5)
        learned = [name for name in good if name.startswith("learner/")]
        assert any("/moments/" in name for name in learned)
        assert now.keys() == good.keys()
        assert all(torch.equal(now[name], good[name]) for name in learned)
        assert at_5["learner"] == at_2["learner"]
        assert (at_2["prompts"]["taken"], at_5["prompts"]["taken"]) == (8, 20)
        assert (at_2["weights"]["version"], at_5["weights"]["version"]) == (2, 5)
        assert sorted(folder.name for folder in (run_dir / "checkpoints").glob("step_*")) == [
            "step_00000002",
            "step_00000005",
        ]
        assert [row["alarms/rolled_back"] for row in rows_of(run_dir)[1:]] == [0, 0, 0, 0, 1]

        assert oat("train", config, "--stop.max_steps", "8") == 0
        rows = rows_of(run_dir)
        assert [row["optim/steps"] for row in rows[1:]] == [1, 2, 3, 4, 5, 3, 4, 5]
        assert [row["lag/versions"] for row in rows[1:]] == [0] * 8
        assert rows[6]["logps/recomputed"] == 0
        assert rows[6]["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        answers = {
            step: (run_dir / "evaluations" / f"step_{step:08d}.jsonl").read_text() for step in (2, 4, 5)
        }
        assert answers[5] == answers[2] != answers[4]

    def test_before_the_first_checkpoint_it_goes_back_to_the_start(
        self, world: World, tmp_path: Path
    ) -> None:
        changes = {
            **flat_steps(tmp_path, {1}, patience=1, action="roll_back"),
            "checkpoint.every": 10,
            "stop.max_steps": 2,
        }
        config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
        with pytest.warns(UserWarning, match="after 2 steps: back to the state after 0"):
            assert oat("train", config) == 0
        (start, at_0), (now, at_2) = state_of(run_dir, 0), state_of(run_dir, 2)
        assert not any("/moments/" in name for name in now)
        assert now.keys() == start.keys()
        assert all(torch.equal(now[name], start[name]) for name in start)
        assert at_2["learner"] == at_0["learner"]
        assert at_0["learner"]["steps"] == {"policy": 0}

    def test_a_lagging_sampler_goes_back_at_once(self, world: World, tmp_path: Path) -> None:
        changes = {
            **flat_steps(tmp_path, {4}, patience=1, action="roll_back"),
            "learner.sync_every": 4,
            "stop.max_steps": 6,
        }
        config = world.config("grpo", tmp_path, changes)
        with pytest.warns(UserWarning, match="after 5 steps: back to the state after 2"):
            assert oat("train", config) == 0
        assert [row["lag/versions"] for row in rows_of(tmp_path / "grpo")[1:]] == [0, 1, 2, 3, 0, 0]

    def test_too_many_roll_backs_end_the_run(
        self, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = {
            **flat_steps(tmp_path, {2, 4, 6, 8}, patience=1, action="roll_back"),
            "alarms.max_roll_backs": 2,
            "stop.max_steps": 10,
            "evaluation": None,
        }
        config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
        with pytest.warns(UserWarning, match="roll back 2 of 2"):
            assert oat("train", config) == 3
        assert "the run ended after 7 steps, and the run was rolled back 2 times" in capsys.readouterr().err
        assert [row["alarms/rolled_back"] for row in rows_of(run_dir)[1:]] == [0, 0, 1, 0, 1, 0, 0]
        with pytest.warns(UserWarning, match="roll back 3 of 3"):
            assert oat("train", config, "--alarms.max_roll_backs", "3") == 0
        assert [row["alarms/rolled_back"] for row in rows_of(run_dir)[1:]] == [0, 0, 1, 0, 1, 0, 0, 0, 1, 0]

    def test_a_rule_that_comes_later_goes_back_to_where_it_came(self, world: World, tmp_path: Path) -> None:
        changes = {
            **flat_steps(tmp_path, {4}, patience=1),
            "checkpoint": {"every": 10, "keep_last": 1},
            "stop.max_steps": 3,
        }
        config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
        assert oat("train", config) == 0
        with pytest.warns(UserWarning, match="after 5 steps: back to the state after 3"):
            assert oat("train", config, "--alarms.spread.action", "roll_back", "--stop.max_steps", "5") == 0
        good, now = state_of(run_dir, 3)[0], state_of(run_dir, 5)[0]
        assert all(torch.equal(now[name], good[name]) for name in good)

    def test_a_checkpoint_that_is_gone_is_named(
        self, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = {**flat_steps(tmp_path, {4}, patience=1, action="roll_back"), "stop.max_steps": 4}
        config, run_dir = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
        assert oat("train", config) == 0
        (run_dir / "checkpoints" / "step_00000002" / "state.json").unlink()
        with pytest.warns(UserWarning, match="alarm spread"):
            assert oat("train", config, "--stop.max_steps", "5") == 1
        error = capsys.readouterr().err
        assert "step_00000002: FileNotFoundError" in error
        assert "no earlier one is there to go back to" in error
        with pytest.warns(UserWarning, match="alarm spread"):
            assert oat("train", config, "--stop.max_steps", "5", "--alarms.spread.action", "warn") == 0


def test_every_part_goes_back_or_goes_on(world: World, tmp_path: Path) -> None:
    """Every part with a state is listed here or in `LEARNED`. A new part must be added to one of the two."""
    run = build(resolve(*load_config(world.config("grpo", tmp_path))))
    run.ledger.close()
    assert run.parts.keys() - LEARNED == {"weights", "prompts", "collector", "evaluation", "stop", "alarms"}
    assert run.parts.keys() & LEARNED == {"learner", "objective"}


MINIMAL = """
model: {path: org/name}
prompts: {path: prompts.jsonl}
oracle: {name: exact_match}
sampling: {max_new_tokens: 8}
learner: {learning_rate: 1e-6}
stop: {max_steps: 10}
"""
GOLD = "evaluation: {path: held_out.jsonl, gold: gsm8k}\n"
GRPO = "{name: grpo, prompts: 4, samples: 2}"
DPO = "{name: dpo, prompts: 4}"
SFT = "{name: sft, prompts: 4, threshold: 1}"


def resolved(folder: Path, algorithm: str, text: str, *flags: str) -> Any:
    file = folder / "run.yaml"
    file.write_text(f"{MINIMAL}algorithm: {algorithm}\n{text}\n", encoding="utf-8")
    return resolve(*load_config(file, flags)).config


class TestSettings:
    @pytest.mark.parametrize(
        ("algorithm", "text", "words"),
        [
            (DPO, "alarms: {kl: {above: 0.5}}", ["run.yaml:9", "alarms.kl", "kl/reference", "remove it"]),
            (
                GRPO,
                "alarms: {kl: {action: stop}}",
                ["alarms.kl", "kl/reference", "algorithm.kl_coef above 0"],
            ),
            (DPO, "alarms: {entropy: {action: stop}}", ["alarms.entropy", "policy/entropy"]),
            (DPO, "alarms: {ratio: {patience: 1}}", ["alarms.ratio", "policy/ratio_max"]),
            (
                SFT,
                "alarms: {spread: {patience: 1}}",
                ["alarms.spread", "reward/zero_spread_frac or answers/tied_frac"],
            ),
            (GRPO, "alarms: {max_roll_backs: 5}", ["alarms.max_roll_backs", "nothing reads"]),
            (GRPO, "alarms: {entropy: {above: 1}}", ["alarms.entropy.above", "below"]),
            (GRPO, "alarms: {entrpy: {below: 1}}", ["alarms.entrpy", "did you mean `entropy`"]),
            (GRPO, "alarms: {length: {above: 1}}", ["alarms.length.above", "> 1"]),
            (GRPO, "alarms: {length: {below: 1}}", ["alarms.length.below", "< 1"]),
            (GRPO, "alarms: {truncated: {above: 1}}", ["alarms.truncated.above", "< 1"]),
            (GRPO, "alarms: {spread: {action: ignore}}", ["alarms.spread.action", "ignore"]),
            (GRPO, "alarms: {spread: {patience: 0}}", ["alarms.spread.patience", ">= 1"]),
            (
                GRPO,
                "alarms: {gold: {drop: 1}}",
                ["alarms.gold", "eval/gold_sampled or eval/gold_greedy", "name evaluation.gold"],
            ),
            (
                GRPO,
                f"{GOLD}alarms: {{gold: {{action: stop}}}}",
                ["run.yaml:10", "without a bound", "set alarms.gold.drop"],
            ),
            (GRPO, f"{GOLD}alarms: {{gold: {{drop: 0}}}}", ["alarms.gold.drop", "> 0"]),
        ],
    )
    def test_what_would_never_be_raised_or_read_is_refused(
        self, algorithm: str, text: str, words: list[str], tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError) as found:
            resolved(tmp_path, algorithm, text)
        assert [word for word in words if word not in str(found.value)] == []

    def test_recorded_responses_have_no_length_to_watch(self, tmp_path: Path) -> None:
        recorded = "prompts: {path: prompts.jsonl, responses: [chosen, rejected]}\noracle: {name: recorded}\n"
        text = MINIMAL.replace("prompts: {path: prompts.jsonl}\noracle: {name: exact_match}\n", recorded)
        file = tmp_path / "run.yaml"
        file.write_text(f"{text}algorithm: {DPO}\n", encoding="utf-8")
        resolve(*load_config(file))
        with pytest.raises(ConfigError, match=r"alarms\.length: .*does not report response/length"):
            resolve(*load_config(file, ["--alarms.length.above", "2"]))

    def test_recorded_responses_have_no_divergence_to_watch(self, tmp_path: Path) -> None:
        """The alarm `kl` is refused for KTO on recorded responses, since KTO has a divergence only for
        responses that it samples."""
        kto = "{name: kto, prompts: 4}"
        assert resolved(tmp_path, kto, "alarms: {kl: {action: stop}}").alarms.kl.action == "stop"
        with pytest.raises(ConfigError, match=r"alarms\.kl: .*does not report kl/reference"):
            resolved(
                tmp_path,
                kto,
                "alarms: {kl: {action: stop}}",
                "--prompts.responses",
                "[chosen, rejected]",
                "--oracle.name",
                "recorded",
            )

    def test_off_is_off_whatever_yaml_makes_of_the_word(self, tmp_path: Path) -> None:
        for text, flags in [
            ("alarms: {kl: {action: off}}", ()),
            ('alarms: {kl: {action: "off"}}', ()),
            ("", ("--alarms.kl.action", "off")),
        ]:
            config = resolved(tmp_path, DPO, text, *flags)
            assert config.alarms.kl.action == "off"
            again = tmp_path / "again.yaml"
            again.write_text(to_yaml(config), encoding="utf-8")
            assert resolve(*load_config(again)).config == config

    def test_defaults_are_written_out(self, tmp_path: Path) -> None:
        tree = yaml.safe_load(to_yaml(resolved(tmp_path, GRPO, "")))["alarms"]
        assert tree["length"] == {"patience": 5, "action": "warn", "above": 4.0, "below": 0.25}
        assert tree["gold"] == {"patience": 2, "action": "warn", "drop": None}
        assert tree["max_roll_backs"] == 3
