"""Held-out pairs (`evaluation.pairs`): the objective's loss on pairs that are never learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fixtures import World, checked, forked, kill_at, named, oat, write_jsonl
from tiny_models import build_config, save_model
from weights import weights_of

from oat import Trainer
from oat.algorithms.direct import Direct
from oat.commands.digest import digest_run
from oat.data.fit import Fit
from oat.data.prompts import Prompts, Source
from oat.errors import OatWarning
from oat.evaluation.held_out import HeldOutPairs
from oat.functional.preference import dpo_loss
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.models.loading import load_lm, load_tokenizer
from oat.plugins.registry import ALGORITHMS
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Message, Segment, Trajectory

TRAIN = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "ab"[: 1 + a % 2] + str(b)}
    for a in range(1, 5)
    for b in range(4)
]
HELD_OUT = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "b" * (1 + b % 3)}
    for a in range(5, 8)
    for b in range(3)
]
OF_PAIRS = [name for name, cls in ALGORITHMS.items() if issubclass(cls, Direct)]
NAMES = {
    f"eval/pairs/{name}"
    for name in ("count", "loss", "accuracy", "margin", "reward_chosen", "reward_rejected")
}
GAP = {"eval/pairs/reference_gap"}
"""The further metric of losses with a reference."""


def offline(world: World, folder: Path, name: str = "dpo", **changes: Any) -> Path:
    """Write folder/<name>.yaml: a run of four steps on recorded pairs, which evaluates nine other pairs every
    two steps."""
    write_jsonl(folder / "pairs.jsonl", TRAIN)
    write_jsonl(folder / "held_out.jsonl", HELD_OUT)
    only: dict[str, Any] = {
        "prompts": {"path": str(folder / "pairs.jsonl")},
        "oracle": {"name": "recorded"},
        "sampling": None,
    }
    only |= {
        "algorithm": {"name": name, "prompts": 4},
        "evaluation": {"pairs": str(folder / "held_out.jsonl"), "every": 2},
    }
    tree = {**world.tree("dpo", folder / name), **only, **changes}
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump({name: value for name, value in tree.items() if value is not None}, sort_keys=False)
    )
    return file


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def of_pairs(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/pairs/")}


def test_the_numbers_are_those_of_each_pair_alone(world: World, tmp_path: Path) -> None:
    """The reported numbers equal those computed pair by pair from the exported model and the start model. At
    the start the policy equals the reference."""
    assert oat("train", offline(world, tmp_path)) == 0
    found = rows(tmp_path / "dpo")
    assert [bool(of_pairs(row)) for row in found] == [True, False, True, False, True]
    assert {name for name in found[0] if name.startswith("eval/")} == NAMES | GAP
    assert found[0]["eval/pairs/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert (
        found[0]["eval/pairs/count"],
        found[0]["eval/pairs/margin"],
        found[0]["eval/pairs/reference_gap"],
    ) == (9, 0, 0)
    assert oat("export", tmp_path / "dpo", tmp_path / "out") == 0
    margins, gaps = [], []
    for record in HELD_OUT:
        ends, starts = (
            [_logps(place, record["prompt"], record[side]) for side in ("chosen", "rejected")]
            for place in (tmp_path / "out", world.folder / "model")
        )
        chosen, rejected = (end - start for end, start in zip(ends, starts, strict=True))
        margins.append(float(chosen.sum() - rejected.sum()))
        gaps += [*chosen.abs(), *rejected.abs()]
    margin_U = torch.tensor(margins)
    assert found[-1]["eval/pairs/reference_gap"] == pytest.approx(float(torch.stack(gaps).mean()), rel=1e-3)
    assert found[-1]["eval/pairs/loss"] == pytest.approx(
        float(dpo_loss(margin_U, beta=0.1, label_smoothing=0.0).mean()), rel=1e-4
    )
    assert found[-1]["eval/pairs/margin"] == pytest.approx(0.1 * float(margin_U.mean()), rel=1e-3)
    assert found[-1]["eval/pairs/accuracy"] == pytest.approx(float((margin_U > 0).float().mean()))
    assert found[-1]["eval/pairs/loss"] != found[0]["eval/pairs/loss"]


def _logps(model: Path, prompt: str, response: str) -> torch.Tensor:
    lm = load_lm(str(model))
    ids, mask = Renderer(load_tokenizer(str(model)), template=None, eos_ids=lm.eos_ids).recorded(
        [Message("user", prompt)], response
    )
    row = Trajectory(
        "recorded",
        (
            Segment("context", ids[~mask]),
            Segment("model", ids[mask], mask=np.ones(int(mask.sum()), dtype=bool)),
        ),
        "stop",
        "",
    )
    learner = Learner({"policy": LanguageModel(lm, num_tokens=16)}, {}, micro_batch_size=1, seeds=Seeds(0))
    return learner.forward("policy", [row], {"raw"})["raw"]


@pytest.mark.sample("dpo", "simpo", "aot", "orpo", seconds=1.9)
@pytest.mark.parametrize("name", OF_PAIRS)
def test_every_loss_of_pairs_has_them(world: World, name: str) -> None:
    """Each loss of pairs reports numbers on held-out pairs. They are the same in one pass or pair by pair,
    and the objective and all weights stay unchanged."""
    cls: Any = ALGORITHMS[name]
    renderer = Renderer(load_tokenizer(str(world.folder / "model")), template=None)
    prompts = Prompts([Source(HELD_OUT)], renderer, Seeds(0), responses=["chosen", "rejected"]).all()
    found = []
    for size in (None, 2):
        models = {}
        for model in ("policy", "reference"):
            lm = load_lm(str(world.folder / "model"))
            if model == "policy":
                with torch.no_grad():
                    [weights.mul_(1.5) for weights in lm.trainable().values()]
            models[model] = LanguageModel(lm, num_tokens=16)
        learner = Learner(models, {"policy": OptimiserSettings(1e-3)}, micro_batch_size=size, seeds=Seeds(0))
        before = [weights.clone() for weights in weights_of(learner).values()]
        actor = RecordedActor(Fit(renderer), ["chosen", "rejected"])
        measured = HeldOutPairs(cls(cls.Config(prompts=4)), prompts, actor, learner, Seeds(0))
        found.append(measured.measure())
        assert measured.measure() == found[-1]
        assert all(torch.equal(*pair) for pair in zip(before, weights_of(learner).values(), strict=True))
    assert found[0].keys() == NAMES | (GAP if "reference" in cls(cls.Config()).requires.models else set())
    assert found[0]["eval/pairs/count"] == 9
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_training_does_not_notice(world: World, tmp_path: Path) -> None:
    for name, changes in {"with": {}, "without": {"evaluation": None}}.items():
        (tmp_path / name).mkdir()
        assert oat("train", offline(world, tmp_path / name, **changes)) == 0
    digests = [digest_run(tmp_path / name / "dpo") for name in ("with", "without")]
    assert [digests[0][part] == digests[1][part] for part in ("weights", "optimiser", "ledger")] == [True] * 3


@pytest.mark.slow(instead="tests/faults/test_kill.py", seconds=1.2)
def test_a_killed_run_measures_the_same(world: World, tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = (
        offline(world, tmp_path / name, model={"path": str(world.folder / "model")})
        for name in ("whole", "killed")
    )
    assert oat("train", whole) == 0
    log = tmp_path / "log"
    assert (
        forked(lambda: kill_at(*named("oat.learner.learner:Learner.update"), 4) or oat("train", killed), log)
        < 0
    )
    assert oat("train", killed) == 0
    digests = [digest_run(tmp_path / name / "dpo") for name in ("whole", "killed")]
    assert digests[0] == digests[1]


def test_the_reference_is_computed_once_unless_it_moves(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's numbers on the pairs are computed once. If the reference follows the policy, they are
    computed at every evaluation."""
    passes: list[int] = []
    forward = Learner.forward

    def counted(self: Learner, model: str, some: Any, wants: set[str]) -> dict[str, torch.Tensor]:
        if model == "reference" and len(some) == 2 * len(HELD_OUT):
            passes.append(len(some))
        return forward(self, model, some, wants)

    monkeypatch.setattr(Learner, "forward", counted)
    assert oat("train", offline(world, tmp_path)) == 0
    assert len(passes) == 1
    passes.clear()
    model = {"path": str(world.folder / "model"), "reference_update": {"every": 2, "mix": 1.0}}
    (tmp_path / "moving").mkdir()
    assert oat("train", offline(world, tmp_path / "moving", model=model)) == 0
    assert len(passes) == 3
    assert [
        row["eval/pairs/margin"] for row in rows(tmp_path / "moving" / "dpo") if "eval/pairs/margin" in row
    ] == [0, 0, 0]


@pytest.mark.slow(instead="test_the_numbers_are_those_of_each_pair_alone", seconds=1.8)
def test_check_reads_them_and_eval_gives_them(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = offline(world, tmp_path)
    said, _ = checked(capsys, file)
    assert (said["evaluations left"], said["held-out pairs"]) == (3, 9)
    assert oat("train", file) == 0
    capsys.readouterr()
    assert oat("eval", tmp_path / "dpo") == 0
    assert json.loads(capsys.readouterr().out) == {"step": 4, **of_pairs(rows(tmp_path / "dpo")[-1])}
    write_jsonl(tmp_path / "fewer.jsonl", HELD_OUT[:4])
    assert oat("eval", tmp_path / "dpo", "--evaluation.pairs", tmp_path / "fewer.jsonl") == 0
    assert json.loads(capsys.readouterr().out)["eval/pairs/count"] == 4
    write_jsonl(tmp_path / "held_out.jsonl", [*HELD_OUT, {"prompt": "1+1=", "chosen": "2"}])
    for command in ("check", "train"):
        assert oat(command, file, "--run_dir", tmp_path / "new") != 0
        assert "held_out.jsonl:10: field 'rejected'" in capsys.readouterr().err
    write_jsonl(tmp_path / "held_out.jsonl", HELD_OUT[1:])
    with pytest.warns(
        OatWarning,
        match=r"the held-out pairs \(evaluation.pairs\) are not those that this run has been evaluated on",
    ):
        assert oat("train", file, "--stop.max_steps", 6) == 0


def test_beside_prompts_that_are_answered(world: World, tmp_path: Path) -> None:
    """Held-out pairs and prompts are evaluated together. The pairs' numbers are the same as without prompts,
    and remain if the oracle fails or has no budget."""
    write_jsonl(tmp_path / "held_out.jsonl", [*HELD_OUT, {"prompt": "1+1=", "chosen": "2", "rejected": "2"}])
    evaluation = {
        "path": str(world.folder / "held_out.jsonl"),
        "pairs": str(tmp_path / "held_out.jsonl"),
        "every": 2,
        "max_queries": 8,
    }
    assert oat("train", world.config("dpo", tmp_path, {"evaluation": evaluation})) == 0
    found = rows(tmp_path / "dpo")
    assert {"eval/sampled", "eval/greedy", *NAMES} <= found[0].keys()
    assert (found[4]["eval/skipped"], found[4].keys() & NAMES) == (1, NAMES)
    assert [row["eval/pairs/count"] for row in found[::2]] == [9, 9, 9], "two equal responses are no pair"


def test_reward_models_have_them(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of reward models and `oat eval` report the numbers over all held-out pairs. They do not depend on
    how a step's own pairs are divided."""
    file = offline(world, tmp_path, "reward_model")
    assert oat("train", file) == 0
    found = rows(tmp_path / "reward_model")
    assert of_pairs(found[-1]).keys() == NAMES | {"eval/pairs/brier", "eval/pairs/confidence"}
    assert found[0]["eval/pairs/loss"] != found[-1]["eval/pairs/loss"]
    capsys.readouterr()
    assert oat("eval", tmp_path / "reward_model") == 0
    assert json.loads(capsys.readouterr().out) == {"step": 4, **of_pairs(found[-1])}
    assert (
        oat(
            "eval",
            tmp_path / "reward_model",
            "--evaluation.path",
            world.folder / "held_out.jsonl",
            "--evaluation.oracle",
            world.oracle,
        )
        == 2
    )
    assert "name held-out pairs in evaluation.pairs" in capsys.readouterr().err


def test_from_python(world: World, tmp_path: Path) -> None:
    """Held-out pairs are given as Python objects, and checkpoints are ranked by the pairs' accuracy."""
    save_model(tmp_path / "model", build_config("llama"))
    trainer = Trainer(
        model=tmp_path / "model",
        prompts=TRAIN,
        oracle="recorded",
        algorithm={"name": "dpo", "prompts": 4},
        evaluation={"pairs": HELD_OUT, "every": 1},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": 1, "best_metric": "eval/pairs/accuracy"},
        learner={"micro_batch_size": 8},
        stop={"max_steps": 2},
        run_dir=tmp_path / "run",
        quiet=True,
    )
    result = trainer.train()
    assert trainer.evaluate() == {"step": 2, **of_pairs(result.metrics)}
    assert trainer.evaluate(pairs=HELD_OUT[:3])["eval/pairs/count"] == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"evaluation": {"every": 2}},
            (
                "evaluation.path is not set: name prompts that the model answers, or recorded pairs in "
                "evaluation.pairs"
            ),
        ),
        ({"evaluation": {"pairs": "held_out.jsonl", "samples": 4}}, "nothing reads evaluation.samples"),
        ({"evaluation": {"pairs": "held_out.jsonl", "every_queries": 4}}, "recorded costs no queries"),
        ({"algorithm": {"name": "sft", "prompts": 4}}, "sft learns from scores and not from pairs"),
        ({"checkpoint": {"keep_best": 1}}, "no evaluation of this run gives it"),
        (
            {"evaluation": None, "checkpoint": {"keep_best": 1, "best_metric": "eval/pairs/accuracy"}},
            "no evaluation of this run gives it",
        ),
        (
            {"algorithm": {"name": "reward_model", "prompts": 4, "held_out": 0.5}},
            "algorithm.held_out would leave a share of them out",
        ),
    ],
)
def test_mistakes(
    world: World, tmp_path: Path, changes: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("check", offline(world, tmp_path, **changes)) == 2
    assert words in capsys.readouterr().err
