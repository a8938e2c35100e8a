"""A run that an earlier program began, before its modules were moved into packages (begin.py says which one),
is read, continued, exported and digested as that program did it.

The run has a critic beside its policy, an ensemble, late answers, questions in flight, an alarm that rolls it
back after it was continued, evaluations with a second oracle, a buffer, and parts that keep states of their
own. Its configuration has every section that there was then, `router` among them.

All digits of what it computes hold on machines that compute as the one of expected.json did
(tests/support/last_digits.py); elsewhere 1e-5 holds, and no checksum of what was computed. What only reads
the run's files is the same everywhere.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import begin
import pytest
from findings import oat, of_begun, of_continued
from last_digits import machine

EXPECTED = json.loads((begin.HERE / "expected.json").read_text(encoding="utf-8"))
CHECKSUMS = ("digest", "files", "frozen", "sha256")
"""Names of what has no tolerance; it is compared last, since it does not say what differs."""
ADDED = {"/state/learner": {"without_moments"}}
"""What later programs write beside it: see docs/decisions/036."""


def assert_same(found: Any, expected: Any, *, is_exact: bool, place: str = "") -> None:
    """Both are the same plain data.

    Args:
        is_exact: to the last digit, and checksums too.
    """
    if isinstance(expected, dict):
        assert sorted({*found} - ADDED.get(place, set())) == sorted(expected), place
        for name in sorted(expected, key=CHECKSUMS.__contains__):
            if is_exact or name not in CHECKSUMS:
                assert_same(found[name], expected[name], is_exact=is_exact, place=f"{place}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, is_exact=is_exact, place=f"{place}/{number}")
    elif isinstance(expected, float) and not is_exact:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), place
    else:
        assert found == expected, place


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, seen from the folder that its paths start from."""
    monkeypatch.chdir(tmp_path)
    begin.copy_given(tmp_path)
    return Path(shutil.copytree(begin.HERE / "run", "run"))


def test_the_run_as_it_stands_is_read_as_before(run_dir: Path) -> None:
    assert_same(of_begun(run_dir, Path("model before")), EXPECTED["begun"], is_exact=True)


@pytest.mark.sample("wire", seconds=0.8)
@pytest.mark.parametrize("flags", [(), ("--compute.serialise", "true")], ids=["plain", "wire"])
@pytest.mark.filterwarnings("ignore:after")
def test_the_run_continues_as_before(run_dir: Path, flags: tuple[str, ...]) -> None:
    oat("train", run_dir / "config.yaml", *flags)
    found = of_continued(run_dir, Path("model after"))
    assert found["digest"] != EXPECTED["begun"]["digest"]
    assert_same(found, EXPECTED["continued"], is_exact=machine() == EXPECTED["machine"])


def test_a_ten_thousandth_is_noticed_on_any_machine(run_dir: Path) -> None:
    expected = EXPECTED["continued"]
    changed = [{**row, "loss/total": row.get("loss/total", 1.0) * 1.0001} for row in expected["rows"]]
    with pytest.raises(AssertionError):
        assert_same({**expected, "rows": changed}, expected, is_exact=False)


def test_what_is_committed_is_small_and_names_no_machine() -> None:
    files = [
        file
        for name in ("run", *begin.GIVEN)
        for file in [begin.HERE / name, *(begin.HERE / name).rglob("*")]
    ]
    contents = {file: file.read_bytes() for file in files if file.is_file()}
    assert sum(map(len, contents.values())) <= 300_000
    assert [file for file, content in contents.items() if b"/home/" in content or b"/tmp/" in content] == []
