"""The page of what `make test` leaves out is that of today's markers."""

from suites_page import PAGE, moved, page


def test_the_page_is_not_behind() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/suites_page.py"


def test_what_has_left_says_what_stands_in_its_place() -> None:
    assert [place for place, seconds, instead in moved() if not (instead and seconds)] == []
