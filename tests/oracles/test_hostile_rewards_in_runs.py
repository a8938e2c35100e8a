"""Whole runs with reward functions that raise, return or leave behind bad values."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures import World, make_group, make_questions, oat

from oat.commands.digest import digest_run
from oat.data.sources import open_records
from oat.errors import (
    ConfigError,
    DataError,
    OracleError,
)
from oat.oracles.isolated import Isolated
from oat.plugins import loading as plugins

HOSTILE = """
import asyncio, random, sys


def scores(completions):
    return [text.count("a") + 0.1 * text.count("b") for text in completions]


def tidy(prompts, completions):
    return scores(completions)


def leaves(prompts, completions):
    import numpy, torch
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True)
    sys.stdout = open("/dev/null", "w")
    return scores(completions)


async def leaves_later(prompts, completions):
    import numpy, torch
    await asyncio.sleep(0.001)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return scores(completions)


class Mute(BaseException):
    def __str__(self):
        raise Mute


def base(prompts, completions):
    raise Mute


def cancelled(prompts, completions):
    raise asyncio.CancelledError


def left(prompts, completions):
    raise GeneratorExit


def interrupted(prompts, completions):
    raise KeyboardInterrupt


def long(prompts, completions):
    raise ValueError("x" * 20_000_000)


def unordered(prompts, completions):
    return {1.0}
"""


def test_a_run_is_what_it_would_be(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(HOSTILE)
    digests = []
    for function in ("tidy", "leaves", "leaves_later"):
        folder = tmp_path / function
        folder.mkdir()
        config = world.config(
            "grpo", folder, {"oracle.name": f"{tmp_path / 'mine.py'}:{function}", "stop.max_steps": 2}
        )
        assert oat("train", config) == 0
        assert "oat train: finished" in capsys.readouterr().out
        found = digest_run(folder / "grpo")
        digests.append((found["weights"], found["optimiser"], found["metrics"]))
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("name", ["base", "cancelled", "left", "interrupted", "long", "unordered"])
def test_a_run_ends_with_one_message(
    world: World, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(HOSTILE)
    changes = {"oracle.name": f"{tmp_path / 'mine.py'}:{name}", "evaluation": None}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"mine.py:{name} r" in said
    assert len(said.replace(str(tmp_path), "")) < 1000


@pytest.mark.sample("base", "interrupted", seconds=0.6)
@pytest.mark.parametrize("name", ["base", "cancelled", "left", "interrupted", "long", "unordered"])
def test_in_a_worker_likewise(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(HOSTILE)
    oracle = Isolated(f"{tmp_path / 'mine.py'}:{name}", timeout_s=20.0)
    try:
        tickets = oracle.submit(make_questions([make_group(0, "a")], "score", 0, oracle="isolated"))
        with pytest.raises(OracleError) as found:
            oracle.collect(tickets, 20.0)
    finally:
        oracle.close()
    assert f"mine.py:{name} r" in str(found.value)
    assert len(str(found.value).replace(str(tmp_path), "")) < 1000
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    "line",
    [
        "raise BaseException('x' * 20_000_000)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
    ],
)
def test_code_that_cannot_be_imported_and_data_that_cannot_be_had(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError) as found:
        plugins.load_symbol(f"{tmp_path / 'mine.py'}:reward")
    assert "fails when imported: " in str(found.value)
    assert len(str(found.value).replace(str(tmp_path), "")) < 1000

    def records() -> Iterator[dict[str, str]]:
        yield {"prompt": "a"}
        exec(line)

    with pytest.raises(DataError) as wrong:
        list(open_records(records, "mine.py:records"))
    assert "mine.py:records raised" in str(wrong.value)
    assert len(str(wrong.value)) < 1000
