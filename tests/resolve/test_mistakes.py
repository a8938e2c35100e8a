"""Common mistakes, by kind. `oat check` and `oat train` end with exit code 2 and the same message, which says
where, what, and how to correct it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat
from mistakes import ARITHMETIC, CODE, CODE_OF_USERS, COLUMNS, RUN, SHAPES, TYPOS, UNREAD, Mistake, write
from mistakes_of_models import LONG_SEARCHES, MODELS, TEMPLATES, TOO_LARGE, VOCABULARIES

KINDS = {
    "typo": TYPOS,
    "shape": SHAPES,
    "unread": UNREAD,
    "arithmetic": ARITHMETIC,
    "column": COLUMNS,
    "model": MODELS,
    "template": TEMPLATES,
    "vocabulary": VOCABULARIES,
    "memory": TOO_LARGE,
    "code": CODE_OF_USERS,
}


def test_there_are_enough_of_each_kind() -> None:
    assert {kind: len(table) for kind, table in KINDS.items() if len(table) < 5} == {}


def cases() -> Iterator[Any]:
    for kind, table in KINDS.items():
        for name, mistake in table.items():
            yield pytest.param(
                mistake, id=f"{kind}: {name}", marks=[pytest.mark.slow] if name in LONG_SEARCHES else []
            )


@pytest.mark.sample(
    slow=("memory: weights and moments",),
    instead="tests/learner/test_precision.py tests the refusal of runs that do not fit, with measured tokens",
    seconds=8.6,
)
@pytest.mark.parametrize("mistake", [*cases()])
def test_a_mistake_is_one_message(
    mistake: Mistake,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world.folder / "model", "model")
    for name in ("train.jsonl", "held_out.jsonl", "reward.py"):
        shutil.copy(world.folder / name, name)
    write("mine.py", (world.folder / "reward.py").read_text(encoding="utf-8") + CODE)
    text = RUN
    for old, new in mistake.changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    write("run.yaml", text)
    if mistake.prepare is not None:
        mistake.prepare()
    before = sorted(tmp_path.rglob("*"))
    messages = []
    for command in ("check", "train"):
        capsys.readouterr()
        assert oat(command, "run.yaml") == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        told = [line for line in printed.err.splitlines(True) if not line.endswith(" ...\n")]
        assert len(told) == 1
        assert told[0].startswith(f"oat {command}: ")
        messages.append(
            re.sub(
                r"\S+ GB of memory are free",
                "# GB of memory are free",
                told[0].removeprefix(f"oat {command}: "),
            )
        )
    assert messages[0] == messages[1]
    said = [part if part[0] != "@" else place(text, part[1:]) for part in mistake.said]
    assert [part for part in said if part not in messages[0]] == [], messages[0]
    assert sorted(file for file in tmp_path.rglob("*") if "__pycache__" not in file.parts) == before, (
        "it leaves nothing behind"
    )


def test_what_lies_beside_the_configuration_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths are relative to the working directory. If a missing file exists beside the configuration, the
    message says so."""
    shutil.copytree(world.folder / "model", tmp_path / "model")
    for name in ("train.jsonl", "held_out.jsonl", "reward.py"):
        shutil.copy(world.folder / name, tmp_path)
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    flags: list[str] = []
    for field, value in {
        "model.path": "model",
        "prompts.path": "train.jsonl",
        "evaluation.path": "held_out.jsonl",
        "oracle.name": "reward.py:reward",
    }.items():
        for command in ("check", "train"):
            assert oat(command, "../run.yaml", *flags) == 2
            error = capsys.readouterr().err
            assert field in error
            assert (
                f"; there is ../{value.split(':')[0]}, and paths are taken from the working directory"
                in error
            )
        flags += [f"--{field}", f"../{value}"]
    assert oat("check", "../run.yaml", *flags) == 0
    assert oat("check", "../run.yaml", *flags, "--model.path", "modl") == 2
    assert (
        f"there is no directory modl in {tmp_path / 'elsewhere'}, from where relative paths are taken, and it"
    ) in capsys.readouterr().err


AFTER_A_RUN = (
    ("oracle.name", "mine.py:rewrd", "has no rewrd"),
    ("model.path", "modl", "there is no directory"),
    ("prompts.prompt_key", "promt", "did you mean `prompt`?"),
    ("engine.cache_gb", "1e-6", "keys and values of"),
    ("learner.learning_rate", "0.1", "holds a run of another configuration"),
)


@pytest.mark.slow(instead="test_a_mistake_is_one_message", seconds=2.0)
def test_a_mistake_comes_before_what_differs_from_the_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1})
    write("mine.py", CODE)
    assert oat("train", config) == 0
    for field, value, said in AFTER_A_RUN:
        for command in ("check", "train"):
            capsys.readouterr()
            assert oat(command, config, f"--{field}", value) == 2
            assert said in capsys.readouterr().err, (command, field)


def place(text: str, start: str) -> str:
    """Return the file and the number of the line that begins with `start`; the file alone if `start` is only
    ": "."""
    lines = [
        number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(start.strip())
    ]
    if start.startswith(": "):
        return "run.yaml:"
    assert len(lines) == 1, start
    return f"run.yaml:{lines[0]}"
