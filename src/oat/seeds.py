"""Addressed random numbers: each is a function of the run's seed and of its purpose, never of what was drawn
before it.

A token uses one uniform number from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). The key is (run seed, purpose, slot, step, round, prompt occurrence, sample index); the counter
is the token's position. This module has its own implementation, vectorised over rows, because numpy's Philox
makes one generator a key; the tests hold it against the known answers of the paper's authors.
"""

import hashlib
import json

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Seeds:
    """The run's seed, and every generator addressed under it."""

    def __init__(self, seed: int):
        self.seed = seed

    def key(self, *address: str | int) -> int:
        """A 64-bit key for an address of strings and whole numbers."""
        digest = hashlib.blake2b(json.dumps([self.seed, *address]).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def at(self, *address: str | int) -> np.random.Generator:
        """A new generator for an address; two calls give two generators of the same numbers."""
        return np.random.Generator(np.random.Philox(key=self.key(*address)))


def philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32.

    Args:
        counters: (R, 4) uint32.
        keys: (R, 2) uint32.
    Returns:
        (R, 4) uint32.
    """
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = (product1 >> _32) ^ c1 ^ k0
        c1 = product1 & _LOW
        c2 = (product0 >> _32) ^ c3 ^ k1
        c3 = product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uniform number for each row, strictly between 0 and 1, with 52 random bits.

    Args:
        keys: (R,) uint64, from `Seeds.key`.
        positions: (R,) whole numbers, the token's position in its sequence.
    Returns:
        (R,) float64.
    """
    keys, positions = keys.astype(np.uint64), positions.astype(np.uint64)
    counters = np.stack(
        [positions & _LOW, positions >> _32, np.zeros_like(keys), np.zeros_like(keys)], axis=1
    )
    words = philox(counters, np.stack([keys & _LOW, keys >> _32], axis=1)).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(20)) | (words[:, 1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
