import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.errors import ShapeError
from oat.functional.segments import segment_mean, segment_sum

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0])
ROWS = torch.tensor([2, 0, 2, 2])


def test_hand_worked():
    # Row 0 holds 2; row 1 nothing; row 2 holds 1, 4, 8; row 3 nothing.
    assert segment_sum(VALUES, ROWS, 4).tolist() == [2.0, 0.0, 13.0, 0.0]
    assert segment_mean(VALUES, ROWS, 4).tolist() == pytest.approx([2.0, 0.0, 13 / 3, 0.0])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-100, 100)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_equals_slow_version_in_any_order(tokens, random):
    rows = [[value for row, value in tokens if row == n] for n in range(4)]
    random.shuffle(tokens)
    values_K = torch.tensor([value for _, value in tokens], dtype=torch.float64)
    row_of_K = torch.tensor([row for row, _ in tokens], dtype=torch.int64)
    assert segment_sum(values_K, row_of_K, 4).tolist() == pytest.approx([sum(row) for row in rows], abs=1e-9)
    means = [sum(row) / len(row) if row else 0.0 for row in rows]
    assert segment_mean(values_K, row_of_K, 4).tolist() == pytest.approx(means, abs=1e-9)


@pytest.mark.parametrize("function", [segment_sum, segment_mean])
def test_gradient(function):
    values = VALUES.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, ROWS, 4), values)


@pytest.mark.parametrize("function", [segment_sum, segment_mean])
def test_extra_rows_change_nothing(function):
    assert torch.equal(function(VALUES, ROWS, 7)[:3], function(VALUES, ROWS, 3))
    assert function(VALUES[:0], ROWS[:0], 2).tolist() == [0.0, 0.0]
    assert function(VALUES[:0], ROWS[:0], 0).shape == (0,)
    assert torch.isfinite(function(torch.full((4,), -1e4), ROWS, 4)).all()


@pytest.mark.parametrize("function", [segment_sum, segment_mean])
def test_shapes(function, unchecked):
    with pytest.raises(ShapeError, match="one row index a value"):
        function(VALUES, ROWS[:3], 4)
