"""The fault table itself: every row has tests, and their results are joined, stored and written. A row is not
run again while the sources are unchanged."""

import ast
import functools
import json
import subprocess
from pathlib import Path

import pytest
import table
from fixtures import named
from points import POINTS

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--fault")


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(row): of the table")


def pytest_collection_modifyitems(config, items):
    wanted = (config.getoption("--fault"),)
    items[:] = [item for item in items if item.get_closest_marker("fault").args == wanted]
"""

TESTS = """
from pathlib import Path

import pytest


@pytest.mark.fault("R1")
@pytest.mark.parametrize("number", range(3))
def test_one(number, record_property):
    record_property("figure", "1 of 2 things")
    record_property("figure", f"at most 1e-{number} of something")


@pytest.mark.fault("R2")
def test_two():
    assert Path("mended").exists()


@pytest.mark.fault("R4")
@pytest.mark.parametrize("number", range(2))
def test_four(number, record_property):
    record_property("figure", "1 of 1 kills")
    with open("ran", "a") as file:
        file.write(str(number))
    assert number == 0 or Path("mended").exists()
"""


def marked(source: str) -> list[tuple[str, str, bool]]:
    """Return row, name and slowness of every test of a file that proves a row. The last value is True if
    `make test` leaves the test out."""
    if "pytest.mark.fault" not in source:
        return []
    tree, found = ast.parse(source), []
    own = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            inner = [each for mark in (*own, *node.decorator_list) for each in ast.walk(mark)]
            is_slow = any(
                ast.unparse(mark) in ("pytest.mark.slow", "pytest.mark.large")
                for mark in (*own, *node.decorator_list)
            )
            calls = [
                each
                for each in inner
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.fault"
            ]
            found += [(ast.literal_eval(row), node.name, is_slow) for call in calls for row in call.args]
    return found


def test_the_reader_of_markers_sees_them() -> None:
    mark = "@pytest.mark."
    several = (
        f"pytestmark = [pytest.mark.fault('R1')]\n{mark}fault('R2')\n{mark}slow\ndef test_a(): ...\ndef "
        "test_b(): ...\ndef help(): ...\n"
    )
    assert marked(several) == [("R1", "test_a", True), ("R2", "test_a", True), ("R1", "test_b", False)]
    assert marked(f"{mark}fault('R2', 'R3')\ndef test_a(): ...\ndef test_b(): ...\n") == [
        ("R2", "test_a", False),
        ("R3", "test_a", False),
    ]


def test_every_marker_names_a_row_and_every_row_has_tests() -> None:
    """`make faults` finds every marked test, and `make test` runs at least one test of each row that starts
    no Ray cluster and has a bound of time."""
    found: dict[str, dict[str, bool]] = {}
    files_of = functools.cache(table.files_of)
    for file in table.ROOT.glob("tests/**/test_*.py"):
        for row, name, is_slow in marked(file.read_text(encoding="utf-8")):
            place = str(file.relative_to(table.ROOT))
            found.setdefault(row, {})[f"{place}::{name}"] = is_slow
            assert place in files_of(row), f"tests/faults/table.py does not find {row} in {place}"
    assert found.keys() == table.ROWS.keys()
    assert {row for row, tests in found.items() if all(tests.values())} <= {*table.ON_RAY, *table.SLOW}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a committed project with four rows, of which the third has no test, and the fourth
    no bound of time."""
    for name, text in {
        "tests/conftest.py": CONFTEST,
        "tests/test_rows.py": TESTS,
        "src/code.py": "",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-q"\n',
        "docs/faults.md": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs/faults.md").write_text("before\n<!-- faults -->\nold\n<!-- end of faults -->\nafter\n")
    (tmp_path / ".gitignore").write_text("__pycache__/\n.pytest_cache/\nmended\nran\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "PAGE", tmp_path / "docs" / "faults.md")
    monkeypatch.setattr(table, "RESULTS", tmp_path / ".faults")
    rows = {
        f"R{number}": f"what {word} shows" for number, word in enumerate(("one", "two", "three", "four"), 1)
    }
    monkeypatch.setattr(table, "ROWS", rows)
    monkeypatch.setattr(table, "SLOW", ("R4",))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return tmp_path


@pytest.mark.slow(instead="the other tests of the table in this file", seconds=3.3)
def test_rows_are_run_once_and_written(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--workers", "0"]) == 1
    page = (project / "docs/faults.md").read_text()
    assert "| R1 | what one shows | 3 of 6 things; at most 1e-0 of something | 3 passed |" in page
    assert "| R2 | what two shows |  | 1 failed |" in page
    assert "| R3 | what three shows |  | none |" in page
    assert page.startswith("before\n<!-- faults -->\n| row |")
    assert "old" not in page
    assert page.endswith("after\n")

    kept = {row: (project / ".faults" / f"{row}.json").stat().st_mtime_ns for row in ("R1", "R2")}
    (project / "mended").write_text("")
    assert table.main(["--workers", "0"]) == 1
    assert "R1: has a result of" in capsys.readouterr().out
    assert (project / ".faults" / "R1.json").stat().st_mtime_ns == kept["R1"]
    assert json.loads((project / ".faults" / "R2.json").read_text())["passed"]

    (project / "src/code.py").write_text("changed = True\n")
    assert table.main(["--workers", "0", "R1"]) == 1
    assert json.loads((project / ".faults" / "R1.json").read_text())["commit"] is None
    assert (project / ".faults" / "R1.json").stat().st_mtime_ns > kept["R1"]


@pytest.mark.slow(instead="the other tests of the table in this file", seconds=2.0)
def test_a_slow_row_goes_on_within_the_row(project: Path) -> None:
    assert table.main(["--slow"]) == 1
    assert "| R4 | what four shows | 2 of 2 kills | 1 passed, 1 failed |" in table.PAGE.read_text()
    (project / "mended").write_text("")
    assert table.main(["--slow"]) == 0
    assert "| R4 | what four shows | 2 of 2 kills | 2 passed |" in table.PAGE.read_text()
    assert (project / "ran").read_text() == "011", "what has passed is not run again"


def test_figures_are_joined() -> None:
    figures = [
        "1 of 1 a",
        "2,000 of 3,000 b",
        "0 of 1 a",
        "at most 2e-07 c",
        "at most 1e-6 c",
        "five",
        "five",
        "at most 3 d",
    ]
    assert table.joined(figures) == ["1 of 2 a", "2,000 of 3,000 b", "at most 1e-6 c", "at most 3 d", "five"]


@pytest.mark.parametrize("name", POINTS)
def test_every_point_at_which_tests_strike_is_there(name: str) -> None:
    assert callable(getattr(*named(name)))
