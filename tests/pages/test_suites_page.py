"""The page of what `make test` leaves out agrees with the present markers."""

import re

import pytest
from faults.table import ON_RAY, ROWS, SLOW
from suites_page import PAGE, ROOT, moved, page

TESTS = ROOT / "tests"


def test_the_page_is_not_behind() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/suites_page.py"


def test_what_it_names_is_there() -> None:
    files = [file for file in TESTS.rglob("*.py") if "support" not in file.parts]
    known = {file.name for file in files} | {f"tests/{file.relative_to(TESTS).as_posix()}" for file in files}
    for file in files:
        known |= set(re.findall(r"^def (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    text = " ".join(instead for _, _, instead in moved())
    assert {
        name for name in re.findall(r"(?:tests/[\w/]+/)?test_\w+(?:\.py)?", text) if name not in known
    } == set()


def test_what_has_left_says_what_stands_in_its_place() -> None:
    assert [place for place, seconds, instead in moved() if not (instead and seconds)] == []


def test_each_row_of_the_fault_table_has_a_test_in_make_test(request: pytest.FixtureRequest) -> None:
    """But for the rows that start Ray clusters, or have no bound of time."""
    if request.config.args != request.config.getini("testpaths") or request.config.option.keyword:
        pytest.skip("some tests only")
    marks = [mark for item in request.session.items for mark in item.iter_markers("fault")]
    assert ROWS.keys() - {*ON_RAY, *SLOW} - {row for mark in marks for row in mark.args} == set()
