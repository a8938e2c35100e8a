"""Write docs/test_suites.md from the markers `slow` and `sample` of tests: `python tests/suites_page.py`."""

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "test_suites.md"
HEAD = """# Which tests run when

`make test` runs every test without the marker `slow`. `make test-slow` runs the tests with this marker,
except those that also have the marker `large`. These belong to the fault table, and only `make faults` and
`make faults-ray` run them (docs/faults.md).

**Through the wire encoding.** In some tests, a run encodes and decodes the values that travel between its
parts, as between two processes (`compute.serialise`). `make test` does so in three kinds of runs: golden
runs, runs that are killed at named points of the code (`tests/faults/test_kill.py`), and runs whose complete
state is compared (`tests/faults/test_state.py`). It also does some of these runs without the encoding: every
golden run, the kill at one of the points, and one comparison of states. If a run is not killed, its digest
must be bitwise the same with and without the encoding. `make test-slow` does all kills and all comparisons of
states without the encoding, and the runs of `tests/protocol` twice, with and without the encoding.

**Learning runs.** A learning run must raise its reward. If the sign of its loss is flipped, the reward must
fall. `make test` has three such runs of a policy: one that samples, one with recorded data, and one with a
flipped sign. It also tests the sign of every loss without a run (`tests/learning/test_signs.py`).

**Laws of losses.** `tests/faults/test_losses.py` tests each law on 12 examples in `make test`, and on 60
examples in `make faults`.

The table lists the tests that only `make test-slow` runs, completely or in some of their cases. The seconds
are those that a test takes on one core. The last column says what `make test` still tests instead. `python
tests/suites_page.py` makes this page. It makes the table from the markers `slow` and `sample` of the tests.

| test | seconds | what remains in `make test` |
| --- | --- | --- |
"""


@functools.cache
def moved() -> list[tuple[str, float, str]]:
    """Return each test that only `make test-slow` runs, in all or some of its cases: the test's name, its
    seconds, and what `make test` still tests instead."""
    found = []
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "pytest.mark.slow(" not in text and "pytest.mark.sample(" not in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            place = f"{file.relative_to(ROOT).as_posix()}::{node.name}"
            for mark in node.decorator_list:
                if not isinstance(mark, ast.Call):
                    continue
                given = {
                    each.arg: ast.literal_eval(each.value) for each in mark.keywords if each.arg in _SAID
                }
                match ast.unparse(mark.func):
                    case "pytest.mark.slow":
                        found.append((place, given["seconds"], given["instead"]))
                    case "pytest.mark.sample":
                        found.append((place, given["seconds"], _remaining(mark, given)))
    return found


_SAID = ("seconds", "instead", "slow")


def _remaining(mark: ast.Call, given: Mapping[str, Any]) -> str:
    cases = [ast.literal_eval(case) for case in mark.args] or given["slow"]
    names = ", ".join(f"`{case}`" for case in cases)
    text = f"its cases {names}" if mark.args else f"all of its cases but {names}"
    return f"{text}; {given['instead']}" if "instead" in given else text


def page() -> str:
    rows = [f"| `{place}` | {seconds:.1f} | {' '.join(text.split())} |" for place, seconds, text in moved()]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
