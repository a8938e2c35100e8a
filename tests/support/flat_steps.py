"""A run with flat steps: chosen steps in which all rewards are equal. The alarm `spread` is thus raised at
these steps on any machine."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fixtures import write_jsonl

PROMPTS = 4
"""Prompts per step, as in `World.tree`."""

REWARD = '''
FLAT = {flat}


def reward(prompts, completions, **columns):
    """Nothing for a prompt of a flat step; elsewhere other texts have other rewards."""

    def worth(text):
        return sum(place * ord(letter) for place, letter in enumerate(text, 1)) / 1000

    return [
        0.0 if int(prompt.partition("+")[0]) in FLAT else worth(text)
        for prompt, text in zip(prompts, completions)
    ]
'''


def flat_steps(folder: Path, flat: Collection[int], **rule: Any) -> dict[str, Any]:
    """Return changes to `World.tree`. The n-th step takes the prompts "n+0=" to "n+3=", and in a flat step
    every reward is 0.

    Args:
        folder: gets the data and the reward function; the function's path is in the ledger.
        flat: the numbers of the flat steps.
        rule: fields of `alarms.spread`.
    """
    write_jsonl(
        folder / "ordered.jsonl",
        [{"prompt": f"{step}+{number}="} for step in range(20) for number in range(PROMPTS)],
    )
    (folder / "flat.py").write_text(REWARD.format(flat=sorted(flat)), encoding="utf-8")
    changes = {
        "prompts": {"path": str(folder / "ordered.jsonl"), "shuffle": False},
        "oracle.name": f"{folder / 'flat.py'}:reward",
    }
    return {**changes, **{f"alarms.spread.{name}": value for name, value in rule.items()}}
