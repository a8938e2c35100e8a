"""A tool in an environment of your own: the model learns to ask a calculator instead of guessing.

A prompt is a sum such as `57+85`. If the model responds `[add(57+85)]`, the environment calls the tool `add`
and tells the model the result. Any other response is taken as the answer. A right answer earns the reward 1.
A call costs 0.1, so it pays only if the answer is then right.

`python examples/07_calculator.py` makes a tiny model and shows it demonstrations (`sft`). One in four calls
the tool, and the others guess. Then the model plays episodes (`grpo`), and learns to call the tool and to
repeat its result. Both runs together take less than a minute.
"""

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oat.environments.base import Turn
from oat.environments.tools import Tools, bracket_calls
from oat.types import Prompt

CHARACTERS = "0123456789+ad[()]?>"
TEMPLATE = """{% for message in messages %}\
{% if message.role == "assistant" %}{{ message.content }}<end>\
{% else %}{{ "?" if message.role == "user" else ">" }}{{ message.content }}{% endif %}\
{% endfor %}"""
SHOWN = """
oracle: {name: recorded}
algorithm: {name: sft, prompts: 64, reduction: token}
learner: {learning_rate: 5e-3, schedule: linear, warmup_steps: 10, micro_batch_size: 64}
stop: {max_steps: 250}
"""
PLAYED = f"""
sampling:
  max_new_tokens: 12
  environment:
    name: "{__file__}:Calculator"
    cost: 0.1
oracle: {{name: environment}}
algorithm: {{name: grpo, prompts: 32, samples: 8}}
learner: {{learning_rate: 1e-3, schedule: linear, micro_batch_size: 256}}
stop: {{max_steps: 40}}
"""


def add(text: str) -> int:
    """Return the sum of two numbers, which are written as `37+85`."""
    first, second = text.split("+")
    return int(first) + int(second)


class Calculator:
    """Sums, with a calculator at hand.

    Args:
        cost: the price of a call, which is taken off the reward.
    """

    def __init__(self, cost: float = 0.1):
        self.cost = cost
        self.tools = Tools([add], parse=bracket_calls)

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        return {"answer": str(prompt.columns["answer"]), "has_called": False}

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        """Answer the first call. Every other response, and a call that fails, ends the episode."""
        answered = None if state["has_called"] else self.tools.answer(response)
        if answered is None:
            return Turn(state, None, reward=float(response.strip() == state["answer"]))
        message = None if answered.failed else answered.message
        return Turn({**state, "has_called": True}, message, reward=-self.cost)


def sums(count: int, chosen: random.Random) -> list[tuple[int, int]]:
    return [(chosen.randrange(50, 100), chosen.randrange(50, 100)) for _ in range(count)]


def demonstration(first: int, second: int, chosen: random.Random) -> dict[str, Any]:
    """Return a conversation that calls the tool, or one that guesses."""
    answer = str(first + second)
    turns = [("user", f"{first}+{second}")]
    if chosen.random() < 0.25:
        turns += [("assistant", f"[add({first}+{second})]"), ("tool", answer), ("assistant", answer)]
    else:
        turns += [("assistant", chosen.choice(("100", "150", "190")))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def train(
    folder: Path,
    name: str,
    model: str,
    config: str,
    records: Sequence[Mapping[str, Any]],
    flags: Sequence[str],
) -> list[dict[str, float]]:
    """Run `oat train` in `folder/name`, and return the rows of its metrics."""
    from oat.cli import main as oat
    from oat.rundir.rows import read_metrics

    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / f"{name}.yaml").write_text(config)
    settings = {
        "model.path": folder / model,
        "prompts.path": folder / f"{name}.jsonl",
        "render.template": folder / "chat.jinja",
        "run_dir": folder / name,
        "compute.threads": 1,
        "engine.threads": 1,
    }
    words = [word for field, value in settings.items() for word in (f"--{field}", str(value))]
    assert oat(["train", str(folder / f"{name}.yaml"), *words, *flags]) == 0
    return read_metrics(folder / name / "metrics.jsonl")


def main(*flags: str) -> None:
    from oat.cli import main as oat
    from oat.testing import write_tiny_model

    folder, chosen = Path(tempfile.mkdtemp(prefix="oat-")), random.Random(0)
    write_tiny_model(folder / "model", CHARACTERS, width=64)
    (folder / "chat.jinja").write_text(TEMPLATE)
    shown = [demonstration(*each, chosen) for each in sums(6_400, chosen)]
    train(folder, "shown", "model", SHOWN, shown, flags)
    assert oat(["export", str(folder / "shown"), str(folder / "start")]) == 0
    prompts = [
        {"prompt": [{"role": "user", "content": f"{first}+{second}"}], "answer": first + second}
        for first, second in sums(1_280, chosen)
    ]
    rows = train(folder, "run", "start", PLAYED, prompts, flags)
    first, last = (rows[number]["reward/mean"] for number in (1, -1))
    print(f"\nmean reward: {first:.2f} in the first step, {last:.2f} in the last")


if __name__ == "__main__":
    main(*sys.argv[1:])
