"""The commands of docs/watching.md work, and the output in it is the real one."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import yaml
from fixtures import World, logged, oat
from terminal import Seen, in_a_terminal

from oat.config.load import load_config
from oat.resolve.resolve import resolve
from oat.tracking.sinks import sinks_of

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """Return the page's code of a kind."""
    found = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found
    return "".join(found)


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `runs/mine`, a run with another seed, and a run with another learning rate. Their
    tracking is the page's own configuration without TensorBoard."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "runs").mkdir()
    tracking = yaml.safe_load(block("yaml"))["tracking"]
    assert len(tracking.pop("sinks")) == 3
    for name, changes in {
        "mine": {},
        "seed1": {"seed": 1},
        "faster": {"learner.learning_rate": 0.01},
    }.items():
        run_dir = str(folder / "runs" / name)
        config = world.config(
            "grpo", folder, {"run_dir": run_dir, "stop.max_queries": 4000, "tracking": tracking, **changes}
        )
        assert logged(folder / "log", "train", config) == 0, (folder / "log").read_text()  # type: ignore[misc]
    return folder


@pytest.mark.slow(instead="test_the_lines_that_it_shows, and the tests of each command", seconds=2.3)
def test_its_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for line in block("sh").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "oat"
        assert oat(*arguments) == 0
    assert {path.name for path in folder.glob("*.png")} == {"plot.png", "rewards.png"}
    assert {path.name for path in folder.glob("*.csv")} == {
        *("plot.csv", "rewards.csv", "numbers.csv", "responses.csv")
    }
    with (folder / "rewards.csv").open(newline="") as text:
        head, *rows = csv.reader(text)
    assert head == ["line", "runs", "queries", "reward/mean", "low", "high"]
    assert {row[0] for row in rows} == {"mine, seed1", "faster"}


def test_its_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    exec(block("python"), {})
    printed = capsys.readouterr().out
    assert "torch" in printed
    assert "train" in printed


def test_its_configuration(world: World, tmp_path: Path) -> None:
    config = world.config("grpo", tmp_path)
    config.write_text(config.read_text() + block("yaml"))
    sinks = sinks_of(resolve(*load_config(config)).config.tracking)
    assert [(sink.name, sink.samples) for sink in sinks] == [
        ("tensorboard", False),
        ("wandb", True),
        ("mlflow", False),
    ]
    assert [sink.options.get("mode") for sink in sinks] == [None, "offline", None]


def test_the_files_that_it_lists(folder: Path) -> None:
    listed = set(re.findall(r"^\| `([\w.-]+?)/?` \|", PAGE.partition("## Sinks")[0], re.MULTILINE)) - {
        "actors",
        "logs",
        "sinks",
    }
    assert listed == {path.name for path in (folder / "runs" / "mine").iterdir()} - {
        "lock",
        "checkpoints",
    } - {
        "ledger.sqlite-shm",
        "ledger.sqlite-wal",
    }


def test_the_lines_that_it_shows(world: World, tmp_path: Path) -> None:
    """The page's picture of the display has the real rows in the real order."""
    config = world.config("grpo", tmp_path, {"stop.max_queries": 4000})
    seen: Seen = in_a_terminal(lambda: oat("train", config))
    shown = [line for line in block("text").splitlines() if not line.startswith("step 40/80")]
    names = [re.split(r" {2,}", line)[0] for line in shown]
    ended = [re.split(r" {2,}", line)[0] for line in seen.lines if re.match(r"\S+ {2,}", line)]
    assert names == [*ended, "left", "now"]
