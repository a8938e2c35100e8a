"""Of rows that have had the same tokens so far a step computes one, and no completion depends on it."""

import numpy as np
import pytest
from engines import KEYS, bits, build_engine, log_normaliser, plain_logits, run
from tiny_models import NUM_TOKENS, build_config, save_model

from oat.engines import decoding as equal_rows
from oat.engines.decoding import EqualRows
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.types import Request, Sampling


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_lm(save_model(tmp_path_factory.mktemp("llama"), build_config("llama")))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets, at each decoding step, the number of rows and of computed rows."""
    seen: list[tuple[int, int]] = []
    divide = EqualRows.divide

    def watched(self: EqualRows, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = divide(self, rows, ids)
        seen.append((len(rows), len(found[0])))
        return found

    monkeypatch.setattr(EqualRows, "divide", watched)
    return seen


def samples(prompts: int, each: int, *, room: int = 8) -> list[Request]:
    """Return samples of prompts of 3 to 19 tokens, which are drawn at a low temperature."""
    generator = np.random.default_rng(3)
    requests = []
    for prompt in range(prompts):
        ids = generator.integers(1, NUM_TOKENS, 3 + 16 * prompt // max(1, prompts - 1)).astype(np.int32)
        requests += [
            Request(ids, Sampling(room - n % 3, temperature=0.08), KEYS.key("equal rows", prompt, n))
            for n in range(each)
        ]
    return requests


def test_a_set_is_divided_where_the_tokens_of_its_rows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_rows, "_LEAST_ROWS", 1)
    held = EqualRows(9)
    held.enter([[4, 5, 6, 7], [2, 3]])
    rows = np.array([4, 5, 6, 7, 2, 3])
    places, set_R = held.divide(rows, np.array([9, 8, 9, 9, 9, 9]))
    assert places.tolist() == [0, 1, 4]
    assert set_R.tolist() == [0, 1, 0, 0, 2, 2]
    rows = np.array([5, 6, 7, 2, 3])  # row 4 has left; 6 and 7 differ; 5 has the token of 7
    places, set_R = held.divide(rows, np.array([1, 2, 1, 5, 5]))
    assert places.tolist() == [0, 1, 2, 3]
    assert set_R.tolist() == [0, 1, 2, 3, 3]
    held.enter([[4]])
    rows = np.array([2, 3, 4])
    places, set_R = held.divide(rows, np.array([5, 5, 5]))
    assert places.tolist() == [0, 2]
    assert set_R.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("rows", "others", "is_shared"), [(63, 0, False), (64, 0, True), (64, 52, True), (64, 53, False)]
)
def test_few_rows_or_many_sets_are_computed_row_by_row(rows: int, others: int, is_shared: bool) -> None:
    """`others` rows equal no other row, and the rest are equal."""
    held = EqualRows(rows)
    held.enter([[*range(others, rows)]])
    places, set_R = held.divide(np.arange(rows), np.zeros(rows, dtype=np.int32))
    expected = [*range(others), others] if is_shared else [*range(rows)]
    assert places.tolist() == expected
    assert set_R.tolist() == [*range(others), *[others] * (rows - others)] if is_shared else expected


@pytest.mark.parametrize(
    "options",
    [{"max_rows": 96}, {"max_rows": 72}, {"max_rows": 96, "cache_gb": 4.2e-4}],
    ids=["all at once", "rows enter later", "a cache that is too small"],
)
def test_completions_are_those_of_rows_that_are_computed_one_by_one(
    lm: CausalLM,
    steps: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, float],
) -> None:
    monkeypatch.setattr(equal_rows, "_LEAST_ROWS", 8)
    requests = samples(6, 16)
    completions = run(build_engine(lm, **options), requests)
    assert sum(computed < rows for rows, computed in steps) >= 3
    for request, completion in zip(requests, completions, strict=True):
        rows = plain_logits(lm.module, np.concatenate([request.ids, completion.ids]))[
            len(request.ids) - 1 : -1
        ]
        expected = [row[token] - log_normaliser(row) for row, token in zip(rows, completion.ids, strict=True)]
        np.testing.assert_allclose(completion.raw_logps, expected, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(equal_rows, "_LEAST_ROWS", 1000)
    steps.clear()
    one_by_one = run(build_engine(lm, **options), requests)
    assert all(computed == rows for rows, computed in steps)
    assert [bits(completion)[0] for completion in completions] == [bits(other)[0] for other in one_by_one]
