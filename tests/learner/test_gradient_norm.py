"""The norm of a gradient and its clip, against exact sums."""

import math
from collections.abc import Sequence

import pytest
import torch

from oat.learner.optimiser import clip_gradient, gradient_norm


def exact(gradients: Sequence[torch.Tensor]) -> float:
    """Return the norm, of a sum without rounding. Squares of float32 are exact in float64."""
    squares = [gradient.double().square().flatten() for gradient in gradients]
    return math.sqrt(math.fsum(x for part in squares for x in part.tolist()))


def parameters(gradients: Sequence[torch.Tensor | None]) -> list[torch.nn.Parameter]:
    found = []
    for gradient in gradients:
        like = torch.zeros(3) if gradient is None else gradient
        parameter = torch.nn.Parameter(torch.zeros_like(like))
        parameter.grad = None if gradient is None else gradient.clone()
        found.append(parameter)
    return found


def drawn(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CASES: dict[str, list[torch.Tensor | None]] = {
    "many elements": [drawn(400, 100), drawn(30_001, seed=1)],
    "one large tensor and many small ones": [
        drawn(100, 300),
        *(drawn(7, scale=0.1, seed=n) for n in range(60)),
    ],
    "a scalar, and none": [torch.tensor(3.0), None, drawn(5)],
    "squares beyond float32": [drawn(50, scale=1e-25), drawn(50, scale=1e-24)],
    "squares above float32": [drawn(50, scale=1e25)],
    "a transposed tensor": [drawn(300, 70).T, drawn(8, 6, 4).permute(2, 0, 1)],
    "half precision": [drawn(500).bfloat16(), drawn(500).half(), drawn(500).double()],
    "frozen parameters alone": [None, None],
}


@pytest.mark.parametrize("case", CASES)
def test_the_norm_and_the_clip_are_exact(case: str) -> None:
    given = [gradient for gradient in CASES[case] if gradient is not None]
    norm = exact(given)
    moved = parameters(CASES[case])
    assert gradient_norm(moved) == pytest.approx(norm, rel=1e-12, abs=0)
    for parameter, gradient in zip(moved, CASES[case], strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    assert clip_gradient(moved, 2 * norm + 1) == pytest.approx(norm, rel=1e-12, abs=0)
    assert all(torch.equal(p.grad, g) for p, g in zip(moved, CASES[case], strict=True) if p.grad is not None)
    if norm and case != "half precision":
        clip_gradient(moved, norm / 3)
        assert exact([p.grad for p in moved if p.grad is not None]) == pytest.approx(
            norm / 3, rel=1e-7, abs=0
        )
    kept = [p.grad for p in moved if p.grad is not None]
    assert [gradient.dtype for gradient in kept] == [gradient.dtype for gradient in given]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_scales_nothing(value: float) -> None:
    gradient = drawn(100)
    moved = parameters([gradient, torch.tensor([1.0, value])])
    found = clip_gradient(moved, 0.1)
    assert math.isnan(found) if math.isnan(value) else found == math.inf
    assert moved[0].grad is not None
    assert torch.equal(moved[0].grad, gradient)


def test_the_number_of_threads_changes_no_bit() -> None:
    moved = parameters([drawn(300, 500), drawn(100_003, seed=1)])
    before = torch.get_num_threads()
    try:
        found = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(gradient_norm(moved))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_no_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation makes a tensor with a share of the gradient's elements worth the name."""
    moved = parameters([drawn(1000, 300)])
    largest = Largest()
    with largest:
        clip_gradient(moved, 1.0)
    assert 0 < largest.elements <= 300_000 // 10


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Finds the largest number of elements of the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.gpu
def test_gradients_on_two_devices() -> None:
    gradients = [drawn(5_000_000).cuda(), drawn(100, seed=1), drawn(1000, seed=2).bfloat16().cuda()]
    moved = parameters(gradients)
    norm = math.sqrt(sum(float(g.cpu().double().square().sum()) for g in gradients))
    assert clip_gradient(moved, norm / 2) == pytest.approx(norm, rel=1e-12)
    assert gradient_norm(moved[:2]) == pytest.approx(
        math.sqrt(sum(float((g.cpu().double() / 2).square().sum()) for g in gradients[:2])), rel=1e-7
    )
