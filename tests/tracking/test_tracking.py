"""The files of rows of a run are cut back to the cursor and have each row once, for any text in them."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import Finished, World, damage_metrics, forked, kill_at, logged, make_group, make_questions, oat

from oat import Trainer
from oat.errors import ConfigError, DataError, DirectoryError, OatWarning
from oat.tracking.files import MAX_COLUMN, STREAMS, Tracking, step_line
from oat.types import Answer, Feedback, Item

ODD = 'a\u2028b\u0085c\x0bd\x1ce\r\n"ü😀'
"""A text with characters at which Python's `splitlines` breaks; there are seven besides "\\n"."""


def feedback(step: int, *texts: str) -> Feedback:
    groups = [make_group(number, text, "other") for number, text in enumerate(texts)]
    questions = make_questions(groups, "compare", step, oracle="o")
    pairs = zip(groups, questions, strict=True)
    return Feedback(
        step,
        tuple(
            Item(group, question, Answer(question.key, (0.9,), ("ok",), 2, by="o"), 0)
            for group, question in pairs
        ),
        0,
    )


@pytest.fixture(scope="module")
def whole(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps with checkpoints of the second and the last step."""
    return finished.copy("grpo", tmp_path_factory.mktemp("finished"), {"evaluation": None})


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().decode("utf-8").split("\n")[:-1]]


def written(folder: Path, steps: range, *, samples: int = 2, start: int = 0) -> Tracking:
    tracking = Tracking(folder, samples=samples)
    tracking.open(start)
    for step in steps:
        if step:
            tracking.advantages(step, [[step / 3, None]])
        tracking.row(step, {"b": step / 3, "a": 1.0}, feedback(step, ODD, "x", "y") if step else None)
    return tracking


def test_a_row_by_hand(tmp_path: Path) -> None:
    tracking = written(tmp_path, range(2))
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 0, "a": 1.0, "b": 0.0}\n{"step": 1, "a": 1.0, "b": 0.3333333333333333}\n'
    first, second = read(tmp_path / "samples.jsonl")
    assert (first["step"], first["prompt"], first["responses"]) == (
        1,
        [{"role": "user", "content": "p0"}],
        [ODD, "other"],
    )
    assert (second["label"], second["values"], second["marks"], second["oracle"], second["asked"]) == (
        0,
        [0.9],
        ["ok"],
        "o",
        [0, 1],
    )
    tracking.flush()
    tracking.close()


def test_no_samples_when_none_are_wanted(tmp_path: Path) -> None:
    written(tmp_path, range(3), samples=0)
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_a_sample_has_the_columns_that_the_reward_read(world: World, tmp_path: Path) -> None:
    """A row of samples has the columns of the data. Long values are cut, so that the row stays small."""
    columns = {
        "level": 3,
        "tests": ["a", {"b": None}],
        "text": "ü" * MAX_COLUMN,
        "source": "x" * 10**6,
        "table": [["1" * 100] * 100],
    }
    records = [{"prompt": "1+1=", **columns, "answer": "2"}] * 4
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"prompts.path": str(tmp_path / "train.jsonl"), "stop.max_steps": 1, "evaluation": None}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    path = tmp_path / "grpo" / "samples.jsonl"
    rows = read(path)
    assert len(rows) == 4
    for row in rows:
        assert {name: row["columns"][name] for name in ("level", "tests", "text")} == {
            name: columns[name] for name in ("level", "tests", "text")
        }
        assert row["columns"]["source"] == "x" * MAX_COLUMN + "... (1,000,000 characters)"
        assert row["columns"]["table"].startswith('[["111')
        assert row["columns"]["answer"] == row["reference"] == "2"
    assert path.stat().st_size < 4 * 5 * MAX_COLUMN


@pytest.mark.parametrize("cursor", [1, 2, 4])
def test_streams_are_cut_back_to_the_cursor(tmp_path: Path, cursor: int) -> None:
    written(tmp_path, range(5)).close()
    written(tmp_path, range(cursor + 1, 5), start=cursor).close()
    again = [(tmp_path / name).read_bytes() for name in STREAMS.values()]
    (tmp_path / "once").mkdir()
    written(tmp_path / "once", range(5)).close()
    assert again == [(tmp_path / "once" / name).read_bytes() for name in STREAMS.values()]
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == list(range(5))
    assert [row["step"] for row in read(tmp_path / "samples.jsonl")] == [
        step for step in range(1, 5) for _ in range(2)
    ]


def test_advantages_stay_if_the_row_of_their_step_was_not_written(tmp_path: Path) -> None:
    """A step that ended while its weights were evaluated has learned, and its row comes later."""
    written(tmp_path, range(4)).close()
    tracking = Tracking(tmp_path, samples=2)
    tracking.open(2, is_closed=False)
    tracking.close()
    left = {name: [row["step"] for row in read(tmp_path / name)] for name in STREAMS.values()}
    assert left == {"metrics.jsonl": [0, 1], "samples.jsonl": [1, 1], "advantages.jsonl": [1, 2]}


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    written(tmp_path, range(2)).close()
    written(tmp_path, range(1)).close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0]
    assert read(tmp_path / "samples.jsonl") == []


def test_a_torn_last_line_goes_wherever_it_was_torn(tmp_path: Path) -> None:
    """A crash may leave any beginning of the last line, even a part of a character. This rest is removed."""
    written(tmp_path, range(3), samples=1).close()
    path = tmp_path / "samples.jsonl"
    *_, last = path.read_bytes().split(b"\n")[:-1]
    whole = path.read_bytes()[: -len(last) - 1]
    inside_characters = [place for place, byte in enumerate(last) if byte & 0xC0 == 0x80]
    for size in (0, 1, len(last) // 2, *inside_characters, len(last) - 1, len(last)):
        path.write_bytes(whole + last[:size])
        Tracking(tmp_path, samples=1).open(2)
        assert path.read_bytes() == whole, size


NO_ROWS = [b"", b"null", b"[]", b"3", b'{"a": 1}', b'{"step": "1"}', b"\xff\xfe", b"[" * 100_000]


def test_lines_that_are_no_rows_go_and_are_named(tmp_path: Path) -> None:
    rows = [b'{"step": 0, "a": 1}', b'{"step": 1, "a": 2}', b'{"step": 2, "a": 3}']
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_bytes(b"\n".join([rows[0], *NO_ROWS, *rows[1:], *NO_ROWS]) + b"\n")
    tracking = Tracking(tmp_path, samples=1)
    with pytest.warns(OatWarning) as said:
        tracking.open(1)
    tracking.close()
    assert [str(warning.message) for warning in said] == [
        (
            f"{tmp_path / 'metrics.jsonl'}: lines 2 to 9 cannot be read as metrics; the run goes on, and "
            "what cannot be read is taken out"
        ),
        (
            f"{tmp_path / 'samples.jsonl'}: 8 of its first 10 lines cannot be read as samples; the run goes "
            "on, and what cannot be read is taken out"
        ),
    ]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_bytes() == rows[0] + b"\n" + rows[1] + b"\n"


ADVANTAGES = [b'{"step": %d, "advantages": [[0.5, null]]}' % step for step in range(1, 5)]
NO_ADVANTAGES = [
    *NO_ROWS,
    b'{"step": true, "advantages": [[0.5]]}',
    b'{"step": 0, "advantages": [[0.5]]}',
    *(b'{"step": 1, "advantages": %s}' % value for value in (b"null", b"[0.5]", b"[[NaN]]", b"[[true]]")),
]


@pytest.mark.parametrize(
    ("lines", "said", "left"),
    [
        (ADVANTAGES, None, [1, 2, 3]),
        (ADVANTAGES[1:], None, [2, 3]),
        (ADVANTAGES[3:], None, []),
        (None, None, []),
        ([], "there is no row of steps 1 to 3;", []),
        ([b"mine"], "line 1 cannot be read as advantages, and there is no row of steps 1 to 3;", []),
        ([*ADVANTAGES[:1], *ADVANTAGES[2:]], "there is no row of step 2;", [1, 3]),
        ([*ADVANTAGES, *ADVANTAGES[1:]], "there are several rows of steps 2 to 3 .*;", [1, 2, 3]),
        ([*NO_ADVANTAGES, *ADVANTAGES], "lines 1 to 14 cannot be read as advantages;", [1, 2, 3]),
    ],
    ids=["whole", "begun before", "rolled back", "none", "emptied", "foreign", "a gap", "doubled", "damaged"],
)
def test_each_step_has_one_line_of_advantages(
    tmp_path: Path, lines: list[bytes] | None, said: str | None, left: list[int]
) -> None:
    """A continued run names what is wrong, once if it can be mended. Then it writes the next steps'."""
    path = tmp_path / "advantages.jsonl"
    written(tmp_path, range(4)).close()
    path.unlink()
    if lines is not None:
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    tracking = Tracking(tmp_path, samples=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracking.open(3)
        tracking.open(3)
    told = [str(warning.message) for warning in caught if warning.category is OatWarning]
    # a gap stays, and is named at each start
    assert len(told) == (0 if said is None else 2 if "row of step 2;" in said else 1)
    assert all(re.search(said or "", message) for message in told)
    tracking.advantages(4, [[None]])
    tracking.advantages(5, [[0.25]])
    tracking.close()
    assert [row["step"] for row in read(path)] == [*left, *([4] if left else []), 5]


@pytest.mark.parametrize("name", STREAMS.values())
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    for make in (Path.mkdir, os.mkfifo):
        make(tmp_path / name)
        for step in (0, 1):
            with pytest.raises(DataError, match=name):
                Tracking(tmp_path, samples=1).open(step)
        (tmp_path / name).rename(tmp_path / make.__name__)


@pytest.mark.sample("continued-damaged", "forked-a hole of zeros", seconds=3.5)
@pytest.mark.fault("R8")
@pytest.mark.parametrize(
    ("lines", "said", "left"),
    [
        ({1: b'{"step": 1, "a'}, "line 2 cannot be read as metrics, and there is no row of step 1", [0, 2]),
        ({1: None}, "there is no row of step 1", [0, 2]),
        ({2: None, 3: None, 4: None}, "there is no row of step 2", [0, 1]),
        ({step: None for step in range(5)}, "there is no row of steps 0 to 2", []),
        (
            {0: None, 1: b"\0" * 30, 2: None},
            "line 1 cannot be read as metrics, and there is no row of steps 0 to 2",
            [],
        ),
        ({1: b'{"step": 2}', 2: b'{"step": 1}'}, "the rows are not in the order of their steps", [0, 2, 1]),
    ],
    ids=["damaged", "deleted", "deleted at the end", "all deleted", "a hole of zeros", "in another order"],
)
@pytest.mark.parametrize("how", ["continued", "forked"])
def test_rows_that_are_lost_between_two_lives_are_named(
    whole: Path,
    tmp_path: Path,
    figure: Callable[[str], None],
    how: str,
    lines: dict[int, bytes | None],
    said: str,
    left: list[int],
) -> None:
    """Rows of metrics are missing when a run is continued. Missing rows before the checkpoint are named; rows
    after it are made again."""
    run_dir = tmp_path / "grpo"
    shutil.copytree(whole, run_dir)
    (run_dir / "checkpoints" / "latest").write_text("step_00000002\n")
    damage_metrics(run_dir, lines)
    command = ["train", run_dir / "config.yaml", "--run_dir", run_dir]
    if how == "forked":
        command = [
            "train",
            run_dir / "config.yaml",
            "--run_dir",
            tmp_path / "fork",
            "--from",
            f"{run_dir}@2",
            "--seed",
            1,
        ]
    if how == "forked" and not left and 1 not in lines:
        (run_dir / "metrics.jsonl").unlink()
    with pytest.warns(OatWarning, match=rf"metrics\.jsonl: {said}; the run goes on"):
        assert oat(*command) == 0
    assert [
        row["step"] for row in read((tmp_path / "fork" if how == "forked" else run_dir) / "metrics.jsonl")
    ] == [*left, 3, 4]
    figure("damaged or deleted rows of metrics are reported by name")


@pytest.mark.parametrize("name", STREAMS.values())
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_lost_under_a_run_ends_it(tmp_path: Path, name: str, is_replaced: bool) -> None:
    """A run ends if a file of its rows is moved or replaced, since nobody would find the later rows."""
    tracking = written(tmp_path, range(2))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).rename(tmp_path / "other")
    if is_replaced:
        (tmp_path / name).write_bytes(whole)
    for write in (lambda: tracking.row(2, {"a": 1.0}), tracking.flush):
        with pytest.raises(
            DirectoryError, match=f"{name}: was moved, removed or replaced while a run worked with it"
        ):
            write()
    tracking.close()
    (tmp_path / name).write_bytes(whole)
    written(tmp_path, range(2, 3), start=1).close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_the_line_for_people() -> None:
    values = {"reward/mean": 0.51234, "unknown": 1.0, "loss/total": 2.0}
    shown = ["loss/total", "reward/mean", "user/other"]
    assert step_line(3, 10, values, shown) == "step 3/10  loss/total 2  reward/mean 0.5123"
    assert step_line(3, None, values, []) == "step 3"


def test_metrics_of_the_line_must_be_known(world: World, tmp_path: Path) -> None:
    def shown(*names: str) -> Trainer:
        return Trainer(
            model=str(world.folder / "model"),
            oracle=world.oracle,
            prompts=str(world.folder / "train.jsonl"),
            run_dir=tmp_path / "run",
            tracking={"shown": [*names]},
        )

    shown("eval/pass@8", "oracle/source/mine", "user/mine", "kl/reference")
    for name, hint in {
        "frac_reward_zero_std": "is called reward/zero_spread_frac here",
        "completions/min_length": "oat does not report this metric",
        "reward/maen": "did you mean `reward/mean`",
        "step": "always begins with `step`",
    }.items():
        with pytest.raises(ConfigError, match=hint):
            shown("reward/mean", name)


@pytest.mark.slow(
    instead="tests/tracking/test_sinks.py::test_each_row_once_over_a_kill_and_a_fork_begins_its_own",
    seconds=3.2,
)
@pytest.mark.parametrize("kill", [1, 3, 4])
def test_each_step_stands_once_after_a_kill(world: World, tmp_path: Path, kill: int) -> None:
    config = world.config("grpo", tmp_path, {"evaluation": None})

    def killed() -> int:
        from oat.learner.learner import Learner

        kill_at(Learner, "update", kill)
        return oat("train", config)

    forked(killed, tmp_path / "log")
    assert logged(tmp_path / "log", "train", config) == 0
    assert [row["step"] for row in read(tmp_path / "grpo" / "metrics.jsonl")] == list(range(5))
    assert [row["step"] for row in read(tmp_path / "grpo" / "samples.jsonl")] == [
        step for step in range(1, 5) for _ in range(4)
    ]
