"""R18: a process that fails, by a kill or because it hangs, ends the run at once and with one message; the
same command continues it. If it may be replaced, the run goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from apart_runs import pair
from failures import PHASES, SETTINGS, ends, strike
from fixtures import Finished
from planned_kills import StruckMachine

DEADLINE_S = {"killed": 300.0, "hangs": 20.0}
"""Seconds for a reply. A busy machine needs some for every process that starts."""

pytestmark = pytest.mark.fault("R18")


@pytest.mark.inventory(124)
@pytest.mark.sample("killed-a learner that learns", seconds=7.3)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_failure_ends_the_run(
    how: str,
    phase: str,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    own = {**SETTINGS[PHASES[phase][0]], "compute.max_restarts": 0}
    run, kill = pair(finished, "grpo", tmp_path, {}, own), strike(phase, how)
    monkeypatch.setattr(
        "oat.assemble.apart.Machine", machine := StruckMachine([kill], deadline_s=DEADLINE_S[how])
    )
    seconds = ends(run, phase, kill, machine, capsys)
    figure(f"at most {seconds:.1f} s from a failure to the end of the run (after the deadline, if it hangs)")
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
    assert run.train() == 0
    figure(f"{int(run.is_equal)} of 1 ended runs equal the local one bitwise after the same command")
    assert run.is_equal


@pytest.mark.inventory(124)
@pytest.mark.sample("killed-a client that answers", seconds=5)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_failure_is_mended(
    how: str,
    phase: str,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str], None],
) -> None:
    run, kill = pair(finished, "grpo", tmp_path, {}, SETTINGS[PHASES[phase][0]]), strike(phase, how)
    monkeypatch.setattr(
        "oat.assemble.apart.Machine", machine := StruckMachine([kill], deadline_s=DEADLINE_S[how])
    )
    assert run.train() == 0
    assert machine.killed == [kill]
    figure(f"{int(run.is_equal)} of 1 mended runs equal the local one bitwise")
    assert run.is_equal
