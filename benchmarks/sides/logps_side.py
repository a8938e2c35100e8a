"""The two sides of `logps.py`: log-probabilities of tokens under a linear head, and their gradients. The way
`whole` uses autograd on the complete matrix of logits. The way `chunked` computes the logits in chunks.

Both ways compute their products with the same library (`oat.functional.products`).
"""

import time
from importlib.metadata import version
from typing import Any

import torch
from task import Memory, serve

from oat.functional.head import linear_functionals
from oat.functional.products import linear
from oat.learner.models import CHUNK_LOGITS

held: dict[str, torch.Tensor] = {}


def whole(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return linear(hidden, weight).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def chunked(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return linear_functionals(hidden, weight, None, ids, chunk(len(weight)))["raw"]


def chunk(vocabulary: int) -> int:
    """Return the number of tokens in a chunk. The learner chooses the same number."""
    return max(1, CHUNK_LOGITS // vocabulary)


WAYS = {"whole": whole, "chunked": chunked}


def make(width: int, vocabulary: int, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(tokens, width, dtype=dtype).requires_grad_(),
        "weight": (torch.randn(vocabulary, width, dtype=dtype) / width**0.5).requires_grad_(),
        "ids": torch.randint(0, vocabulary, (tokens,)),
        "slope": torch.randn(tokens, dtype=dtype),
    }


def gradients(way: str, parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    logps = WAYS[way](parts["hidden"], parts["weight"], parts["ids"])
    return list(torch.autograd.grad(logps, [parts["hidden"], parts["weight"]], parts["slope"]))


def open_(width: int, vocabulary: int, tokens: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    held.clear()
    held.update(make(width, vocabulary, tokens, torch.float32))
    return {"oat": version("oat-align"), "torch": torch.__version__, "chunk": chunk(vocabulary)}


def run(way: str, seed: int = 0) -> dict[str, Any]:
    """Measure the seconds of a forward and a backward pass, and the peak of memory without the inputs and the
    returned gradients."""
    used = Memory()
    begin = time.perf_counter()
    made = gradients(way, held)
    seconds = time.perf_counter() - begin
    result = sum(tensor.nbytes for tensor in made)
    return {"tokens": len(held["ids"]), "seconds": seconds, "extra_gb": used.peak_above() - result / 1e9}


def errors(width: int, vocabulary: int, tokens: int, dtype: str) -> dict[str, float]:
    """Return the relative error of the gradient of each input: the norm of the difference between the two
    ways, divided by the norm of the way `whole`."""
    parts = make(width, vocabulary, tokens, getattr(torch, dtype))
    pairs = zip(gradients("chunked", parts), gradients("whole", parts), strict=True)
    return {
        name: float((one - other).norm() / other.norm())
        for name, (one, other) in zip(("hidden", "weight"), pairs, strict=True)
    }


serve({"open": open_, "run": run, "errors": errors})
