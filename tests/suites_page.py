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
except the `large` rows of the fault table, which `make faults` runs (docs/faults.md).

**Through the wire encoding.** Three kinds of runs go through the wire encoding in `make test`: golden runs,
runs that are killed at named points of the code (`tests/faults/test_kill.py`), and runs whose complete state
is compared (`tests/faults/test_state.py`). `make test` also does some of these runs without the wire
encoding: every golden run, the kills at two of the points, and one comparison of states. The digests of runs
without a kill must be bitwise equal with and without the wire encoding. `make test-slow` does all kills and
comparisons of states without the wire encoding. The tests of `tests/protocol` compare the digest of each run
over the wire with the digest of the same run without it.

**Learning runs.** `make test` has six learning runs: online, from recorded data, and with flipped signs. It
also tests the sign of every loss without a run (`tests/learning/test_signs.py`).

**Laws of losses.** `tests/faults/test_losses.py` tests each law on 20 examples, and in `make faults` on 60.

The table lists the tests that only `make test-slow` runs, completely or in some of their cases, with the
seconds that they take on one core. The last column says what `make test` still tests instead. `python
tests/suites_page.py` makes the table from the markers.

| test | seconds | what remains in `make test` |
| --- | --- | --- |
"""


@functools.cache
def moved() -> list[tuple[str, float, str]]:
    """Return each test that only `make test-slow` runs, completely or in some of its cases: its place, its
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
