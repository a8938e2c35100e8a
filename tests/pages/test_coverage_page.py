"""The page of what the tests prove agrees with the present markers."""

from coverage_page import PAGE, marked, page

REQUIRED = {
    *range(1, 14),
    *range(15, 22),
    28,
    *range(56, 78),
    85,
    86,
    89,
    91,
    *range(93, 100),
    101,
    104,
    105,
    *range(107, 111),
    118,
    125,
}


def test_every_row_that_is_due_is_proven() -> None:
    assert marked().keys() >= REQUIRED


def test_the_page_is_not_behind() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/coverage_page.py"
