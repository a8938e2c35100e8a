"""Check of shapes for the elementwise functions."""

from torch import Tensor

from oat.errors import ShapeError


def check_same_shape(**tensors: Tensor) -> None:
    """Raise an error if two tensors differ in shape.

    Raises:
        ShapeError: two shapes differ. The message names each tensor with its shape.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        listed = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ShapeError(f"shapes disagree: {listed}; give tensors of one shape, nothing is broadcast here")
