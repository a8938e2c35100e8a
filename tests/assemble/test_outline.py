"""The output of `oat check` is compared with the run itself. The command is cheap and changes nothing."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fixtures import World, checked, forked, oat
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oat.assemble.run_inputs import gather_inputs
from oat.cli.entry import COMMANDS, main
from oat.commands.show_tokens import _quoted
from oat.config.load import dump, load_config
from oat.forecast.estimate import SURE, estimate, lengths_of
from oat.hardware.memory import free_memory
from oat.opening.open_run import outlined
from oat.resolve.resolve import resolve

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo, tied and in mini-batches": (
        "grpo",
        {"algorithm.kl_coef": 0.1, "algorithm.minibatches": 3, "algorithm.epochs": 2, "stop.max_steps": 5},
    ),
    "grpo, a mixture of two rules": (
        "grpo",
        {"oracle": {"name": "mixture", "sources": [{"name": "gsm8k"}, {"name": "math", "label": "second"}]}},
    ),
    "dpo": ("dpo", {"checkpoint.keep_last": 9, "checkpoint.every": 1}),
    "dpo, a lagging sampler": ("dpo", {"learner.sync_every": 2, "evaluation": None}),
    "an adapter": ("grpo", {"model.lora": {"rank": 2}, "evaluation.greedy": False}),
    "an adapter, sampled in half precision": ("dpo", {"model.lora": {"rank": 2}, "engine.dtype": "bfloat16"}),
}


@pytest.mark.sample("grpo, a mixture*", seconds=7.5)
@pytest.mark.parametrize(("algorithm", "changes"), VARIANTS.values(), ids=VARIANTS.keys())
def test_the_arithmetic_is_that_of_the_run(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, changes: dict[str, Any]
) -> None:
    config = world.config(algorithm, tmp_path, {**changes, "oracle.repeats": 0})
    said, _ = checked(capsys, config)
    assert not (tmp_path / algorithm).exists()
    assert forked(lambda: oat("train", config), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    run = tmp_path / algorithm
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = rows[-1]["step"]

    assert (said["steps left"], said["prompts left"], said["prompts"]) == (steps, 4 * steps, 30)
    assert said["queries left, most"] == rows[-1]["oracle/queries"]
    assert said["optimiser steps left"] == rows[-1]["optim/steps"]
    assert said["queries a step, most"] == rows[1]["oracle/queries"]
    evaluations = sum("time/evaluate_s" in row for row in rows)
    if "sources" in changes.get("oracle", {}):
        assert said["queries an evaluation, most"] == 24
        assert said["queries in all evaluations, most"] == 72
    assert said.get("evaluations left", 0) == evaluations
    assert said.get("held-out prompts", 0) == (4 if evaluations else 0)
    kept = sorted((run / "checkpoints").glob("step_*/tensors.safetensors"))
    assert len(kept) == min(said["checkpoints that stay"], steps)
    size = sum(tensor.nbytes for tensor in load_file(kept[-1]).values())
    assert size == pytest.approx(1e6 * said["size of a checkpoint"], rel=0.05)

    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    said, notes = checked(capsys, config)
    assert (said["steps done"], said["steps left"]) == (steps, 0)
    assert f"the run is over after step {steps}" in notes
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_run_without_a_known_end(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("dpo", tmp_path, {"stop": {"max_queries": 100, "max_hours": 2}})
    said, _ = checked(capsys, config)
    assert (said["queries of the run, limit"], said["hours of the run, limit"]) == (100, 2)
    assert said["steps left, least"] == 13
    assert "steps left" not in said


def test_how_often_prompts_come(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stop, prompts in (({"prompts.epochs": 3, "stop": {}}, 90), ({"stop.max_steps": 10_000}, 10_000)):
        config = world.config("grpo", tmp_path, {**stop, "algorithm.prompts": 1, "oracle.repeats": 0})
        said, _ = checked(capsys, config)
        assert (said["prompts left"], said["responses left"]) == (prompts, 3 * prompts)
        assert said["times each prompt is taken"] == pytest.approx(prompts / 30)


@pytest.mark.slow(instead="test_the_arithmetic_is_that_of_the_run", seconds=1.9)
def test_a_run_that_is_turned_back_is_counted_from_there(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`checkpoints/latest` names an older checkpoint. `oat check`, the first line of `oat train` and a fork
    all count from it."""
    config, run = (
        world.config("grpo", tmp_path, {"evaluation": None, "checkpoint.keep_last": 5}),
        tmp_path / "grpo",
    )
    assert oat("train", config) == 0
    spent = int(json.loads((run / "metrics.jsonl").read_text().splitlines()[2])["oracle/queries"])
    (run / "checkpoints" / "latest").write_text("step_00000002\n")
    said, notes = checked(capsys, config)
    assert (said["steps done"], said["steps left"], said["queries spent"]) == (2, 2, spent)
    assert said["run directory"] == str(run)
    assert "the run goes on after step 2" in notes
    said, _ = checked(capsys, config, "--stop.max_steps", 10)
    assert said["prompts left"] == 32
    _, notes = checked(capsys, config, "--from", run, "--run_dir", tmp_path / "fork")
    assert f"the run begins as a fork of {run} after step 2" in notes
    with pytest.warns(UserWarning, match="latest: names step_00000002, and step_00000004 is there too"):
        assert oat("train", config) == 0
    assert "; the run goes on from its checkpoint after 2 steps\n" in capsys.readouterr().out


def test_boxes_are_made_without_weights(world: World, tmp_path: Path) -> None:
    """`oat check` makes the boxes with the same `build` as a run, and no tensor takes memory."""
    resolved = resolve(*load_config(world.config("dpo", tmp_path)))
    with outlined(resolved, gather_inputs(resolved)) as run:
        learner: Any = run.learner
        assert all(
            type(tensor.data).__name__ == "FakeTensor"
            for model in learner.models.values()
            for tensor in model.tensors().values()
        )


@pytest.mark.sample("changes0-1", seconds=2.6)
@pytest.mark.parametrize(("changes", "paths"), [({}, 1), ({"model.reference": "{folder}/other"}, 2)])
def test_a_command_makes_one_module_without_weights_for_each_path(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    paths: int,
) -> None:
    """DPO has a reference beside the policy, and `--memory` uses both models again. Yet `oat check` makes one
    module per path."""
    shutil.copytree(world.folder / "model", tmp_path / "other")
    changes = {name: value.format(folder=tmp_path) for name, value in changes.items()}
    config = world.config("dpo", tmp_path, {**changes, "stop.max_steps": 1})
    made: list[str] = []
    start = PreTrainedModel.__init__

    def counted(self: PreTrainedModel, *given: Any, **options: Any) -> None:
        made.append(type(self).__name__)
        start(self, *given, **options)

    monkeypatch.setattr(PreTrainedModel, "__init__", counted)
    monkeypatch.setattr("oat.models.outlines._kept", {})
    monkeypatch.setattr("oat.models.outlines._MOST", 0)
    for words in (["check", config], ["check", config, "--memory"]):
        made.clear()
        assert oat(*words) == 0
        assert made.count("LlamaForCausalLM") == paths
    made.clear()
    assert oat("train", config) == 0
    assert made.count("LlamaForCausalLM") == paths + 2, "policy and reference"


def test_tokens_of_a_response(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("grpo", tmp_path, {"prompts.shuffle": False, "sampling.stop": ["+"]})
    assert oat("check", config, "--show-tokens") == 0
    printed = capsys.readouterr().out.splitlines()
    start = printed.index("example: row 1 of the prompts, the reference stands for a response")
    rows = [line.split() for line in printed[start + 2 : start + 8]]
    ids = {token: 2 + place for place, token in enumerate("0123456789+=ab")}
    prompt = [
        [str(place), str(ids[token]), "context", "-", f"'{token}'"] for place, token in enumerate("0+0=")
    ]
    assert rows == [
        *prompt,
        ["4", str(ids["a"]), "model", "yes", "'a'"],
        ["5", "1", "model", "yes", "'<eos>'"],
    ]
    assert printed[start + 8] == "stop ids: 1 '<eos>', 2 '0'; or the text '+'"


def test_what_the_model_does_with_the_end_of_a_prompt(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oat check` prints shares of the next token after the prompts. They equal those that transformers
    computes."""
    config = world.config("grpo", tmp_path, {"prompts.shuffle": False})
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(world.folder / "model"),
        AutoTokenizer.from_pretrained(world.folder / "model"),
    )
    prompts = [
        json.loads(line)["prompt"] for line in (world.folder / "train.jsonl").read_text().splitlines()[:16]
    ]
    with torch.no_grad():
        shares = [
            model(tokenizer(text, return_tensors="pt").input_ids).logits[0, -1].softmax(-1)
            for text in prompts
        ]
    assert oat("check", config, "--show-tokens") == 0
    printed = capsys.readouterr().out
    assert "mean over the first 16 prompts:" in printed
    at_once = float(re.search(r"ends at once +([\d.]+) of the probability is on the stop ids", printed)[1])
    assert at_once == pytest.approx(np.mean([float(share[[1, 2]].sum()) for share in shares]), abs=6e-4)
    row, end, tokens = re.search(r"most of it, row (\d+) +('.*?') -> (.*)", printed).groups()
    assert end == repr(prompts[int(row) - 1])
    best = shares[int(row) - 1].topk(4)
    assert tokens == ", ".join(
        f"{_quoted(tokenizer.decode([id]))} {share:.3f}"
        for share, id in zip(*map(torch.Tensor.tolist, best), strict=True)
    )


@pytest.mark.parametrize(
    ("greedy", "at_once", "soon"),
    [
        (["<eos>"], "1.000", "1.000 of it is on greedy responses that end within 8 tokens, 16 of 16"),
        (["a", "<eos>"], "0.000", "1.000 of it is on greedy responses that end within 8 tokens, 16 of 16"),
    ],
)
def test_a_model_that_ends_at_once_or_soon_is_shown(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    greedy: list[str],
    at_once: str,
    soon: str,
) -> None:
    """The model's layers add nothing, so each token alone decides the next one, beginning with `=`. `oat
    check` reports whether responses end at once or soon."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(world.folder / "model"),
        AutoTokenizer.from_pretrained(world.folder / "model"),
    )
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                parameter.zero_()
        torch.nn.init.orthogonal_(model.model.embed_tokens.weight)
        for last, following in pairwise(["=", *greedy]):
            model.lm_head.weight[vocabulary[following]] += (
                100 * model.model.embed_tokens.weight[vocabulary[last]]
            )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert (
        oat("check", world.config("grpo", tmp_path, {"model.path": str(tmp_path / "model")}), "--show-tokens")
        == 0
    )
    printed = capsys.readouterr().out
    assert re.search(rf"ends at once +{at_once} of the probability is on the stop ids", printed)
    assert re.search(rf"ends soon +{soon}", printed)
    assert re.search(rf"greedy: '{''.join(greedy)}' and ends, with probability 1.000", printed)
    assert (
        "otherwise            if responses should be longer: end prompts as the model's own texts go on"
        in printed
    )


@pytest.mark.parametrize("by_variable", [False, True])
def test_where_a_judge_is_asked(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    by_variable: bool,
) -> None:
    url = "http://127.0.0.1:1/v1"
    monkeypatch.delenv("OAI_URL", raising=False)
    if by_variable:
        monkeypatch.setenv("OAI_URL", url)
    oracle = {"name": "judge", "model": "my-judge"} | (
        {} if by_variable else {"url": [url, "http://127.0.0.1:2/v1"]}
    )
    assert oat("check", world.config("dpo", tmp_path, {"oracle": oracle, "evaluation": None}), "--json") == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["name"] == "oracle"]
    other = "" if by_variable else ", http://127.0.0.1:2/v1"
    assert (row["number"], row["unit"]) == ("judge", f"my-judge at {url}{other}")


def test_tokens_of_recorded_responses(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "good": "2", "bad": "33"}) + "\n")
    changes = {
        "prompts": {"path": str(data), "responses": ["good", "bad"]},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    tree = world.tree("dpo", tmp_path / "dpo", changes)
    del tree["algorithm"]["samples"]
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(tree))
    assert oat("check", tmp_path / "dpo.yaml", "--show-tokens") == 0
    printed = capsys.readouterr().out
    assert "example: row 1 of the prompts, the response 'good'" in printed
    assert "ends at once" not in printed, "nothing is sampled"
    assert re.search(
        (
            r"the response 'bad'\n.*\n( +\d +\d+  context  -  .*\n){4}( +\d +5  model    yes      '3'\n){2} "
            r"+6 +1  model    yes "
        ),
        printed,
    )


def test_what_is_said_of_the_data(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`oat check` prints the lengths of recorded data, prompt and response together. It names the columns
    that the reward gets, once per file."""
    path = world.folder / "train.jsonl"
    said, notes = checked(capsys, world.config("grpo", tmp_path, {"evaluation.path": str(path)}))
    assert (said["longest prompt"], said["held-out prompts"]) == (4, 30)
    assert notes.count(f"{path}: read as prompt-only (prompt); further columns, for the reward: answer") == 1
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "1+1=", "chosen": "2" * size, "rejected": "3"} for size in (1, 5, 9)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    changes: dict[str, Any] = {
        "prompts": {"path": str(data), "max_tokens": 12},
        "oracle": {"name": "recorded"},
        "evaluation": None,
    }
    tree = world.tree("dpo", tmp_path / "dpo", {**changes, "algorithm": {"name": "dpo", "prompts": 2}})
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(tree))
    said, notes = checked(capsys, tmp_path / "dpo.yaml")
    assert (said["prompts"], said["longest prompt with its response"]) == (2, 10)
    assert f"{data}: read as preference (prompt, chosen, rejected)" in notes
    left_out = f"{data}: 1 of 3 prompts with their longest response are longer than 12 tokens and left out"
    assert any(note.startswith(left_out) for note in notes)


def test_a_space_is_seen() -> None:
    assert [_quoted(text) for text in (" ", "  ", " a", "\n", "")] == [
        "'\u2423'",
        "'\u2423\u2423'",
        "' a'",
        "'\\n'",
        "''",
    ]


@pytest.mark.parametrize("command", ["train", "check"])
def test_the_resolved_configuration(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config = world.config("grpo", tmp_path, {"model.path": "nowhere"})
    assert oat(command, config, "--print-config", "--seed", "7") == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    again = resolve(*load_config(tmp_path / "again.yaml")).config
    assert dump(again) == dump(resolve(*load_config(config, ["--seed", "7"])).config)
    assert (again.seed, again.algorithm.options["clip_low"]) == (7, 0.2)


def test_help_needs_no_torch() -> None:
    """One process prints the help of every command and imports no slow library. A command imports slow
    libraries when it begins its work."""
    names = list(COMMANDS)
    assert len(names) >= 8
    code = "import sys, contextlib\nfrom oat.cli import main\n"
    for words in ([], *([name] for name in names)):
        code += f"with contextlib.suppress(SystemExit):\n    main({[*words, '--help']!r})\n"
    code += (
        "print({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', "
        "'datasets', 'pyarrow', 'matplotlib'})"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.endswith("\nset()\n")
    assert shown.count("usage: oat") == len(names) + 1


@pytest.mark.slow(
    instead="tests/learner/test_precision.py tests the refusal of runs that do not fit, with measured tokens",
    seconds=5.9,
)
def test_a_run_that_does_not_fit_goes_on_when_it_is_told(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that does not fit is refused, and goes on if `compute.memory_gb` is high enough. This also holds
    for a run that was begun on a machine with more memory."""
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1, "evaluation": None})
    resolved = resolve(*load_config(config))
    peak = estimate(resolved, lengths_of(gather_inputs(resolved, known=None))).peak / 1e9
    small = ["--compute.memory_gb", f"{0.9 * SURE * peak:.3g}"]
    for gigabytes, words in (
        (100, "and compute.memory_gb is 100"),
        (1.1 * peak, f"about {peak:.3g} GB for tensors"),
    ):
        _, notes = checked(capsys, config, "--compute.memory_gb", gigabytes)
        assert any(note.startswith("memory: ") and words in note for note in notes)
    assert oat("train", config, *small) == 2
    error = capsys.readouterr().err
    told = re.search(r"set compute.memory_gb to (\S+) or more$", error.strip())
    assert told is not None
    assert forked(lambda: oat("train", config, "--compute.memory_gb", told[1]), tmp_path / "log") == 0
    assert oat("train", config, *small, "--stop.max_steps", "2") == 2
    assert (
        forked(
            lambda: oat("train", config, "--compute.memory_gb", "1", "--stop.max_steps", "2"),
            tmp_path / "log",
        )
        == 0
    )


def test_free_memory_is_known() -> None:
    free = free_memory("cpu")
    assert free is None or 10**7 < free < 10**14
    assert main(["check", "nowhere.yaml"]) == 2
