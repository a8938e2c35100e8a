"""The markers that select tests for `make test` and for `make test-slow`; `suites_page.py` writes their
reasons into a page.

`@pytest.mark.slow(instead="...", seconds=...)` leaves a test out of `make test`. `@pytest.mark.sample(...)`
leaves some of its cases out. `seconds` is the measured time on one core that was shared with other processes.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest


def mark_slow(items: Iterable[pytest.Item], *, are_whole: bool) -> None:
    """Mark as slow the tests that only `make faults` runs, and the cases that a sample leaves out.

    Args:
        are_whole: the items have all cases of each test.

    Raises:
        pytest.UsageError: a sample names a case that its test does not have.
    """
    found: dict[tuple[str, str], bool] = {}
    for item in items:
        if item.get_closest_marker("large"):
            item.add_marker("slow")
        for mark in item.iter_markers("sample"):
            case = item.callspec.id  # type: ignore[attr-defined]
            names = mark.args or mark.kwargs["slow"]
            is_named = {name: fnmatchcase(case, name) for name in names}
            if any(is_named.values()) != bool(mark.args):
                item.add_marker("slow")
            for name, matches in is_named.items():
                place = (item.nodeid.partition("[")[0], name)
                found[place] = matches or found.get(place, False)
    if are_whole and (missing := sorted(place for place, is_there in found.items() if not is_there)):
        raise pytest.UsageError(f"{missing[0][0]} has no case {missing[0][1]}")
