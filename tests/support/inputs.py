"""Runs whose input files are changed before they are continued."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fixtures import World, forked, show_warnings
from fixtures import oat as command

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


REWARD = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

def reward(prompts, completions, **columns):
    from helper import worth

    return [worth(text) for text in completions]
"""


HELPER = "def worth(text):\n    return text.count('a') + 0.1 * text.count('b')\n"


def run(folder: Path, *arguments: object, before: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Run a command in a child, in `folder`. Return its exit code, or minus its signal, and its output."""

    def action() -> int:
        os.chdir(folder)
        show_warnings()
        before()
        return command(*arguments)

    (folder / "log").unlink(missing_ok=True)
    code = forked(action, folder / "log")
    return code, (folder / "log").read_text(encoding="utf-8")


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def told(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "environment.json").read_text())


def make(world: World, folder: Path, algorithm: str = "dpo", changes: dict[str, Any] | None = None) -> Path:
    """Make a folder with all input files of a run, and a configuration with relative paths only. Return the
    folder."""
    shutil.copytree(world.folder / "model", folder / "model")
    edit(folder / "model" / "tokenizer_config.json", chat_template=TEMPLATE)
    (folder / "reward.py").write_text(REWARD)
    (folder / "helper.py").write_text(HELPER)
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(world.folder / name, folder / name)
    own = {
        "model.path": "model",
        "prompts.path": "train.jsonl",
        "evaluation.path": "held_out.jsonl",
        "oracle.name": "reward.py:reward",
    }
    tree = world.tree(
        algorithm,
        Path("run"),
        {
            **own,
            "render.template": "tokenizer",
            "checkpoint.every": 1,
            "stop.max_steps": 2,
            **(changes or {}),
        },
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder


def edit(file: Path, *removed: str, **fields: Any) -> None:
    """Set fields of a JSON file, and remove others."""
    found = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    file.write_text(
        json.dumps({name: value for name, value in found.items() if name not in removed}), encoding="utf-8"
    )
