"""A reward model learns from pairs which responses are better, and ranks held-out pairs. With its loss
flipped it does not."""

import json
import random
from pathlib import Path

import pytest
from fixtures import make_model, write_jsonl

from oat.cli import main
from oat.models.scoring import Scorer
from oat.types import Message

HERE = Path(__file__).parent
CONFIG = """
run_dir: {root}/run
model: {{path: {root}/model}}
prompts: {{path: {root}/pairs.jsonl}}
oracle: {oracle}
algorithm: {{name: {name}, prompts: 64, held_out: 0.2, centring: 0.01{samples}}}
learner: {{learning_rate: 3e-3, micro_batch_size: 256}}
checkpoint: {{every: 100}}
compute: {{threads: 1}}
stop: {{max_steps: 40}}
"""
ONLINE = "sampling: {max_new_tokens: 6}"
REWARD = """
def reward(prompts, completions, **columns):
    return [text.count("a") - text.count("b") for text in completions]
"""
LEAST = 0.9


def pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Return recorded pairs. The winner has more letters a and fewer letters b, counted as a difference."""
    generator, records = random.Random(seed), []
    while len(records) < count:
        texts = ["".join(generator.choice("ab") for _ in range(generator.randint(1, 6))) for _ in range(2)]
        better, worse = sorted(texts, key=lambda text: text.count("b") - text.count("a"))
        if worse.count("a") - worse.count("b") < better.count("a") - better.count("b"):
            prompt = "".join(generator.choice("0123456789+=") for _ in range(4))
            records.append({"prompt": prompt, "chosen": better, "rejected": worse})
    return records


def learned(
    root: Path, name: str, *flags: str, is_online: bool = False
) -> tuple[list[dict[str, float]], float]:
    """Train a reward model on recorded pairs, or online on samples of the start model. Return the rows of the
    run, and the accuracy of the exported model on pairs of other prompts."""
    make_model(root / "model", hidden=32)
    write_jsonl(root / "pairs.jsonl", pairs(600, 0))
    config = root / "config.yaml"
    (root / "reward.py").write_text(REWARD)
    own = (
        {"oracle": f'{{name: "{root}/reward.py:reward"}}', "samples": ", samples: 2"}
        if is_online
        else {"oracle": "{name: recorded}", "samples": ""}
    )
    config.write_text(CONFIG.format(root=root, name=name, **own) + (ONLINE if is_online else ""))
    assert main(["train", str(config), *flags]) == 0
    assert main(["export", str(root / "run"), str(root / "out")]) == 0
    scorer, others = Scorer(str(root / "out")), pairs(200, 1)
    asked = [(record["prompt"], record[column]) for record in others for column in ("chosen", "rejected")]
    scores = [
        score or 0.0
        for score in scorer.score([scorer.encode([Message("user", prompt)], text) for prompt, text in asked])
    ]
    rows = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
    return rows, sum(
        chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)
    ) / len(others)


@pytest.mark.fault("R22")
def test_learns(tmp_path: Path) -> None:
    rows, accuracy = learned(tmp_path, "reward_model")
    assert accuracy > LEAST
    last = rows[-5:]
    assert sum(row["pairs/held_out_accuracy"] for row in last) / len(last) > LEAST
    assert sum(row["pairs/brier"] for row in last) / len(last) < 0.1 < rows[1]["pairs/brier"]
    centre = [row["pairs/reward_chosen"] + row["pairs/reward_rejected"] for row in last]
    assert abs(sum(centre) / len(centre)) < 2


@pytest.mark.slow(instead="test_learns, from recorded pairs", seconds=3.6)
@pytest.mark.fault("R22")
def test_learns_from_what_is_sampled(tmp_path: Path) -> None:
    assert learned(tmp_path, "reward_model", is_online=True)[1] > LEAST


@pytest.mark.slow(instead="test_signs.py flips its sign", seconds=2.2)
@pytest.mark.fault("R22")
def test_a_flipped_sign_is_noticed(tmp_path: Path, figure) -> None:
    _, accuracy = learned(tmp_path, f'"{HERE}/flipped.py:FlippedRewardModelling"')
    figure(f"{int(accuracy < 0.5)} of 1 flipped losses noticed")
    assert accuracy < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("is_online", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_with_other_seeds(tmp_path: Path, seed: int, is_online: bool) -> None:
    assert learned(tmp_path, "reward_model", "--seed", str(seed), is_online=is_online)[1] > LEAST
