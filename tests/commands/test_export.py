"""The results of a run: its exported model, and its digest."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fixtures import Finished, World, damage_metrics, logged, made, oat
from transformers import AutoModelForCausalLM, AutoTokenizer

from oat.answering.learned import about_run
from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.errors import OatWarning
from oat.reports.model_card import model_card
from oat.resolve.resolve import resolve
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.provenance import command_line


@pytest.fixture(scope="module")
def run_dir(finished: Finished) -> Path:
    """Return a finished run of DPO. Tests must not change it."""
    return finished.only_read("dpo")


def test_transformers_loads_the_trained_policy(
    run_dir: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers loads an exported model and gives the log-probabilities of the engine with the run's
    newest weights. These differ from those of the start model."""
    assert oat("export", run_dir, tmp_path / "model") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"oat export: the model after 4 steps is in {tmp_path / 'model'}"
    assert "12 tensors equal" in second
    said = f"This model was {second.removeprefix('oat export: ')}."
    assert said in (tmp_path / "model" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(world.folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    sequences = [
        np.array(tokenizer("3+4=ab")["input_ids"], dtype=np.int32),
        np.array(tokenizer("0+0=aabb12")["input_ids"], dtype=np.int32),
    ]

    config = resolve(load_config(run_dir / "config.yaml")[0], {})
    run = build(config, directory=made(tmp_path / "built"))
    found = Checkpoints(run_dir / "checkpoints", every=1, keep_last=1).load()
    assert found is not None
    run.parts["learner"].load_state(
        {name.removeprefix("learner/"): tensor for name, tensor in found[1].items()} | found[2]["learner"]
    )
    run.weights.push("policy", 4, run.learner)
    engine: Any = run.collector.actor.engine  # type: ignore[attr-defined]
    for ids, ours in zip(sequences, engine.logps(sequences, "policy"), strict=True):
        with torch.no_grad():
            theirs, before = (
                m(torch.from_numpy(ids[None]).long()).logits.log_softmax(-1)[0, :-1] for m in (model, start)
            )
        next_ids = torch.from_numpy(ids[1:]).long()[:, None]
        np.testing.assert_allclose(ours, theirs.gather(1, next_ids)[:, 0].numpy(), atol=1e-5)
        assert np.abs(ours - before.gather(1, next_ids)[:, 0].numpy()).max() > 1e-3
    run.ledger.close()


def test_the_model_card(run_dir: Path, world: World, tmp_path: Path) -> None:
    """The card of an exported model has the number of questions to each oracle, the numbers of the curve, and
    a configuration that runs again. It names no path of the machine."""
    assert oat("export", run_dir, tmp_path / "model") == 0
    card = (tmp_path / "model" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["oat", "dpo"],
    }
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    queries = int(rows[-1]["oracle/queries"])
    assert (
        f"* Oracle `reward.py:reward/preferences`, in training: {queries} queries in 16 questions\n" in text
    )
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert [line[0] for line in table] == ["step", "---", "0", "2", "4"], "those of evaluations"
    place = table[0].index("eval/sampled")
    assert [float(line[place]) for line in table[2:]] == pytest.approx(
        [rows[step]["eval/sampled"] for step in (0, 2, 4)], rel=1e-3
    )
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown["algorithm"] == stored["algorithm"]
    assert shown["prompts"]["path"] == "train.jsonl"
    assert 'from_pretrained("model")' in text
    assert "* torch " in text
    for private in (world.folder, run_dir, tmp_path):
        assert str(private) not in card
    of_hub = replace(about_run(run_dir), model="org/name")
    for what, relation in {"policy": "finetune", "adapter": "adapter"}.items():
        card = model_card(run_dir, of_hub, 4, tmp_path / "model", what=what)
        front = yaml.safe_load(card.split("---\n", 2)[1])
        assert (front["base_model"], front["base_model_relation"]) == ("org/name", relation)
    assert 'base = "org/name"\n' in card


API = """
class Api:
    answers, durable = "score", False

    def __init__(self, api_key, folder):
        self.asked = []

    def submit(self, questions):
        self.asked += questions
        return [str(question.key) for question in questions]

    def collect(self, tickets, seconds):
        from oat.types import Answer
        asked, self.asked = self.asked, []
        return [(str(q.key), Answer(q.key, (1.0,) * q.size, ("ok",) * q.size, q.size)) for q in asked]
"""


def test_the_model_card_tells_no_secret(world: World, tmp_path: Path) -> None:
    (tmp_path / "api.py").write_text(API)
    oracle = {"name": f"{tmp_path / 'api.py'}:Api", "api_key": "sk-123", "folder": str(tmp_path / "x")}
    config = world.config(
        "grpo",
        tmp_path,
        {"oracle": oracle, "evaluation.oracle": {**oracle, "folder": "y"}, "stop.max_steps": 1},
    )
    assert oat("train", config) == 0
    assert oat("export", tmp_path / "grpo", tmp_path / "model") == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "sk-123" not in card
    assert str(tmp_path) not in card
    assert "api_key: '***'" in card
    assert command_line(["oat", "train", "--oracle", "{name: a, api_key: sk-123}"]) == [
        "oat",
        "train",
        "--oracle",
        "{name: a, api_key: ***}",
    ]


def test_an_exported_model_starts_another_run(run_dir: Path, world: World, tmp_path: Path) -> None:
    """A run begins with an exported model. Its evaluation at step 0 equals the last evaluation of the
    exported run."""
    assert oat("export", run_dir, tmp_path / "model") == 0
    config = world.config("dpo", tmp_path, {"model.path": str(tmp_path / "model"), "stop.max_steps": 1})
    assert logged(tmp_path / "log", "train", config) == 0
    first = json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert [first[name] for name in ("eval/sampled", "eval/greedy")] == [
        last[name] for name in ("eval/sampled", "eval/greedy")
    ]


def test_an_export_overwrites_neither_a_file_nor_the_start(
    run_dir: Path, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    start = {file.name: file.read_bytes() for file in (world.folder / "model").iterdir()}
    for out, words in {
        tmp_path / "file": "is a file",
        world.folder / "model": "the model that the run started from",
    }.items():
        assert oat("export", run_dir, out) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert {file.name: file.read_bytes() for file in (world.folder / "model").iterdir()} == start


def test_the_digest_of_a_run(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The digest of a run has five hashes. Each depends on its own part of the run, and none on the place or
    the clock."""
    assert oat("digest", run_dir) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert list(printed) == ["weights", "optimiser", "state", "metrics", "ledger"]
    assert all(len(value) == 64 for value in printed.values())

    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[1]["time/step_s"] = 99.0
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert digest_run(copy) == printed
    lines[1]["loss/total"] += 1e-12
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {name for name, value in digest_run(copy).items() if value != printed[name]} == {"metrics"}

    found = Checkpoints(copy / "checkpoints", every=1, keep_last=2).load()
    assert found is not None
    step, tensors, state = found
    for prefix, part in {
        "learner/policy/weights/": "weights",
        "learner/policy/moments/exp_avg/": "optimiser",
    }.items():
        name = next(name for name in tensors if name.startswith(prefix))
        changed = {**tensors, name: tensors[name] * (1 + 1e-6)}
        Checkpoints(copy / "checkpoints", every=1, keep_last=2, background=False).save(step, changed, state)
        assert {name for name, value in digest_run(copy).items() if value != printed[name]} == {
            part,
            "metrics",
        }
    Checkpoints(copy / "checkpoints", every=1, keep_last=2, background=False).save(
        step, tensors, {**state, "prompts": {"taken": 0}}
    )
    assert {name for name, value in digest_run(copy).items() if value != printed[name]} == {
        "state",
        "metrics",
    }


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({1: b"x", 2: None}, "line 2 cannot be read as metrics, and there is no row of steps 1 to 2"),
        ({4: None}, "there is no row of step 4"),
        ({3: b"\xff\xfe"}, "line 4 cannot be read as metrics, and there is no row of step 3"),
        ({0: None, 1: None, 2: None, 3: None, 4: None}, "there is no row of steps 0 to 4"),
    ],
    ids=["a damaged and a deleted row", "the last row", "bytes that are no text", "nothing left"],
)
def test_a_digest_of_damaged_metrics_is_one_message(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: dict[int, bytes | None],
    said: str,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    damage_metrics(copy, lines)
    assert oat("digest", copy) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 1)
    assert f"{copy / 'metrics.jsonl'}: {said}; no hash could say" in found.err


def test_a_row_that_is_still_being_written_is_left_out_of_a_digest(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert digest_run(copy) == digest_run(run_dir)


def test_the_card_of_a_run_with_deleted_rows_has_the_numbers_of_the_others(
    run_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    damage_metrics(copy, {1: None})
    with pytest.warns(OatWarning, match="there is no row of step 1; the others are read"):
        assert oat("export", copy, tmp_path / "out") == 0
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[4])
    assert f"| 4 | {row['eval/sampled']:,.4g} |" in (tmp_path / "out" / "README.md").read_text()


def test_what_has_no_digest_and_no_model(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["digest", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        assert oat(*command) == 2
        assert "holds no run" in capsys.readouterr().err
    for name in ("metrics.jsonl", "ledger.sqlite"):
        shutil.copytree(run_dir, tmp_path / f"without {name}")
        (tmp_path / f"without {name}" / name).unlink()
        assert oat("digest", tmp_path / f"without {name}") == 2
        assert f"{name} is missing" in capsys.readouterr().err
        assert not (tmp_path / f"without {name}" / name).exists()
    shutil.copytree(run_dir, tmp_path / "young")
    shutil.rmtree(tmp_path / "young" / "checkpoints")
    for command in (["digest", tmp_path / "young"], ["export", tmp_path / "young", tmp_path / "out"]):
        assert oat(*command) == 1
        assert "has no checkpoint yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
