"""Mistakes in a configuration, and the messages that refuse them."""

import re
from pathlib import Path

import pytest
import yaml
from configurations import MINIMAL, OFFLINE, PLAYED, resolved
from fixtures import oat

from oat.config.load import to_yaml
from oat.errors import ModelError
from oat.models.loading import load_tokenizer

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


@pytest.mark.parametrize("path", ["a/b/c", "./a", "/a/b", "../a", "a", "a/"])
def test_what_is_no_hub_id_is_not_asked_for(here: Path, path: str) -> None:
    with pytest.raises(
        ModelError, match=r"there is no directory .*, and it is no hub id; give a local directory"
    ):
        load_tokenizer(path)
