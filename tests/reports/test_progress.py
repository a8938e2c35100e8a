"""The display of a run: lines that stay in place in a terminal, one line per step elsewhere, and no progress
bar of another library."""

import itertools
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat, told
from rich.text import Text
from terminal import Seen, in_a_terminal
from tiny_models import build_config, save_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from oat.evaluation.evaluation import Evaluation
from oat.learner.learner import Learner
from oat.models.loading import load_lm, load_tokenizer, save_lm
from oat.reports import progress
from oat.reports.progress import counted, in_words, sparkline


def row_of(seen: Seen, name: str) -> list[str]:
    """Return the cells of a line of the display, at the end."""
    (line, *more) = [line for line in seen.lines if re.match(rf"{name} {{2,}}", line)]
    assert not more, seen.raw
    return re.split(r" {2,}", line)


def drawn_often() -> None:
    """Draw the display five times as often. For a forked child only."""
    progress._DRAWN_EACH_S = 0.05


def slowly(owner: Any, name: str) -> None:
    """Let a call take as long as three such drawings. For a forked child only."""
    original = getattr(owner, name)

    def slow(*arguments: Any, **kwargs: Any) -> Any:
        time.sleep(0.15)
        return original(*arguments, **kwargs)

    setattr(owner, name, slow)


class Growing(progress.Display):
    """A display that has another number of lines each time it is drawn."""

    def __init__(self) -> None:
        super().__init__(run=None, about=None)  # type: ignore[arg-type]
        self.drawings = itertools.count()

    def lines(self) -> Text:
        return Text("\n".join(["of the display"] * (1 + next(self.drawings) % 3)))


def test_lines_that_are_printed_while_the_display_is_drawn() -> None:
    """Nothing of the display stays above them."""

    def watched() -> int:
        progress._DRAWN_EACH_S = 0.0001
        display = Growing()
        with display.drawn():
            for number in range(200):
                display.console.print(f"permanent {number}")
        return 0

    seen = in_a_terminal(watched)
    lines = [line for line in seen.lines if line]
    assert lines[:200] == [f"permanent {number}" for number in range(200)]
    assert set(lines[200:]) == {"of the display"}
    assert len(lines) <= 203


def test_a_run_in_a_terminal(world: World, tmp_path: Path) -> None:
    config = world.config("grpo", tmp_path, {"stop.max_queries": 1000, "oracle.repeats": 0})

    def watched() -> int:
        drawn_often()
        slowly(Learner, "update")
        slowly(Evaluation, "run")
        return oat("train", config)

    seen = in_a_terminal(watched)
    assert seen.code == 0, seen.raw
    assert row_of(seen, "step")[1] == "4 of 4"
    assert row_of(seen, "queries") == ["queries", "48 of 1,000", "952 left"]
    for name, count in {"reward/mean": 4, "eval/sampled": 3, "response/truncated_frac": 4}.items():
        _, value, blocks = row_of(seen, name)
        float(value)
        assert set(blocks) <= set("▁▂▃▄▅▆▇█")
        assert len(blocks) == count
    evaluated = [line for line in seen.lines if re.match(r"step \d/4  eval/sampled ", line)]
    assert [line.split()[1] for line in evaluated] == ["0/4", "2/4", "4/4"], (
        "evaluations leave a line each, other steps none"
    )
    assert not any(line.startswith(("now ", "left ")) for line in seen.lines), (
        "nothing is being done at the end"
    )
    for doing in ("learning", "evaluating"):
        assert f"{doing} " in seen.raw
    assert re.search(r"about \d+ s", seen.raw)
    assert "oat train: finished" in "".join(seen.lines[-4:])
    assert seen.is_whole
    assert re.fullmatch("(lh)+h", "".join(seen.cursor)), "the cursor is never left hidden"


@pytest.mark.slow(instead="test_a_run_in_a_terminal", seconds=1.3)
def test_a_continued_run_shows_its_whole_course(world: World, tmp_path: Path) -> None:
    """A continued run shows its course from the start, also if the earlier process wrote rows after the
    checkpoint. The display says that the reward has changed."""
    reward = tmp_path / "reward.py"
    shutil.copy(world.folder / "reward.py", reward)
    config = world.config(
        "grpo", tmp_path, {"stop.max_steps": 8, "checkpoint.every": 4, "oracle.name": f"{reward}:reward"}
    )
    assert (
        forked(lambda: kill_at(Learner, "update", 7) or oat("train", config), tmp_path / "log")
        == -signal.SIGKILL
    )
    reward.write_text(reward.read_text() + "\n# changed\n")
    seen = in_a_terminal(lambda: oat("train", config, "--accept-changed", "reward"))
    assert row_of(seen, "oracle")[1:] == ["changed 1x", "first before step 8"]
    assert row_of(seen, "step")[1] == "8 of 8"
    assert len(row_of(seen, "reward/mean")[2]) == 8
    assert len(row_of(seen, "eval/sampled")[2]) == 5


@pytest.mark.sample("signals1-*", seconds=1.2)
@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGINT,), 130), ((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGKILL,), -9)],
)
def test_a_run_that_is_ended_leaves_the_terminal_whole(
    world: World, tmp_path: Path, signals: tuple[int, ...], code: int
) -> None:
    config = world.config("grpo", tmp_path)

    def ended() -> int:
        kill_at(*named("oat.learner.learner:Learner.update"), 3, signals=signals)
        return oat("train", config)

    seen = in_a_terminal(ended)
    assert seen.code == code
    assert seen.is_whole
    assert seen.cursor[-1] == "h"
    assert "Traceback" not in seen.raw
    if code > 0:
        assert "the same command goes on" in "".join(seen.lines[-4:])


def test_what_a_reward_prints_stands_above_the_lines(world: World, tmp_path: Path) -> None:
    """Text that a reward function prints appears unchanged above the display, even if it looks like
    markup. The display has the metrics that the user has named."""
    (tmp_path / "reward.py").write_text(
        "def reward(prompts, completions, **columns):\n    print('[/odd] :smile:')\n    return "
        "[float(len(text)) for text in completions]\n"
    )
    config = world.config(
        "grpo",
        tmp_path,
        {
            "oracle.name": f"{tmp_path / 'reward.py'}:reward",
            "stop.max_steps": 1,
            "evaluation": None,
            "tracking.shown": ["policy/entropy", "user/unknown"],
        },
    )
    seen = in_a_terminal(lambda: oat("train", config))
    assert seen.code == 0, seen.raw
    assert len(row_of(seen, "policy/entropy")[2]) == 1
    assert not any(line.startswith(("reward/mean ", "loss/total ")) for line in seen.lines)
    assert "[/odd] :smile:" in seen.lines


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    world: World, tmp_path: Path, terminal: str
) -> None:
    config = world.config("grpo", tmp_path, {"evaluation": None, "stop.max_steps": 2})

    def plain() -> int:
        os.environ["TERM"] = terminal
        return oat("train", config)

    seen = in_a_terminal(plain)
    assert "\x1b" not in seen.raw
    assert [line.split("  ")[0] for line in seen.lines if line.startswith("step")] == [
        "step 0/2",
        "step 1/2",
        "step 2/2",
    ]


def test_piped_there_is_one_line_a_step(world: World, tmp_path: Path) -> None:
    """A metric of the user's list that the first step lacks is named once; `eval/...` may come later."""
    shown = ["user/unknown", "response/length", "eval/best", "response/truncated_frac"]
    config = world.config("dpo", tmp_path, {"tracking.shown": shown})
    assert forked(lambda: told("train", config), tmp_path / "log") == 0
    text = (tmp_path / "log").read_text()
    assert "\x1b" not in text
    lines = [line.split("  ") for line in text.splitlines() if line.startswith("step")]
    assert [line[0] for line in lines] == [f"step {step}/4" for step in range(5)]
    assert [[part.split()[0] for part in line[1:]] for line in lines] == [[], *[[shown[1], shown[3]]] * 4]
    assert re.findall(r" lacks (\S+) \(", text) == ["user/unknown"]


def test_no_bars_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(tmp_path / "model", build_config("llama"))
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    try:
        AutoModelForCausalLM.from_pretrained(path)
        assert "Loading weights" in capsys.readouterr().err, "without us there is one"
        save_lm(load_lm(path), load_tokenizer(path), str(tmp_path / "again"))
        assert capsys.readouterr().err == ""
        AutoModelForCausalLM.from_pretrained(path)
        assert "Loading weights" in capsys.readouterr().err, "and what others load is theirs"
    finally:
        if not was_on:
            transformers_logging.disable_progress_bar()


def test_a_course_by_hand() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0]) == sparkline([float("nan"), 3.0, float("inf")]) == "▁"
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    assert sparkline([0.0, 1.0], "_.-~=+*#") == "_#"
    long = sparkline([float(number) for number in range(240)])
    assert (len(long), long[0], long[-1]) == (24, "▁", "█")
    assert list(long) == sorted(long)


def test_times_in_words() -> None:
    expected = {
        0.4: "0 s",
        89.0: "89 s",
        120.0: "2 min",
        3600.0: "60 min",
        7500.0: "2 h 05 min",
        360_000.0: "4 d 4 h",
    }
    assert {seconds: in_words(seconds) for seconds in expected} == expected


def test_steps_of_something_else_are_counted_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        with counted("making it", 1200) as count:
            for step in range(1, 1201):
                count(step)
        print("made")
        return 0

    seen = in_a_terminal(action)
    assert seen.code == 0
    assert seen.lines == ["making it: step 1,200 of 1,200", "made", ""]
    assert seen.raw.count("making it") == 1200
    assert action() == 0
    assert capsys.readouterr().out == "making it: 1,200 steps\nmade\n"
