"""Reward models are trained, saved and used as oracle, from recorded pairs and online."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import ALPHABET, NO_BITSANDBYTES, World, forked, kill_at, make_model, oat, write_jsonl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from oat.algorithms.reward_model import RewardModelConfig, calibration_error
from oat.commands.export import export_run
from oat.config.load import load_config
from oat.errors import ConfigError
from oat.learner.learner import Learner
from oat.loop import restore
from oat.models.scoring import Scorer
from oat.opening.open_run import open_run
from oat.oracles.make import build_oracle
from oat.resolve.resolve import resolve
from oat.types import Message

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + eos_token + '\n' }}{% endfor %}{% if "
    "add_generation_prompt %}a={% endif %}"
)


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return recorded pairs. The better response has more letters a, and the difference of these counts is
    the margin."""
    generator, records = random.Random(seed), []
    while len(records) < count:
        texts = ["".join(generator.choice("ab") for _ in range(generator.randint(1, 6))) for _ in range(2)]
        better, worse = sorted(texts, key=lambda text: -text.count("a"))
        if better.count("a") > worse.count("a"):
            prompt = f"{generator.randrange(10)}+{generator.randrange(10)}="
            records.append(
                {
                    "prompt": prompt,
                    "chosen": better,
                    "rejected": worse,
                    "gap": better.count("a") - worse.count("a"),
                }
            )
    return records


def offline(world: World, folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Return the configuration of a run of four steps on recorded pairs."""
    data = {
        "prompts.path": str(write_jsonl(folder / "pairs.jsonl", pairs(40))),
        "prompts.reference_key": None,
        "oracle": {"name": "recorded"},
    }
    common = {"algorithm": {"name": "reward_model", "prompts": 8}, "evaluation": None}
    return world.config("reward_model", folder, {**data, **common, **(changes or {})})


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def chat_model(folder: Path) -> str:
    """Save a model whose template writes a line break after every turn. Return its path."""
    make_model(folder, tokens=[*ALPHABET, *"us\n"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def learned_scores(config: Path) -> tuple[list[tuple[str, str]], list[float]]:
    """Return prompts with chosen responses, and their scores by the learner of a run that has ended."""
    with open_run(resolve(*load_config(config))) as run:
        restore(run)
        groups = run.collector.actor.sample(run.collector.prompts.take(20), {}, ())
        rows = [group.trajectories[0] for group in groups]
        found = run.learner.forward("reward", rows, {"score"})["score"].tolist()
    return [
        (group.prompt.messages[0].content, row.text) for group, row in zip(groups, rows, strict=True)
    ], found


@pytest.mark.sample("an adapter beside four bits", seconds=2.2)
@pytest.mark.parametrize("case", ["plain", "a chat", "an adapter", "an adapter beside four bits"])
@pytest.mark.inventory(112)
def test_what_is_exported_scores_as_the_learner_does(world: World, tmp_path: Path, case: str) -> None:
    """An exported reward model gives the learner's scores through transformers alone, through `Scorer` and
    through the oracle. In one case the template writes text after the response."""
    changes: dict[str, Any] = {"model.lora": {"rank": 2}} if case.startswith("an adapter") else {}
    if "four bits" in case:
        pytest.importorskip("bitsandbytes", reason=NO_BITSANDBYTES)
        changes["model.quantize"] = "nf4"
    if case == "a chat":
        changes = {"model.path": chat_model(tmp_path / "chat"), "render.template": "tokenizer"}
    config = offline(world, tmp_path, changes)
    assert oat("train", config) == 0
    assert oat("export", tmp_path / "reward_model", tmp_path / "out") == 0
    texts, scores = learned_scores(config)
    expected = torch.tensor(scores)
    assert expected.std() > 0
    scorer = Scorer(str(tmp_path / "out"))
    rows = [scorer.encode([Message("user", prompt)], response) for prompt, response in texts]
    torch.testing.assert_close(torch.tensor(scorer.score(rows)), expected, rtol=0, atol=1e-5)
    module, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    for (prompt, response), score in list(zip(texts, scores, strict=True))[:5]:
        if case == "a chat":
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        else:
            ids = tokenizer(prompt + response + tokenizer.eos_token)["input_ids"]
        with torch.no_grad():
            assert module(input_ids=torch.tensor([ids])).logits.item() == pytest.approx(score, abs=1e-5)
    assert (module.config.num_labels, module.config.pad_token_id) == (1, 0)
    assert "oracle: {name: reward_model, path: out}" in (tmp_path / "out" / "README.md").read_text()
    assert build_oracle("reward_model", {"path": str(tmp_path / "out")}).answers == "score"


def test_a_pad_that_ends_rows_is_not_exported(world: World, tmp_path: Path) -> None:
    """The padding token is also the end of text, so transformers would score the token before the end. The
    export has no padding token, and transformers refuses batches."""
    tokenizer = AutoTokenizer.from_pretrained(world.folder / "model")
    make_model(tmp_path / "model")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "model")
    assert (
        oat("train", offline(world, tmp_path, {"model.path": str(tmp_path / "model"), "stop.max_steps": 1}))
        == 0
    )
    export_run(tmp_path / "reward_model", tmp_path / "out")
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="no padding token"):
        module(input_ids=torch.ones(2, 3, dtype=torch.long))


def test_an_online_run_learns_from_whoever_compares(world: World, tmp_path: Path) -> None:
    """An online run trains a reward model on compared responses of the policy. The policy itself does not
    change."""
    changes = {
        "evaluation": None,
        "algorithm": {"name": "reward_model", "prompts": 4, "samples": 2},
        "compute.serialise": True,
    }
    assert oat("train", world.config("reward_model", tmp_path, changes)) == 0
    rows = rows_of(tmp_path / "reward_model")
    assert all(
        row["loss/reward"] > 0 and row["optim/grad_norm"] > 0 for row in rows[1:] if row["rows/trained"]
    )
    assert rows[-1]["optim/steps"] == sum(row["rows/trained"] > 0 for row in rows[1:])
    oat("export", tmp_path / "reward_model", tmp_path / "out")
    assert build_oracle("reward_model", {"path": str(tmp_path / "out")}).scorer.label == 0


def test_pairs_of_a_ledger_are_learned_again(world: World, tmp_path: Path) -> None:
    """A run trains a reward model on the exported questions and answers of a dpo run."""
    assert oat("train", world.config("dpo", tmp_path, {"evaluation": None})) == 0
    assert oat("ledger", tmp_path / "dpo", "--export", tmp_path / "answers.jsonl") == 0
    changes = {
        "prompts.path": str(tmp_path / "answers.jsonl"),
        "prompts.on_bad_record": "skip",
        "algorithm.prompts": 4,
        "stop.max_steps": 1,
    }
    assert oat("train", offline(world, tmp_path, changes)) == 0
    assert rows_of(tmp_path / "reward_model")[-1]["rows/trained"] > 0


def test_held_out_prompts_are_measured_and_never_learned(world: World, tmp_path: Path) -> None:
    share = {"algorithm": {"name": "reward_model", "prompts": 40, "held_out": 0.3}, "stop.max_steps": 3}
    assert oat("train", offline(world, tmp_path, share)) == 0
    rows = rows_of(tmp_path / "reward_model")[1:]
    held = [row["pairs/held_out"] for row in rows]
    assert 4 < held[0] < 20
    assert held == [held[0]] * 3  # the same prompts in every pass
    assert all(row["rows/trained"] == 2 * (40 - row["pairs/held_out"]) for row in rows)
    assert all(
        0 <= row["pairs/held_out_accuracy"] <= 1 and 0 <= row["pairs/held_out_brier"] <= 1 for row in rows
    )
    assert all(0 <= row["pairs/held_out_ece"] <= 1 for row in rows)


def test_the_calibration_error_by_hand() -> None:
    """There are two bins. The bin of 0.62 and 0.64 has one right prediction of two: gap 0.63 - 0.5, weight
    2/3. The bin of 0.9 has a right one: gap 0.1, weight 1/3. A tie counts as half right."""
    confidence, right = torch.tensor([0.62, 0.9, 0.64]), torch.tensor([1.0, 1.0, 0.0])
    assert calibration_error(confidence, right) == pytest.approx(2 / 3 * 0.13 + 1 / 3 * 0.1, abs=1e-6)
    assert calibration_error(torch.tensor([0.5, 1.0]), torch.tensor([0.5, 1.0])) == 0.0
    assert calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])) == pytest.approx(0.5)


def test_a_margin_is_read_from_its_column(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A margin per pair is read from a column. The first scores are near 0, so the loss is about the mean of
    log(1 + e^margin)."""
    options = {"algorithm": {"name": "reward_model", "prompts": 40, "margin_key": "gap"}, "stop.max_steps": 1}
    assert oat("train", offline(world, tmp_path, options)) == 0
    expected = np.mean([np.log1p(np.exp(record["gap"])) for record in pairs(40)])
    assert rows_of(tmp_path / "reward_model")[1]["loss/reward"] == pytest.approx(expected, abs=0.2)
    options["algorithm"] = {**options["algorithm"], "margin_key": "chosen"}  # type: ignore[dict-item]
    assert oat("train", offline(world, tmp_path, {**options, "run_dir": str(tmp_path / "wrong")})) == 2
    assert (
        "pairs.jsonl:1: field 'chosen': expected a number (algorithm.margin_key), got"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "wrong" / "metrics.jsonl").exists(), "before any step"


def test_margins_of_a_csv_are_numbers_and_records_without_one_are_malformed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = pairs(40)
    lines = [
        f"{r['prompt']},{r['chosen']},{r['rejected']},{r['gap'] if n % 4 else 'much'}"
        for n, r in enumerate(records)
    ]
    (tmp_path / "pairs.csv").write_text("\n".join(["prompt,chosen,rejected,gap", *lines]) + "\n")
    options = {"algorithm": {"name": "reward_model", "prompts": 30, "margin_key": "gap"}, "stop.max_steps": 1}
    config = offline(world, tmp_path, options | {"prompts.path": str(tmp_path / "pairs.csv")})
    assert oat("check", config) == 2
    assert (
        "pairs.csv:2: field 'gap': expected a number (algorithm.margin_key), got 'much'; mend"
        in capsys.readouterr().err
    )
    assert oat("train", config, "--prompts.on_bad_record", "skip") == 0
    expected = np.mean([np.log1p(np.exp(record["gap"])) for n, record in enumerate(records) if n % 4])
    assert rows_of(tmp_path / "reward_model")[1]["loss/reward"] == pytest.approx(expected, abs=0.2)
    config = offline(world, tmp_path, options | {"algorithm.margin_key": "gasp"})
    assert oat("check", config) == 2
    assert (
        "pairs.jsonl:1: field 'gasp': expected in every record, got none; set `algorithm.margin_key` or add"
    ) in capsys.readouterr().err


@pytest.mark.slow(instead="tests/faults/test_state.py walks over a reward model", seconds=1.6)
def test_a_killed_run_ends_as_the_unbroken_one(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = offline(world, tmp_path, {"checkpoint.every": 1, "algorithm.held_out": 0.2})
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    assert oat("train", config, "--run_dir", unbroken) == 0

    def interrupted() -> int:
        kill_at(Learner, "update", 3)
        return oat("train", config, "--run_dir", killed)

    assert forked(interrupted, tmp_path / "log") == -9
    assert oat("train", config, "--run_dir", killed) == 0
    capsys.readouterr()
    digests = []
    for run_dir in (unbroken, killed):
        assert oat("digest", run_dir) == 0
        digests.append(capsys.readouterr().out.replace(str(run_dir), ""))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"evaluation": {"path": "held_out.jsonl", "oracle": "exact_match"}},
            "its policy does not learn, so an evaluation",
        ),
        ({"render.template": "tokenizer", "render.system": "s"}, "nobody would put it before them later"),
        ({"learner.sync_every": 2}, "nothing reads learner.sync_every"),
    ],
)
def test_settings_that_contradict_it_are_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], what: str
) -> None:
    assert oat("train", offline(world, tmp_path, changes)) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [{"samples": 1}, {"centring": -1.0}, {"centring": float("inf")}, {"held_out": 1.0}, {"held_out": -0.1}],
)
def test_options_out_of_bounds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(options))} is"):
        RewardModelConfig(**options)


def test_what_cannot_be_saved_is_refused_before_anything_is_learned(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oat.models.sequence_classifier.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    assert oat("train", offline(world, tmp_path)) == 2
    assert "a `llama` has no sequence-classification form" in capsys.readouterr().err


@pytest.mark.slow(instead="test_what_is_exported_scores_as_the_learner_does", seconds=1.2)
def test_neither_its_adapter_nor_its_policy_is_handed_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, asked = tmp_path / "reward_model", world.config("grpo", tmp_path)
    assert oat("train", offline(world, tmp_path, {"stop.max_steps": 1, "model.lora": {"rank": 2}})) == 0
    assert oat("export", run_dir, tmp_path / "out", "--adapter") == 2
    assert "leave --adapter out" in capsys.readouterr().err
    assert oat("train", asked) == 0
    assert oat("eval", tmp_path / "grpo", "--against", run_dir) == 2
    assert "trained a reward model" in capsys.readouterr().err
