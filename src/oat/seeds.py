"""Addressed random numbers. Every number is a function of the run's seed and of an address, which says what
the number is for. It does not depend on numbers that were drawn before.

A token uses one uniform number from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). In training the key is made from the run's seed, purpose, step, round, slot, the prompt's
occurrence and the index of the sample. The counter is the token's position.

This module has its own Philox, vectorised over rows, because numpy's Philox needs one generator for each key.
The tests compare our Philox with the known answers of the paper's authors.
"""

import hashlib
import json

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Seeds:
    """The run's seed. It makes a key or a generator for every address.

    Args:
        first: the seed of addresses that begin with "init", of which initial weights are made; None: `seed`.
            A fork may have another seed than the run that it was made from. But initial weights that never
            change are in no checkpoint, so a fork draws them as that run did.
    """

    def __init__(self, seed: int, first: int | None = None):
        self.seed = seed
        self.first = seed if first is None else first

    def key(self, *address: str | int) -> int:
        """Return the 64-bit key of an address of strings and whole numbers."""
        seed = self.first if address[:1] == ("init",) else self.seed
        digest = hashlib.blake2b(json.dumps([seed, *address]).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def at(self, *address: str | int) -> np.random.Generator:
        """Return a new generator for an address. Two generators of the same address give the same numbers."""
        return np.random.Generator(np.random.Philox(key=self.key(*address)))


def philox(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Compute ten rounds of Philox4x32.

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
    """Return one uniform number for each of R rows, strictly between 0 and 1, with 52 random bits.

    Args:
        keys: (R,) uint64, from `Seeds.key`.
        positions: (R,) whole numbers, the position of each row's token in its sequence.

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
