from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures import World, oat

from oat.hardware.threads import candidates, fastest, measured_tokens, on_threads


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_are_put_back_also_after_an_error() -> None:
    torch.set_num_threads(1)
    with pytest.raises(ZeroDivisionError), on_threads(3):
        torch.get_num_threads() / 0
    with on_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 1
    with on_threads(None):
        assert torch.get_num_threads() == 1


def test_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    for most, expected in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        torch.set_num_threads(most)
        assert candidates(1000) == expected
        assert candidates(10**9) == expected[-1:]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({1: 1.0, 2: 0.6, 4: 0.5}, 4), ({1: 1.0, 2: 0.97, 4: 2.0}, 1), ({1: 1.0, 2: 0.9, 4: 0.88}, 2)],
)
def test_the_fastest_wins_and_of_near_ones_the_one_with_fewer_threads(
    seconds: dict[int, float], best: int
) -> None:
    now, calls = [0.0], []

    def work() -> None:
        count = torch.get_num_threads()
        calls.append(count)
        outlier = 50.0 if len(calls) in (1, 5) else 1.0
        now[0] += outlier * seconds[count] / 1000

    assert fastest(work, [1, 2, 4], clock=lambda: now[0]) == best
    assert calls == [1, 2, 4] * 4


def test_slow_work_is_done_once_on_each_number() -> None:
    now, calls = [0.0], []

    def work() -> None:
        calls.append(torch.get_num_threads())
        now[0] += 9.0 if calls[-1] == 1 else 60.0

    assert fastest(work, [1, 2], clock=lambda: now[0]) == 1
    assert calls == [1, 2]


def test_a_larger_model_is_measured_with_fewer_tokens() -> None:
    assert [measured_tokens(size, 256) for size in (0, 10**6, 10**8, 10**12)] == [256, 256, 100, 1]


def test_one_candidate_needs_no_measurement() -> None:
    assert fastest(lambda: pytest.fail("measured"), [1]) == 1


def test_a_run_over_the_wire_measures_its_threads_too(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oat.learner.limits.candidates", lambda parameters: [1, 2])
    changes = {"compute.serialise": True, "compute.threads": None, "stop.max_steps": 1, "evaluation": None}
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
