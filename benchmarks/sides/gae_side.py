"""The two sides of `gae.py`: `oat.functional.returns.gae`, and `torch.cumsum` on the tensor of rewards.

The C library keeps freed memory and uses it again. Otherwise the new memory of a result, 34 MB, costs both
sides more than their sums, and hides the difference.
"""

import ctypes
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from task import Memory, serve

from oat.functional.returns import gae

STRETCH = 64
"""Number of tokens of a gap, and of what is between two gaps at least."""
TIMES = 15
"""Number of times that a side computes in a turn."""
DECAYS = (0.0, 0.5, 0.95, 0.99, 1.0)

KEEP_MEMORY = {-3: 2**30, -1: 2**30}
"""glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, with their values."""

held: dict[str, torch.Tensor] = {}


def open_(rows: int, tokens: int, gaps: float, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    for option, value in KEEP_MEMORY.items():
        ctypes.CDLL("libc.so.6").mallopt(option, value)
    torch.manual_seed(0)
    is_kept = torch.rand(rows, -(-tokens // STRETCH)) >= gaps
    mask_NT = is_kept.repeat_interleave(STRETCH, dim=1)[:, :tokens].contiguous()
    rewards_K, values_K = torch.randn(2, int(mask_NT.sum()))
    held.update(mask=mask_NT, rewards=rewards_K, values=values_K, row_of=mask_NT.nonzero()[:, 0])
    return {"oat": version("oat-align"), "torch": torch.__version__, "tokens": len(rewards_K)}


def estimates() -> torch.Tensor:
    rows = len(held["mask"])
    return gae(held["rewards"], held["values"], held["row_of"], rows, gamma=0.99, lam=0.95)


def sums() -> torch.Tensor:
    is_equal = bool(held["mask"].all())
    rewards = held["rewards"].view(len(held["mask"]), -1) if is_equal else held["rewards"]
    return rewards.cumsum(-1)


WAYS: dict[str, Callable[[], torch.Tensor]] = {"gae": estimates, "cumsum": sums}


def run(way: str, seed: int = 0) -> dict[str, float]:
    """Measure the least seconds of some computations, and the peak of memory without inputs and result."""
    times = []
    used = Memory()
    for _ in range(TIMES):
        begin = time.perf_counter()
        result = WAYS[way]()
        times.append(time.perf_counter() - begin)
        size = result.nbytes
        del result
    return {"seconds": min(times), "extra_gb": used.peak_above() - size / 1e9}


def errors(dtype: str) -> dict[str, float]:
    mask_NT = held["mask"]
    given_K = [held[name].to(getattr(torch, dtype)) for name in ("rewards", "values")]
    dense = [torch.zeros(mask_NT.shape, dtype=torch.float64) for _ in given_K]
    for dense_NT, value_K in zip(dense, given_K, strict=True):
        dense_NT[mask_NT] = value_K.double()
    largest = 0.0
    for decay in DECAYS:
        for gamma, lam in ((1.0, decay), (decay, 1.0)):
            expected_K = loop(*dense, mask_NT, gamma, lam)[mask_NT]
            found_K = gae(*given_K, held["row_of"], len(mask_NT), gamma=gamma, lam=lam)
            scale = max(1.0, float(expected_K.abs().max()))
            largest = max(largest, float((found_K - expected_K).abs().max()) / scale)
    return {"error": largest}


def loop(
    rewards_NT: torch.Tensor, values_NT: torch.Tensor, mask_NT: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return the estimates, column after column from the last one. Tokens outside the mask are skipped."""
    found_NT = torch.zeros_like(rewards_NT)
    value_N, advantage_N = torch.zeros(2, len(rewards_NT), dtype=rewards_NT.dtype)
    columns = [given.T.contiguous() for given in (rewards_NT, values_NT, mask_NT)]
    for t in reversed(range(rewards_NT.shape[1])):
        reward_N, own_N, is_kept_N = (given[t] for given in columns)
        step_N = reward_N + gamma * value_N - own_N + gamma * lam * advantage_N
        found_NT[:, t] = step_N
        advantage_N = torch.where(is_kept_N, step_N, advantage_N)
        value_N = torch.where(is_kept_N, own_N, value_N)
    return found_NT


serve({"open": open_, "run": run, "errors": errors})
