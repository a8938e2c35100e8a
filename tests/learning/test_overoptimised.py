"""A run optimises a proxy reward for too long, and the gold oracle of the evaluation shows it (Gao et al.
2022, arXiv:2210.10760)."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, oat
from transformers import AutoModelForCausalLM

from oat.commands.digest import digest_run
from oat.ledger.reader import Reader

ORACLES = '''
def proxy(prompts, completions, **columns):
    """The more letters a, the better."""
    return [float(text.count("a")) for text in completions]


def gold(prompts, completions, **columns):
    """One is good, each further one is worse."""
    return [float(min(count, 2 - count)) for count in (text.count("a") for text in completions)]
'''


def run(world: World, tmp_path: Path, steps: int, **changes: Any) -> tuple[int, Path, list[dict[str, float]]]:
    """Return exit code, directory and evaluated rows of a run with a weak KL term."""
    (tmp_path / "oracles.py").write_text(ORACLES, encoding="utf-8")
    own = {
        "oracle.name": f"{tmp_path / 'oracles.py'}:proxy",
        "algorithm": {"name": "grpo", "prompts": 16, "samples": 8, "kl_coef": 0.001},
        "learner.learning_rate": 0.02,
        "evaluation.gold": f"{tmp_path / 'oracles.py'}:gold",
        "evaluation.kl": True,
        "evaluation.samples": 32,
        "checkpoint.every": 2,
        "stop.max_steps": steps,
    }
    code = oat(
        "train",
        world.config(
            "grpo", tmp_path, {**own, **{name.replace("__", "."): value for name, value in changes.items()}}
        ),
    )
    run_dir = Path(changes.get("run_dir", tmp_path / "grpo"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return code, run_dir, [row for row in rows if "eval/gold_sampled" in row]


@pytest.mark.slow(
    instead="test_the_distance_is_that_of_the_responses_and_moves_nothing; test_learns_rewards.py",
    seconds=1.5,
)
def test_the_proxy_rises_while_the_gold_falls(world: World, tmp_path: Path) -> None:
    """A run optimises a proxy. At the start, responses have few letters, and both oracles order them alike.
    The gold score first rises with the proxy. At the end, responses have almost only letters, and the gold
    score is far below its start."""
    code, run_dir, curve = run(world, tmp_path, 16)
    assert code == 0
    assert [row["step"] for row in curve] == list(range(0, 17, 2))
    start, end = curve[0], curve[-1]
    assert end["eval/sampled"] > start["eval/sampled"] + 1.5
    assert max(row["eval/gold_sampled"] for row in curve) > start["eval/gold_sampled"] + 0.1
    assert end["eval/gold_sampled"] < start["eval/gold_sampled"] - 1
    assert start["eval/gold_agreement"] > 0.6 > 0.4 > end["eval/gold_agreement"]
    assert curve[-1]["kl/reference"] > curve[1]["kl/reference"]
    assert abs(start["eval/kl"]) < 1e-4 < 0.5 < end["eval/kl"]
    assert oat("plot", run_dir, "--against", "sqrt_kl", "--out", tmp_path / "a.png") == 0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 2 * len(curve)


@pytest.mark.slow(instead="tests/control/test_alarms.py", seconds=2.8)
@pytest.mark.parametrize("action", ["stop", "roll_back"])
def test_an_alarm_stops_it_near_the_peak(action: str, world: World, tmp_path: Path) -> None:
    """The alarm `gold` is raised when the gold score is more than 0.2 below its best. A run that rolls back
    returns to a step with a gold score within this range."""
    changes: dict[str, Any] = {
        "alarms__gold": {"drop": 0.2, "patience": 1, "action": action},
        "alarms__kl__action": "off",
    }
    changes |= {"alarms__max_roll_backs": 5} if action == "roll_back" else {}
    with pytest.warns(UserWarning, match="alarm gold") if action == "roll_back" else contextlib.nullcontext():
        code, run_dir, curve = run(world, tmp_path, 12, **changes)
    golds = [row["eval/gold_sampled"] for row in curve]
    if action == "stop":
        assert code == 3
        assert curve[-1]["step"] < 12
        assert max(golds) > golds[0] + 0.1
        assert golds[-2] < max(golds) - 0.2, "the one that raised it; a step later it ends"
        return
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    back = next(row["step"] for row in rows if row.get("alarms/rolled_back"))
    after = next(row for row in curve if row["step"] > back)
    before = [row for row in curve if row["step"] < back]
    assert before[-1]["eval/gold_sampled"] < max(row["eval/gold_sampled"] for row in before) - 0.2
    assert after["eval/kl"] < before[-1]["eval/kl"]


def test_the_distance_is_that_of_the_responses_and_moves_nothing(world: World, tmp_path: Path) -> None:
    """The metric `eval/kl` equals the distance computed by hand from the ledger's trajectories and a separate
    reference. A run without it is bitwise the same in everything else."""
    assert run(world, tmp_path, 2, run_dir=str(tmp_path / "without"), evaluation__kl=False)[0] == 0
    assert run(world, tmp_path, 2)[0] == 0
    ours, theirs = (digest_run(tmp_path / name) for name in ("grpo", "without"))
    assert {name for name in ours if ours[name] != theirs[name]} == {"metrics"}
    with contextlib.closing(Reader(tmp_path / "grpo" / "ledger.sqlite")) as store:
        groups = store.groups("eval", 2, 0)
    model = AutoModelForCausalLM.from_pretrained(world.folder / "model")
    found = []
    for row in (row for group in groups for row in group.trajectories):
        ids = torch.tensor(row.ids).long()
        with torch.no_grad():
            logps = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        found.append(float((row.recorded("raw_logps") - logps[row.trained[1:]]).sum()))
    (row,) = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()][2:]
    assert row["eval/kl"] == pytest.approx(sum(found) / len(found), abs=1e-4)
    assert abs(row["eval/kl"]) > 1e-3, "an estimate of what is small may be below 0"
