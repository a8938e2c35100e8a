"""The configuration: what is read, what is refused and in which words."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, oat

from oat.build.resolve import resolve
from oat.config.load import dump, load_config, to_yaml
from oat.errors import ConfigError, ModelError
from oat.models.loading import load_tokenizer

MINIMAL = """\
model:
  path: models/tiny
prompts:
  path: train.jsonl
sampling:
  max_new_tokens: 8
oracle:
  name: exact_match
algorithm:
  name: grpo
  prompts: 4
  samples: 2
learner:
  learning_rate: 5e-4
stop:
  max_steps: 3
"""

ALGORITHM = '''
from __future__ import annotations

from dataclasses import dataclass, replace

from oat.algorithms.direct import DPO, DPOConfig
from oat.explore.none import NoExploration


@dataclass(frozen=True)
class MyConfig(DPOConfig):
    strength: float = 2.0
    """Of the new term."""
    names: tuple[str, ...] = ("a", "b")


class Mine(DPO):
    name = "mine"
    Config = MyConfig


def function(config):
    return None


class Curious(NoExploration):
    needs = frozenset({"policy"})


class Wide(NoExploration):
    def widen(self, plan):
        return replace(plan, samples={"sampler": 6})


class Asked:
    def __init__(self, **options):
        self.options = options
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `run.yaml` and a user's algorithm."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MINIMAL, encoding="utf-8")
    (tmp_path / "mine.py").write_text(ALGORITHM, encoding="utf-8")
    return tmp_path


def resolved(path: str | Path, *flags: str) -> Any:
    config, origins = load_config(path, flags)
    return resolve(config, origins).config


def test_a_file_and_its_defaults(here: Path) -> None:
    config, origins = load_config("run.yaml")
    assert (config.model.path, config.learner.learning_rate, config.seed, config.engine.name) == (
        "models/tiny",
        0.0005,
        0,
        "torch",
    )
    assert config.run_dir == os.path.join("runs", "run")
    assert origins["learner", "learning_rate"] == "run.yaml:14"
    assert config.algorithm.options == {"prompts": 4, "samples": 2}
    assert resolve(config, origins).config.algorithm.options["clip_low"] == 0.2


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--learner.learning_rate", "1e-4"], "learner.learning_rate", 1e-4),
        (["--learner.learning_rate=3"], "learner.learning_rate", 3.0),
        (["--seed", "-7"], "seed", -7),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--learner.betas", "[0.8, 0.9]"], "learner.betas", (0.8, 0.9)),
        (["--sampling.stop=['\\n', 'Q:']"], "sampling.stop", ("\\n", "Q:")),
        (["--sampling.stop", '["\\n"]'], "sampling.stop", ("\n",)),
        (["--prompts.epochs", "null"], "prompts.epochs", None),
        (["--prompts.shuffle", "false"], "prompts.shuffle", False),
        (["--oracle.deadline_s", ".inf"], "oracle.deadline_s", float("inf")),
        (["--model.path=a=b"], "model.path", "a=b"),
        (["--evaluation.path", "held_out.jsonl"], "evaluation.path", "held_out.jsonl"),
        (["--checkpoint", "{every: 3}"], "checkpoint.every", 3),
        (["--run_dir", '"1e5"'], "run_dir", "1e5"),
    ],
)
def test_flags(here: Path, flags: list[str], name: str, value: Any) -> None:
    found: Any = load_config("run.yaml", flags)[0]
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_numbers_as_people_write_them(here: Path) -> None:
    for text, value in {"5e-4": 5e-4, "1E+2": 100.0, "2.e1": 20.0, ".5": 0.5, "1": 1.0}.items():
        (here / "run.yaml").write_text(MINIMAL.replace("5e-4", text), encoding="utf-8")
        assert load_config("run.yaml")[0].learner.learning_rate == value


def test_a_flag_that_replaces_a_section_takes_its_fields_along(here: Path) -> None:
    """Also where settings are held against each other: `labels` of the file is gone, `labels` of the flag is
    there."""
    (here / "run.yaml").write_text(
        MINIMAL.replace("exact_match", "exact_match\n  labels: bernoulli"), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:9: .*oracle.labels"):
        resolved("run.yaml")
    assert resolved("run.yaml", "--oracle", "{name: exact_match}").oracle.labels == "threshold"
    with pytest.raises(ConfigError, match=r"--oracle: .*oracle.scale"):
        resolved("run.yaml", "--oracle", "{name: exact_match, scale: 2}")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm", "{name: dpo, prompts: 2}", "--oracle.labels", "bernoulli", "--oracle.scale", "2"],
        ["--algorithm", "{name: 'mine.py:Mine', prompts: 2, strength: 1e-3}"],
        [
            "--oracle",
            (
                "{name: 'mine.py:Asked', threshold: 1e9, words: ['1e5', 'null', '0x1', '\\u2028', 'ü'], "
                "deep: "
                "{a: [1, null, true]}}"
            ),
        ],
        [
            "--run_dir",
            '"5e-4"',
            "--render.template",
            '"null"',
            "--sampling.stop",
            '["1e3", "\\u0085", "on", " "]',
        ],
        [
            "--learner.schedule",
            "cosine",
            "--evaluation",
            "{path: x.jsonl, every: 7}",
            "--engine.deterministic",
            "true",
        ],
    ],
)
def test_a_written_configuration_reads_back_equal(here: Path, flags: list[str]) -> None:
    """It states every field, those that its algorithm does not read too, at their defaults."""
    config = resolved("run.yaml", *flags)
    (here / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = resolved("again.yaml")
    assert dump(again) == dump(config)
    assert again == config
    (here / "thrice.yaml").write_text(to_yaml(again), encoding="utf-8")
    assert (here / "thrice.yaml").read_text(encoding="utf-8") == (here / "again.yaml").read_text(
        encoding="utf-8"
    )


def test_a_merged_section_may_be_overridden(here: Path) -> None:
    text = "checkpoint: &often {every: 3}\nevaluation:\n  <<: *often\n  every: 5\n  path: held_out.jsonl\n"
    (here / "run.yaml").write_text(MINIMAL + text, encoding="utf-8")
    config = load_config("run.yaml")[0]
    assert config.evaluation is not None
    assert (config.checkpoint.every, config.evaluation.every) == (3, 5)


OFFLINE = [
    "--algorithm",
    "{name: dpo, prompts: 2}",
    "--prompts.responses",
    "[good, bad]",
    "--oracle.name",
    "recorded",
]
PLAYED = ["--oracle.name", "environment", "--sampling.environment", "game.py:Game"]
HELD_OUT = "{path: held_out.jsonl, oracle: exact_match}"

MISTAKES: dict[str, tuple[str, list[str], list[str]]] = {
    "unknown at the top": ("5e-4", ["--sed", "1"], ["--sed: ", "`sed`", "`seed`"]),
    "unknown in a section": (
        "learning_rate: 5e-4\n  learning_rte: 1",
        [],
        ["run.yaml:15: ", "`learner.learning_rte`", "`learning_rate`"],
    ),
    "unknown in a part": (
        "5e-4",
        ["--engine.max_row", "3"],
        ["--engine.max_row: ", "of torch", "`max_rows`"],
    ),
    "of another algorithm": (
        "5e-4",
        ["--algorithm.beta", "0.1"],
        ["--algorithm.beta: ", "of grpo", "read by dpo"],
    ),
    "unknown of an algorithm": ("5e-4", ["--algorithm.kl_cof", "0.1"], ["--algorithm.kl_cof: ", "`kl_coef`"]),
    "a dash for an underscore": (
        "5e-4",
        ["--learner.learning-rate", "1"],
        ["--learner.learning-rate", "`learning_rate`"],
    ),
    "unknown below a value": ("5e-4", ["--seed.a", "1"], ["--seed.a: ", "`seed`"]),
    "a number as a key": ("learning_rate: 5e-4\n  7: 1", [], ["run.yaml:15: ", "`learner.7`"]),
    "a number as a key of a part": ("5e-4\nengine:\n  7: 1", [], ["run.yaml:16: ", "`engine.7`"]),
    "no such algorithm": ("5e-4", ["--algorithm.name", "gpro"], ["--algorithm.name: ", "`grpo`"]),
    "no such engine": ("5e-4", ["--engine.name", "trch"], ["--engine.name: ", "`torch`"]),
    "no such explorer": ("5e-4", ["--explorer.name", "apl2"], ["--explorer.name: ", "none"]),
    "a router, of which there are none": (
        "5e-4",
        ["--router.name", "mine.py:function"],
        ["--router.name: ", "'mine.py:function'", "remove `router`", "mixture"],
    ),
    "a field of the section that there was": ("5e-4", ["--router.by", "x"], ["--router.by: ", "`router.by`"]),
    "an algorithm that is a function": (
        "5e-4",
        ["--algorithm.name", "mine.py:function"],
        ["mine.py:function", "Config", "Objective"],
    ),
    "an algorithm that is not there": ("5e-4", ["--algorithm.name", "mine.py:Min"], ["mine.py", "`Mine`"]),
    "an algorithm of no file": ("5e-4", ["--algorithm.name", "their.py:Mine"], ["their.py"]),
    "unread: labels with scores": ("5e-4", ["--oracle.labels", "bernoulli"], ["--oracle.labels: ", "grpo"]),
    "unread: a reference without a KL": ("5e-4", ["--model.reference", "x"], ["--model.reference: ", "grpo"]),
    "unread: a critic's rate without a critic": (
        "5e-4",
        ["--learner.critic_learning_rate", "1"],
        ["--learner.critic_learning_rate: "],
    ),
    "unread: a schedule's end without a schedule": (
        "5e-4",
        ["--learner.schedule_steps", "5"],
        ["--learner.schedule_steps: ", "remove it"],
    ),
    "ratios of greedy samples": (
        "5e-4",
        ["--sampling.temperature", "0"],
        ["--sampling.temperature: ", "above 0"],
    ),
    "ratios of old samples": (
        "5e-4",
        ["--oracle.max_outstanding", "3"],
        ["--oracle.max_outstanding: ", "to 0"],
    ),
    "a word for a number": ("5e-4", ["--stop.max_steps", "many"], ["--stop.max_steps: ", "'many'", "`int"]),
    "true for a number": ("5e-4", ["--seed", "true"], ["--seed: ", "True", "`int`"]),
    "a fraction for a count": ("5e-4", ["--stop.max_steps", "2.5"], ["--stop.max_steps: ", "2.5", "`int"]),
    "a date for a name": ("5e-4", ["--run_dir", "2024-01-01"], ["--run_dir: ", "`str`"]),
    "a string for a list": ("5e-4", ["--sampling.stop", "x"], ["--sampling.stop: ", "`array`"]),
    "no such choice": ("5e-4", ["--learner.schedule", "cosin"], ["--learner.schedule: ", "'cosin'"]),
    "a value for a section": ("5e-4", ["--learner", "3"], ["--learner: ", "fields of learner", "3"]),
    "a number for a section": ("5e-4", ["--render", "3"], ["--render: ", "expected fields of render, got 3"]),
    "a negative rate": ("-5e-4", [], ["run.yaml:14: ", "learner.learning_rate", ">= 0"]),
    "a rate that is not a number": (".nan", [], ["run.yaml:14: ", "learner.learning_rate", ">= 0"]),
    "a rate without end": (".inf", [], ["run.yaml:14: ", "learner.learning_rate"]),
    "a beta of one": ("5e-4", ["--learner.betas", "[0.9, 1.0]"], ["--learner.betas: ", "< 1"]),
    "three betas": ("5e-4", ["--learner.betas", "[0.9, 0.9, 0.9]"], ["--learner.betas: ", "length 2"]),
    "checkpoints every 0 steps": ("5e-4", ["--checkpoint.every", "0"], ["--checkpoint.every: ", ">= 1"]),
    "no checkpoint kept": ("5e-4", ["--checkpoint.keep_last", "0"], ["--checkpoint.keep_last: ", ">= 1"]),
    "no micro-batch": ("5e-4", ["--learner.micro_batch_size", "0"], ["--learner.micro_batch_size: ", ">= 1"]),
    "no thread": ("5e-4", ["--compute.threads", "0"], ["--compute.threads: ", ">= 1"]),
    "a nucleus of nothing": ("5e-4", ["--sampling.top_p", "0"], ["--sampling.top_p: ", "> 0"]),
    "no prompt a step": ("5e-4", ["--algorithm.prompts", "0"], ["--algorithm.prompts: ", "at least 1"]),
    "no mini-batch": ("5e-4", ["--algorithm.minibatches", "0"], ["--algorithm.minibatches: ", "at least 1"]),
    "a group of one": (
        "5e-4",
        ["--algorithm.samples", "1"],
        ["--algorithm.samples: ", "algorithm.samples is 1", "at least 2"],
    ),
    "an evaluation of nothing": (
        "5e-4",
        ["--evaluation", "{path: train.jsonl, samples: 0, greedy: false}"],
        ["--evaluation: ", "evaluation.samples"],
    ),
    "no end but queries, of recorded answers": (
        "5e-4",
        [*OFFLINE, "--stop", "{max_queries: 5}"],
        ["--stop: ", "stop.max_queries", "recorded costs nothing"],
    ),
    "no end but queries, of a game": (
        "5e-4",
        [*PLAYED, "--stop", "{max_queries: 5}"],
        ["--stop: ", "stop.max_queries", "environment costs nothing"],
    ),
    "queries that nobody spends": (
        "5e-4",
        [*OFFLINE, "--stop.max_queries", "5"],
        ["--stop.max_queries: ", "set stop.max_steps"],
    ),
    "no end": ("5e-4", [*PLAYED, "--stop", "{}"], ["--stop: ", "never end; set it, stop.max_hours or"]),
    "no end of priced answers": (
        "5e-4",
        ["--stop", "{}"],
        ["--stop: ", "never end; set it, stop.max_queries, stop.max_hours or"],
    ),
    "answers that nobody reads": (
        "5e-4",
        ["--algorithm", "{name: sft, prompts: 2}"],
        ["--algorithm: ", "exact_match", "set algorithm.threshold"],
    ),
    "answers about recorded responses that nobody reads": (
        "5e-4",
        ["--algorithm", "{name: sft, prompts: 2}", "--prompts.responses", "[good]"],
        ["--algorithm: ", "oracle.name recorded", "evaluation.oracle"],
    ),
    "more samples than are recorded": (
        "5e-4",
        [*OFFLINE, "--algorithm.samples", "7"],
        ["--algorithm.samples: ", "is 7", "names 2", "remove it"],
    ),
    "unread: a temperature without samples": (
        "5e-4",
        [*OFFLINE, "--sampling.temperature", "0.3"],
        ["--sampling.temperature: ", "nothing reads"],
    ),
    **{
        f"unread: {field} of recorded answers": (
            "5e-4",
            [*OFFLINE, f"--{field}", value],
            [f"--{field}: ", "nothing reads"],
        )
        for field, value in {
            "oracle.max_outstanding": "4",
            "oracle.max_answer_age": "2",
            "oracle.max_wait_s": "5",
            "oracle.deadline_s": "5",
            "learner.sync_every": "2",
        }.items()
    },
    "unread: a stop string without samples": (
        "5e-4",
        [*OFFLINE, "--sampling.stop", "[x]"],
        ["--sampling.stop: ", "nothing reads"],
    ),
    "unread: top-k of greedy responses": (
        "5e-4",
        [*OFFLINE, "--evaluation", HELD_OUT, "--evaluation.samples", "0", "--sampling.top_k", "4"],
        ["--sampling.top_k: ", "nothing reads"],
    ),
    "recorded answers about new responses": (
        "5e-4",
        [*OFFLINE, "--evaluation", "{path: held_out.jsonl}"],
        ["--evaluation: ", "evaluation.oracle", "name an oracle"],
    ),
    "four to compare": (
        "5e-4",
        ["--algorithm", "{name: dpo, prompts: 2, samples: 4}"],
        ["--algorithm: ", "samples is 4", "not 4; give 2"],
    ),
    "one recorded to compare": (
        "5e-4",
        [*OFFLINE, "--prompts.responses", "[good]"],
        ["--prompts.responses: ", "not 1; give 2"],
    ),
    "three recorded to compare": (
        "5e-4",
        [*OFFLINE, "--prompts.responses", "[a, b, c]"],
        ["--prompts.responses: ", "not 3; give 2"],
    ),
    "an explorer of recorded responses": (
        "5e-4",
        [*OFFLINE, "--explorer.name", "mine.py:Curious"],
        ["--explorer.name: ", "needs policy", "remove"],
    ),
    "more responses than are recorded": (
        "5e-4",
        [*OFFLINE, "--explorer.name", "mine.py:Wide"],
        [
            "--explorer.name: ",
            "it wants {'sampler': 6} responses a prompt instead of {'sampler': 2}",
            "let its widen leave samples",
        ],
    ),
    "an empty stop string": (
        "5e-4",
        ["--sampling.stop", '["x", ""]'],
        ["--sampling.stop: ", "sampling.stop", "length >= 1"],
    ),
    "no end of a KL": ("5e-4", ["--algorithm.kl_coef", ".inf"], ["algorithm.kl_coef is inf", "finite"]),
    "a shorter maximum than a response": (
        "5e-4",
        ["--algorithm.name", "dr_grpo", "--algorithm.max_length", "7"],
        ["--algorithm.max_length: ", "is 7", "sampling.max_new_tokens 8"],
    ),
    "no maximum of an episode": (
        "5e-4",
        [*PLAYED, "--algorithm.name", "dr_grpo"],
        ["run.yaml:9: ", "set algorithm.max_length", "episode"],
    ),
    "missing in a section": (
        "5e-4\nevaluation: {every: 3}",
        [],
        ["run.yaml:15: ", "evaluation.path is not set: name prompts"],
    ),
    "missing of an algorithm": (
        "5e-4",
        ["--algorithm", "{prompts: 3}"],
        ["--algorithm: ", "`algorithm.name`", "missing"],
    ),
    "twice": ("5e-4\nseed: 1\nseed: 2", [], ["run.yaml:16: ", "`seed`", "twice"]),
    "twice in a section": (
        "learning_rate: 5e-4\n  learning_rate: 1",
        [],
        ["run.yaml:15: ", "`learner.learning_rate`", "twice"],
    ),
    "not YAML": (
        "[5e-4",
        [],
        ["run.yaml:15: this is not YAML: while parsing a flow sequence (from line 14): expected ',' or ']'"],
    ),
    "a tab": ("5e-4\n\tseed: 1", [], ["run.yaml:15: ", "not YAML", "cannot start any token"]),
    "a control character": ("5e-4\nseed: \a", [], ["run.yaml:15: ", "not YAML", r"the character '\x07'"]),
    "code in YAML": ("!!python/object/apply:os.getcwd []", [], ["run.yaml:14: ", "not YAML", "os.getcwd"]),
    "a section inside itself": ("5e-4\nrender: &r {template: *r}", [], ["run.yaml", "not YAML"]),
    "two documents": ("5e-4\n---\nseed: 1", [], ["run.yaml:15: ", "not YAML", "single document"]),
    "a day that no calendar has": ("5e-4\nrender: {date: 2024-02-30}", [], ["run.yaml: ", "not YAML", "day"]),
    "a flag without a value": ("5e-4", ["--seed"], ["--seed: ", "True", "`int`"]),
    "a word that is no flag": ("5e-4", ["seed", "3"], ["'seed'", "not a flag"]),
    "a flag that is not YAML": ("5e-4", ["--seed", "[1"], ["--seed: ", "'[1'"]),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message(
    here: Path, capsys: pytest.CaptureFixture[str], mistake: tuple[str, list[str], list[str]]
) -> None:
    rate, flags, words = mistake
    (here / "run.yaml").write_text(
        MINIMAL.replace("5e-4", rate)
        if "learning_rate:" not in rate
        else MINIMAL.replace("learning_rate: 5e-4", rate)
    )
    before = set(here.iterdir())
    assert oat("train", "run.yaml", *flags) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("oat train: ")
    assert "Traceback" not in printed.err
    assert [word for word in words if word not in printed.err] == [], printed.err
    assert {entry for entry in here.iterdir() if entry.name != "__pycache__"} == before, (
        "a refused configuration leaves nothing behind"
    )


def test_defaults_that_follow_from_other_settings(here: Path) -> None:
    dr_grpo = ["--algorithm.name", "dr_grpo"]
    assert resolved("run.yaml", *dr_grpo).algorithm.options["max_length"] == 8
    assert (
        resolved("run.yaml", *dr_grpo, "--sampling.max_new_tokens", "5").algorithm.options["max_length"] == 5
    )
    assert (
        resolved("run.yaml", *dr_grpo, "--algorithm.max_length", "20").algorithm.options["max_length"] == 20
    )
    assert (
        resolved("run.yaml", *dr_grpo, *PLAYED, "--algorithm.max_length", "2").algorithm.options["max_length"]
        == 2
    )
    assert resolved("run.yaml", *OFFLINE).algorithm.options["samples"] == 2
    assert (
        resolved("run.yaml", *OFFLINE, "--algorithm", "{name: sft, prompts: 2}").algorithm.options["samples"]
        == 2
    )
    assert (
        resolved(
            "run.yaml", *OFFLINE, "--prompts.responses", "[a, b, c]", "--algorithm.name", "sft"
        ).algorithm.options["samples"]
        == 3
    )


@pytest.mark.parametrize(
    "flags",
    [
        [*OFFLINE, "--algorithm.samples", "2"],
        [*OFFLINE, "--evaluation", HELD_OUT, "--sampling.temperature", "0.3", "--sampling.stop", "[x]"],
        [*OFFLINE, "--evaluation", HELD_OUT, "--evaluation.samples", "0", "--sampling.stop", "[x]"],
        [*PLAYED, "--algorithm", "{name: sft, prompts: 2}"],
        ["--algorithm", "{name: sft, prompts: 2, threshold: 1}", "--stop", "{max_queries: 5}"],
    ],
)
def test_neighbours_of_what_is_refused(here: Path, flags: list[str]) -> None:
    config = resolved("run.yaml", *flags)
    (here / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert resolved("again.yaml") == config


def test_a_top_level_without_sections(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, words in {"- a\n": "got list", "word\n": "got str", "": "`model.path` is missing"}.items():
        (here / "run.yaml").write_text(text, encoding="utf-8")
        assert oat("train", "run.yaml") == 2
        assert words in capsys.readouterr().err


def test_a_file_that_cannot_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.yaml").write_bytes(b"seed: \xff\n")
    for name in ("run.yaml", "absent.yaml", "."):
        assert oat("train", name) == 2
        assert f"oat train: {name}: the configuration cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model", "prompts", "oracle", "algorithm", "stop"])
def test_a_required_section_is_asked_for(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    tree = yaml.safe_load(MINIMAL)
    del tree[name]
    (here / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert oat("train", "run.yaml") == 2
    error = capsys.readouterr().err
    field = {
        "model": "model.path",
        "prompts": "prompts.path",
        "oracle": "oracle.name",
        "algorithm": "algorithm.name",
    }.get(name)
    missing = f"run.yaml: the field `{field}` is missing; add it, or pass --{field}\n"
    assert error == "oat train: " + (
        missing
        if field
        else (
            "run.yaml: stop.max_steps is not set: the run would never end; set it, stop.max_queries, "
            "stop.max_hours or prompts.epochs\n"
        )
    )
    (here / "run.yaml").write_text(yaml.safe_dump({**tree, name: None}), encoding="utf-8")
    assert oat("train", "run.yaml") == 2
    empty = capsys.readouterr().err
    assert re.sub(r"run.yaml:\d+", "run.yaml", empty) == error, "an empty section is as a missing one"
    assert empty != error


def test_a_section_that_needs_no_field_may_be_empty_or_missing(here: Path) -> None:
    tree = yaml.safe_load(MINIMAL)
    del tree["stop"]
    (here / "run.yaml").write_text(
        yaml.safe_dump({**tree, "render": None, "prompts": {"path": "train.jsonl", "epochs": 2}}),
        encoding="utf-8",
    )
    assert resolved("run.yaml").prompts.epochs == 2


@pytest.mark.parametrize("section", [{"name": "one"}, {}, None, "one"])
def test_the_router_of_an_older_configuration_is_read_and_left_out(here: Path, section: Any) -> None:
    """There was one, and every configuration of a run has it."""
    without = resolved("run.yaml")
    assert resolved("run.yaml", "--router.name", "one") == without
    (here / "run.yaml").write_text(yaml.safe_dump({**yaml.safe_load(MINIMAL), "router": section}))
    assert resolved("run.yaml") == without
    assert "router" not in to_yaml(without)


@pytest.mark.parametrize("field", ["path", "reference"])
def test_a_model_beside_the_configuration_is_found_without_the_hub(here: Path, field: str) -> None:
    """`org/name` could be one of the hub, which is asked for seconds where there is no network."""
    (here / "below" / "start" / "one").mkdir(parents=True)
    changed = MINIMAL.replace(
        "  path: models/tiny",
        "  path: start/one" if field == "path" else "  path: models/tiny\n  reference: start/one",
    )
    (here / "below" / "run.yaml").write_text(changed)
    with pytest.raises(ModelError) as refused:
        resolved("below/run.yaml")
    line = 2 if field == "path" else 3
    assert str(refused.value) == (
        f"below/run.yaml:{line}: model.{field} is 'start/one': there is no directory start/one in {here}; "
        "there is below/start/one, and paths are "
        "taken from the working directory, not from the configuration's folder: give that path"
    )


@pytest.mark.parametrize("path", ["a/b/c", "./a", "/a/b", "../a", "a", "a/"])
def test_what_is_no_hub_id_is_not_asked_for(here: Path, path: str) -> None:
    with pytest.raises(
        ModelError, match=r"there is no directory .*, and it is no hub id; give a local directory"
    ):
        load_tokenizer(path)


def test_a_start_that_fails_can_be_mended_and_repeated(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a failed start left in the run directory does not stand in the way of the next; anything else
    does."""
    config = world.config(
        "dpo", tmp_path, {"stop.max_steps": 1, "evaluation.path": str(tmp_path / "absent.jsonl")}
    )
    assert oat("train", config) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    assert oat("train", config, "--evaluation", "null") == 0
    (tmp_path / "dpo" / "config.yaml").unlink()
    assert oat("train", config, "--evaluation", "null") == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_dir_that_is_a_file(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("dpo", tmp_path)
    assert oat("train", config, "--run_dir", config) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_flag_alone_is_true_and_serialise_is_short(here: Path) -> None:
    assert resolved("run.yaml", "--serialise").compute.serialise
    assert resolved("run.yaml", "--compute.serialise", "--seed", "3").compute.serialise
    assert not resolved("run.yaml", "--serialise", "false").compute.serialise
