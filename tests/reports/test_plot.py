"""`oat plot`: the numbers of a line and its band, which runs form one line, and the name of a line."""

import csv
import json
import re
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures import Finished, World, oat
from matplotlib.figure import Figure

from oat.config.load import load_config, to_yaml
from oat.reports.plot import lines_of
from oat.reports.plot_labels import differences, directory_labels
from oat.resolve.resolve import resolve

Make = Callable[..., Path]


@pytest.fixture
def make(world: World, tmp_path: Path) -> Make:
    """Return a function that makes a run directory with a resolved configuration and the given rows."""

    def made(name: str, rows: Sequence[dict[str, Any]], algorithm: str = "grpo", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = world.config(
            algorithm, folder, {field.replace("__", "."): value for field, value in changes.items()}
        )
        (folder / "config.yaml").write_text(to_yaml(resolve(*load_config(config)).config))
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows))
        )
        return folder

    return made


def curve(*values: float, name: str = "reward/mean") -> list[dict[str, Any]]:
    return [
        {name: value, "oracle/queries": 10.0 * step, "time/step_s": 2.0, "response/tokens": 5.0}
        for step, value in enumerate(values)
    ]


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def distances(*values: float, step: float = 1.0) -> list[dict[str, Any]]:
    """Return rows of a run that is evaluated at every second step. Its gold score falls when its distance is
    above 4."""
    rows: list[dict[str, Any]] = []
    for value in values:
        rows += [
            {"eval/kl": value, "eval/sampled": step * value, "eval/gold_sampled": min(value, 8 - value)},
            {"reward/mean": 1.0},
        ]
    return rows


def table(tmp_path: Path, *arguments: object) -> list[dict[str, str]]:
    assert oat("plot", *arguments, "--out", tmp_path / "out.csv") == 0
    return read(tmp_path / "out.csv")


def test_two_real_runs(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs differ in the seed only. The line is their mean at every evaluation, and the band reaches from
    one to the other."""
    evaluated = []
    for seed in (0, 1):
        config = world.config("grpo", tmp_path, {"seed": seed, "run_dir": str(tmp_path / f"s{seed}")})
        assert oat("train", config) == 0
        rows = [
            json.loads(line) for line in (tmp_path / f"s{seed}" / "metrics.jsonl").read_text().splitlines()
        ]
        evaluated.append([row["eval/sampled"] for row in rows if "eval/sampled" in row])
    capsys.readouterr()
    assert oat("plot", tmp_path / "s0", tmp_path / "s1", "--out", tmp_path / "plots" / "a.png") == 0
    png, numbers = tmp_path / "plots" / "a.png", tmp_path / "plots" / "a.csv"
    assert capsys.readouterr().out == f"oat plot: eval/sampled written to {png} and {numbers}\n"
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1200
    assert height > 600
    found = read(numbers)
    assert [(row["line"], row["runs"], row["steps"]) for row in found] == [
        ("s0, s1", "2", step) for step in ("0", "2", "4")
    ]
    for row, pair in zip(found, zip(*evaluated, strict=True), strict=True):
        assert [float(row[name]) for name in ("eval/sampled", "low", "high")] == pytest.approx(
            [sum(pair) / 2, min(pair), max(pair)]
        )
    assert any(row["low"] != row["high"] for row in found)


def test_points_that_lie_elsewhere_are_averaged_between(make: Make, tmp_path: Path) -> None:
    """One run has points at 0, 10 and 20 queries, the other at 0, 20 and 40. At 10 the second run is
    interpolated. After 20 there is no point, since the first run has ended."""
    first = make("a", curve(1.0, 2.0, 3.0))
    second = make(
        "b", [{**row, "oracle/queries": 20.0 * step} for step, row in enumerate(curve(3.0, 7.0, 9.0))], seed=1
    )
    found = table(tmp_path, first, second, "--metric", "reward/mean", "--against", "queries")
    numbers = [[float(row[name]) for name in ("queries", "reward/mean", "low", "high")] for row in found]
    assert numbers == [[0, 2, 1, 3], [10, 3.5, 2, 5], [20, 5, 3, 7]]


@pytest.mark.parametrize(
    ("against", "column", "places"), [("steps", "steps", [0, 1, 2]), ("tokens", "tokens", [5, 10, 15])]
)
def test_axes(make: Make, tmp_path: Path, against: str, column: str, places: list[int]) -> None:
    found = table(tmp_path, make("a", curve(1.0, 2.0, 3.0)), "--against", against)
    assert [int(row[column]) for row in found] == places
    assert (found[0]["line"], found[0]["runs"], found[0]["reward/mean"], found[0]["low"]) == (
        "a",
        "1",
        "1",
        "1",
    )


def test_pairs_are_counted_from_zero_and_never_fall(make: Make, tmp_path: Path) -> None:
    """The first row, and a row that a step without paid pairs made, have no count."""
    counts = (None, 4.0, None, 12.0)
    rows = [
        {"reward/mean": float(step), **({} if count is None else {"oracle/pairs": count})}
        for step, count in enumerate(counts)
    ]
    found = table(tmp_path, make("a", rows, algorithm="dpo"), "--against", "pairs")
    assert [(row["pairs"], row["reward/mean"]) for row in found] == [("0", "0"), ("4", "2"), ("12", "3")]


def test_a_real_run_against_its_pairs(finished: Finished, tmp_path: Path) -> None:
    """The win rate of the evaluations, and the posterior gap of each step that chose pairs."""
    world = finished.world
    ensemble = {"members": 3, "hidden": 8, "batch": 8, "steps": 2}
    changes = {
        "oracle.name": f"{world.folder / 'reward.py'}:first_is_longer",
        "explorer": {"name": "ensemble", "samples": 4, "ensemble": ensemble},
    }
    run = finished.only_read("dpo", changes)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for metric, count in (("eval/sampled_win_rate", 3), ("explorer/gap", 4)):
        expected = [(row.get("oracle/pairs", 0.0), row[metric]) for row in rows if metric in row]
        assert len(expected) == count
        assert expected[-1][0] > expected[0][0]
        found = table(tmp_path, run, "--against", "pairs", "--metric", metric)
        assert [(float(row["pairs"]), float(row[metric])) for row in found] == expected


def test_time_counts_steps_evaluations_and_saves(make: Make, tmp_path: Path) -> None:
    rows = curve(1.0, 2.0, 3.0)
    rows[0] |= {"time/evaluate_s": 3.5, "time/step_s": 0.0}
    rows[2] |= {"time/save_s": 1.0}
    assert [float(row["seconds"]) for row in table(tmp_path, make("a", rows), "--against", "time")] == [
        3.5,
        5.5,
        8.5,
    ]


def test_what_is_not_finite_or_not_there_is_left_out(make: Make, tmp_path: Path) -> None:
    rows = curve(1.0, float("nan"), 3.0, 4.0)
    del rows[2]["reward/mean"]
    run = make("a", rows)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')  # a run that is being written
    assert [row["steps"] for row in table(tmp_path, run)] == ["0", "3"]


def test_a_line_is_labelled_by_directories_and_by_what_differs(make: Make) -> None:
    base = make("a", curve(1.0, 2.0))
    rate = make("b", curve(1.0, 2.0), learner__learning_rate=1e-5)
    both = make("c", curve(1.0, 2.0), learner__learning_rate=1e-5, algorithm__kl_coef=0.5)
    other = make("d", curve(1.0, 2.0), algorithm="dpo", learner__learning_rate=1e-5)
    elsewhere = make("e", curve(1.0, 2.0), checkpoint__every=1, tracking__samples=0, seed=5)

    def labels(*runs: Path) -> list[str]:
        return [line.label for line in lines_of(runs, ["reward/mean"], "steps")]

    assert labels(base) == ["a"]
    assert labels(base, elsewhere) == ["a, e (2 runs)"]
    assert labels(base, rate, elsewhere) == [
        "a, e (2 runs): learning_rate 0.003",
        "b: learning_rate 1e-05",
    ]
    assert labels(base, both) == [
        "a: kl_coef 0, learning_rate 0.003",
        "c: kl_coef 0.5, learning_rate 1e-05",
    ]
    assert labels(base, other) == [
        "a: grpo, algorithm.samples 3, learning_rate 0.003",
        "d: dpo, algorithm.samples 2, learning_rate 1e-05",
    ], "options that one algorithm lacks follow from its name"


def test_the_same_directory_twice_is_one_run(make: Make, tmp_path: Path) -> None:
    run = make("a", curve(1.0, 2.0))
    assert {(row["line"], row["runs"]) for row in table(tmp_path, run, run / ".." / "a")} == {("a", "1")}


@pytest.mark.parametrize(
    ("directories", "labels"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/one/grpo", "runs/two/grpo", "dpo"], ["one/grpo", "two/grpo", "dpo"]),
        (["/x/grpo", "/grpo", "/y/x/grpo"], ["/x/grpo", "/grpo", "y/x/grpo"]),
        (["."], [Path.cwd().name]),
    ],
)
def test_a_directory_is_named_by_its_shortest_distinct_end(directories: list[str], labels: list[str]) -> None:
    assert directory_labels([Path(each) for each in directories]) == labels


@pytest.mark.parametrize(
    ("trees", "settings"),
    [
        ([{"a.x": 1, "b.x": 2}, {"a.x": 3, "b.x": 2}], [["a.x 1"], ["a.x 3"]]),
        ([{"a": True, "b": None}, {"a": False, "b": None}], [["a true"], ["a false"]]),
        ([{"e": None}, {"e.path": "p", "e.n": 1}], [["e none"], ["e given"]]),
        ([{"a.name": "p", "a.x": 1}, {"a.name": "q"}], [["name p"], ["name q"]]),
        (
            [{"a.name": "p", "a.x": 1}, {"a.name": "q"}, {"a.name": "p", "a.x": 2}],
            [["name p", "x 1"], ["name q"], ["name p", "x 2"]],
        ),
        ([{"oracle.name": "/a/r.py:f"}, {"oracle.name": "/a/r.py:g"}], [["r.py:f"], ["r.py:g"]]),
        ([{"oracle.name": "/a/r.py:f"}, {"oracle.name": "/b/r.py:f"}], [["/a/r.py:f"], ["/b/r.py:f"]]),
        ([{"a": "x" * 99 + "1"}, {"a": "x" * 99 + "2"}], [[f"a {'x' * 29}…{'x' * 29}{n}"] for n in "12"]),
        ([{"a": 1}], [[]]),
    ],
)
def test_settings_that_differ(trees: list[dict[str, Any]], settings: list[list[str]]) -> None:
    assert differences(trees) == settings


def test_nothing_in_the_picture_overlaps_or_is_cut(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The legend has all directories and settings, however long they are, and is beside the plot."""
    figures: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1]
    )
    odd = ["we$ird_{x}^2$", "_hidden", "new\nline", "\u65e5\u672c", "long-name-" * 20]
    runs = [make(name, curve(1.0, 2.0), algorithm__kl_coef=0.1 * n) for n, name in enumerate(odd)]
    assert oat("plot", *runs, "--metric", "reward/mean", "--out", tmp_path / "a.png") == 0
    metrics = [word for name in ("reward/mean", "response/tokens") for word in ("--metric", name)]
    assert oat("plot", runs[0], *metrics, "--out", tmp_path / "b.png") == 0
    for figure, title in zip(
        figures, ("reward/mean over steps, 5 runs", "reward/mean, response/tokens over steps"), strict=True
    ):
        (axes,), (legend,) = figure.axes, figure.legends
        renderer = figure.canvas.get_renderer()
        assert axes.get_title(loc="left") == title
        plot, below = axes.get_tightbbox(renderer), legend.get_window_extent(renderer)
        assert below.y1 <= plot.y0
        for part in (plot, below):
            assert 0 <= part.x0 < part.x1 <= figure.bbox.width
            assert 0 <= part.y0 < part.y1 <= figure.bbox.height
        assert len(legend.get_texts()) == (5 if figure is figures[0] else 3)


def test_a_metric_that_is_missing(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("a", curve(1.0, 2.0))
    assert oat("plot", run, "--metric", "reward/maen", "--out", tmp_path / "x.png") == 2
    assert (
        f"--metric reward/maen: {run} has no such metric; did you mean `reward/mean`? valid: "
        "oracle/queries, res"
    ) in capsys.readouterr().err
    assert oat("plot", run, "--metric", "frac_reward_zero_std", "--out", tmp_path / "x.png") == 2
    assert "has no such metric" in capsys.readouterr().err, (
        "it is known elsewhere, and these runs do not have ours"
    )
    assert oat("plot", run, "--metric", "reward", "--out", tmp_path / "x.png") == 2
    assert "--metric reward: it is called reward/mean here" in capsys.readouterr().err
    assert oat("plot", run, make("b", curve(1.0, name="user/mine"))) == 2
    assert "these runs share none of eval/sampled, reward/mean, loss/total" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_proxy_against_gold(make: Make, tmp_path: Path) -> None:
    """Scores are plotted against the distance. The distances of two seeds differ, so the mean is taken at
    equal distances. A run whose distance fell again is ordered by distance."""
    first, second = make("a", distances(0.0, 4.0, 2.0)), make("b", distances(0.0, 4.0, 8.0, step=3.0), seed=1)
    found = table(tmp_path, first, second, "--against", "kl")
    names = ("metric", "kl", "mean", "low", "high")
    numbers = [(row["metric"], *(float(row[name]) for name in names[1:])) for row in found]
    assert [row for row in numbers if row[0] == "eval/sampled"] == [
        ("eval/sampled", kl, 2 * kl, kl, 3 * kl) for kl in (0, 2, 4)
    ]
    assert [row for row in numbers if row[0] != "eval/sampled"] == [
        ("eval/gold_sampled", kl, kl, kl, kl) for kl in (0, 2, 4)
    ]
    roots = table(tmp_path, first, "--against", "sqrt_kl", "--metric", "eval/gold_sampled")
    assert [(float(row["sqrt_kl"]), float(row["eval/gold_sampled"])) for row in roots] == [
        (0, 0),
        (pytest.approx(2**0.5), 2),
        (2, 4),
    ]
    assert (
        oat(
            "plot",
            first,
            second,
            make("c", distances(0.0, 9.0), learner__learning_rate=1e-5),
            "--against",
            "kl",
            "--out",
            tmp_path / "a.png",
        )
        == 0
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert {row["line"] for row in read(tmp_path / "a.csv")} == {
        "a, b",
        "c",
    }


def test_estimates_of_a_distance_below_0_are_points_of_their_own(make: Make, tmp_path: Path) -> None:
    run = make("a", distances(-1e-8, -0.04, 1.0))
    roots = [
        float(row["sqrt_kl"])
        for row in table(tmp_path, run, "--against", "sqrt_kl", "--metric", "eval/sampled")
    ]
    assert roots == pytest.approx([-0.2, -1e-4, 1])


def test_what_cannot_be_plotted(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make("a", curve(1.0, 2.0))
    assert oat("plot", tmp_path / "nowhere") == 2
    assert "nowhere: holds no run" in capsys.readouterr().err
    assert oat("plot", make("new", [])) == 2
    assert "has no metrics yet" in capsys.readouterr().err
    assert oat("plot", run, "--out", "a.pdf") == 2
    assert "a.pdf: give a name that ends in .png" in capsys.readouterr().err
    assert oat("plot", run, "--against", "query") == 2
    assert (
        "--against is 'query'; did you mean `queries`? valid: kl, pairs, queries, sqrt_kl, steps, time, "
        "tokens" in capsys.readouterr().err
    )
    assert oat("plot", run, "--against", "pairs") == 2
    assert f"{run}: its rows have no oracle/pairs" in capsys.readouterr().err
    assert oat("plot", make("old", [{"reward/mean": 1.0}]), "--against", "tokens") == 2
    assert "its rows have no response/tokens" in capsys.readouterr().err
    assert oat("plot", run, "--against", "kl") == 2
    assert "eval/sampled: " in capsys.readouterr().err
    assert oat("plot", run, "--against", "kl", "--metric", "reward/mean") == 2
    assert (
        "its rows have no eval/kl, so it cannot be plotted against it; train with evaluation.kl: true"
        in capsys.readouterr().err
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert oat("plot", run) == 2
    assert re.search(
        r"a plot needs matplotlib \(.*\): pip install 'oat-align\[plot\]'; or give --out FILE.csv",
        capsys.readouterr().err,
    )
    assert not Path("plot.csv").exists()
    assert oat("plot", run, "--out", "plot.csv") == 0


def test_only_tables_of_plots_are_replaced(make: Make, tmp_path: Path) -> None:
    """A user's table may begin as those of `oat plot` do."""
    out, runs = tmp_path / "a.csv", [make("a", curve(1.0)), make("b", curve(2.0))]
    assert oat("plot", *runs, "--out", out) == 0
    written = out.read_text()
    assert oat("plot", runs[0], "--out", out) == 0
    rows = written.splitlines()
    users = [
        "line,runs,hits\n1,2,3\n",
        "".join(f"{row},{'my remark' if place == 0 else 'good'}\n" for place, row in enumerate(rows)),
        written + "and a note\n",
        written.replace(",low,", ",lowest,"),
        "line,runs\n",
    ]
    for text in users:
        out.write_text(text)
        assert oat("plot", *runs, "--out", out) == 2
        assert out.read_text() == text
