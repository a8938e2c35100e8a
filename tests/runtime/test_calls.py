"""Calls between processes: what is sent arrives, and nothing of it is kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from apart_runs import pair
from fixtures import Finished, make_group
from planned_kills import StruckMachine

from oat import blobs
from oat.processes.local import Shared
from oat.runtime.calls import answered, call_of, value_of


@pytest.mark.inventory(103)
def test_records_arrive_as_they_were_sent() -> None:
    groups = [make_group(number, "ab", "", "c" * 40, reference="d") for number in range(5)]
    arrived: list[Any] = []

    def do(name: str, arguments: Sequence[Any]) -> Any:
        arrived.append((name, *arguments))
        return arguments[0]

    returned = value_of(b"".join(answered(do, call_of("sample", groups, {"sampler": 2}))), "actor 0")
    sent = blobs.pack(groups, with_features=True)
    name, there, others = arrived[0]
    assert (name, others) == ("sample", {"sampler": 2})
    assert blobs.pack(there, with_features=True) == sent
    assert blobs.pack(returned, with_features=True) == sent


class Counted(Shared):
    """A call that is sent to several processes."""

    alive = most = 0

    def __init__(self, parts: Sequence[bytes | memoryview]):
        super().__init__(parts)
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self) -> None:
        super().__del__()
        Counted.alive -= 1


@pytest.mark.inventory(103)
def test_calls_of_old_weights_are_dropped(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool keeps the calls of the newest weights, and no others, for actors that come later."""
    machine = StruckMachine()
    monkeypatch.setattr("oat.assemble.apart.Machine", machine)
    monkeypatch.setattr("oat.processes.local.Shared", Counted)
    assert pair(finished, "grpo", tmp_path, {}).train() == 0
    transfers = machine.calls["commit"] // 2
    assert transfers > 6
    calls_of_one = sum(machine.calls[what] for what in ("begin", "put", "commit")) // (2 * transfers)
    assert calls_of_one <= Counted.most <= 2 * calls_of_one
    assert Counted.alive == 0
