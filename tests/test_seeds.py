import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oat.seeds import Seeds, philox, uniforms

# philox4x32-10 in `kat_vectors` of the Random123 distribution (D. E. Shaw Research): counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def slow_philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def test_philox_gives_the_known_answers():
    counters, keys, outputs = (
        np.array([words(row[i]) for row in KNOWN_ANSWERS], dtype=np.uint32) for i in range(3)
    )
    assert np.array_equal(philox(counters, keys), outputs)
    assert [slow_philox(words(counter), words(key)) for counter, key, _ in KNOWN_ANSWERS] == outputs.tolist()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), max_size=4))
def test_philox_equals_slow_version(rows):
    rows_R6 = np.array(rows, dtype=np.uint32).reshape(len(rows), 6)
    assert philox(rows_R6[:, :4], rows_R6[:, 4:]).tolist() == [slow_philox(row[:4], row[4:]) for row in rows]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), max_size=5))
def test_uniforms_equal_slow_version(addresses):
    keys, positions = (np.array([address[i] for address in addresses], dtype=np.uint64) for i in range(2))
    slow = []
    for key, position in addresses:
        first, second, *_ = slow_philox(
            [position % 2**32, position // 2**32, 0, 0], [key % 2**32, key // 2**32]
        )
        slow.append(((first * 2**20 + second // 2**12) + 0.5) / 2**52)
    assert uniforms(keys, positions).tolist() == slow


def test_uniform_by_hand():
    # Key 0 and position 0 are the first known answer: words 6627e8d5 and e169c58d, so the 52 bits
    #     6627e8d5e169c.
    assert uniforms(np.array([0], dtype=np.uint64), np.array([0])).tolist() == [
        (0x6627E8D5E169C + 0.5) / 2**52
    ]


def test_uniforms_are_uniform_and_do_not_depend_on_their_batch():
    seeds = Seeds(0)
    keys = np.array([seeds.key("token", row) for row in range(100)], dtype=np.uint64).repeat(100)
    positions = np.tile(np.arange(100), 100)
    values = uniforms(keys, positions)
    assert values.min() > 0
    assert values.max() < 1
    assert len(np.unique(values)) == 10_000
    # 20 bins of 500 expected: chi-square with 19 degrees of freedom has mean 19 and standard deviation 6.2.
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 4 * 6.2
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.04
    order = np.random.default_rng(0).permutation(10_000)
    assert np.array_equal(uniforms(keys[order], positions[order]), values[order])
    assert uniforms(keys[:0], positions[:0]).shape == (0,)


def test_key_is_the_blake2b_of_the_address():
    digest = hashlib.blake2b(b'[7, "token", "sampler", 3]', digest_size=8).digest()
    assert Seeds(7).key("token", "sampler", 3) == sum(byte << (8 * i) for i, byte in enumerate(digest))


def test_addresses_differ():
    addresses = [
        (),
        ("a",),
        ("a", "b"),
        ("ab",),
        ("a", 1),
        ("a", "1"),
        ("a", 1, 2),
        ("a", 12),
        ("b", "a"),
        (1, "a"),
        ('a", "b',),
    ]
    keys = [Seeds(seed).key(*address) for seed in (0, 1) for address in addresses]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_generators_are_fresh_at_each_call():
    seeds = Seeds(11)
    first = seeds.at("shuffle", 3)
    drawn = first.random(5)
    assert np.array_equal(seeds.at("shuffle", 3).random(5), drawn)
    assert not np.array_equal(first.random(5), drawn)
    assert not np.array_equal(seeds.at("shuffle", 4).random(5), drawn)
    assert not np.array_equal(Seeds(12).at("shuffle", 3).random(5), drawn)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_has_the_same_numbers(hash_seed):
    code = "from oat.seeds import Seeds; s = Seeds(5); print(s.key('token', 2), s.at('x').random())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.split() == [str(Seeds(5).key("token", 2)), str(Seeds(5).at("x").random())]
