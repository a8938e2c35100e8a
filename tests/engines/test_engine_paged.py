"""Rows that enter and leave a batch over a cache of pages: who enters, who waits, what is shared. No
completion depends on it."""

import itertools

import numpy as np
import pytest
import torch
from engines import KEYS, build_engine, log_normaliser, model_of, page_bytes, plain_logits, run
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_model

from oat.engines.decoding import Decoding
from oat.engines.paged_cache import PAGE, PagedCache, Pages, Storage
from oat.errors import EngineError
from oat.models.loading import load_lm
from oat.types import Request, Sampling


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    return {
        family: load_lm(save_model(tmp_path_factory.mktemp(family), build_config(family)))
        for family in FAMILIES
    }


@pytest.fixture
def decodings(monkeypatch):
    """Return a list that gets, at each step, the running batch, the rows that it holds, and the pages that it
    uses."""
    seen: list[tuple[Decoding, list[int], int]] = []
    step = Decoding.step

    def watched(decoding):
        finished = step(decoding)
        cache = decoding._cache
        seen.append((decoding, decoding._held_R.tolist(), cache.own.live + cache.shared.live))
        return finished

    monkeypatch.setattr(Decoding, "step", watched)
    return seen


def crowd(*, prompts: int, each: int, seed: int = 0) -> list[Request]:
    """Return several samples each for prompts of 1 to 24 tokens. Responses have up to 24 tokens."""
    generator = np.random.default_rng(seed)
    requests = []
    for prompt in range(prompts):
        ids = generator.integers(0, NUM_TOKENS, generator.integers(1, 25)).astype(np.int32)
        requests += [
            Request(ids, Sampling(int(generator.integers(1, 25))), KEYS.key("crowd", seed, prompt, n))
            for n in range(each)
        ]
    return requests


def assert_right(lm, requests, completions):
    for request, completion in zip(requests, completions, strict=True):
        rows = plain_logits(lm.module, np.concatenate([request.ids, completion.ids]))[
            len(request.ids) - 1 : -1
        ]
        expected = [row[token] - log_normaliser(row) for row, token in zip(rows, completion.ids, strict=True)]
        np.testing.assert_allclose(completion.raw_logps, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.sample("qwen3", seconds=1.2)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_enter_while_others_are_decoded(lms, family, decodings):
    requests = crowd(prompts=12, each=3)
    completions = run(build_engine(lms[family], max_rows=6), requests)
    assert_right(lms[family], requests, completions)
    held = [rows for _, rows, _ in decodings]
    assert max(map(len, held)) == 6
    assert any(
        old and new and set(old) & set(new) and set(new) - set(old) for old, new in itertools.pairwise(held)
    )
    at_once = run(build_engine(lms[family], max_rows=64), requests)
    assert [completion.ids.tolist() for completion in completions] == [
        completion.ids.tolist() for completion in at_once
    ]


@pytest.mark.parametrize("each", [8, 20])
def test_rows_enter_also_where_a_prompt_has_as_many_as_there_are_places(lms, decodings, each):
    requests = crowd(prompts=4, each=each)
    completions = run(build_engine(lms["llama"], max_rows=8), requests)
    assert_right(lms["llama"], requests, completions)
    held = [rows for _, rows, _ in decodings]
    assert max(map(len, held)) == 8
    assert (
        sum(bool(set(old) & set(new) and set(new) - set(old)) for old, new in itertools.pairwise(held)) > each
    )


@pytest.mark.sample("llama", seconds=1.2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_cache_sends_the_youngest_rows_back(lms, family, decodings, monkeypatch):
    requests = crowd(prompts=8, each=2)
    engine = build_engine(lms[family], stop_ids=[])
    expected = run(engine, requests)
    del decodings[:]
    entered, admit = [], PagedCache.admit
    monkeypatch.setattr(
        PagedCache, "admit", lambda cache, rows, length: entered.extend(rows) or admit(cache, rows, length)
    )
    bound = 7 * page_bytes(engine) / 1e9
    found = run(build_engine(lms[family], stop_ids=[], cache_gb=bound * 1.001), requests)
    assert_right(lms[family], requests, found)
    assert [completion.ids.tolist() for completion in found] == [
        completion.ids.tolist() for completion in expected
    ]
    assert [completion.finish_reason for completion in found] == [
        completion.finish_reason for completion in expected
    ]
    assert max(pages for *_, pages in decodings) <= 7
    assert len(entered) > len(requests)


def test_a_request_that_can_never_fit_is_refused(lms):
    engine = build_engine(lms["llama"])
    bound = page_bytes(engine) / 1e9
    request = Request(np.arange(10, dtype=np.int32), Sampling(PAGE), 1)
    with pytest.raises(EngineError, match=rf"{10 + PAGE} tokens take .* raise engine.cache_gb"):
        build_engine(lms["llama"], cache_gb=bound * 2.5).generate([request], "sampler")
    assert len(run(build_engine(lms["llama"], cache_gb=bound * 3.5, stop_ids=[]), [request])[0].ids) == PAGE
    with pytest.raises(EngineError, match="in every row"):
        build_engine(lms["llama"], cache_gb=bound * 100, deterministic=True).generate([request], "sampler")


def held_by(lm, pages: int) -> dict[str, float]:
    """Return the engine's settings for a cache of so many pages."""
    return {"cache_gb": (pages + 0.01) * page_bytes(build_engine(lm)) / 1e9}


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 15, 16, 17, 23])
@pytest.mark.parametrize("each", [1, 3])
def test_a_request_may_take_every_page(lms, decodings, prompt, each):
    ids = np.arange(prompt, dtype=np.int32) % NUM_TOKENS
    requests = [Request(ids, Sampling(3 * PAGE - prompt), KEYS.key("every", prompt, n)) for n in range(each)]
    completions = run(build_engine(lms["llama"], stop_ids=[], **held_by(lms["llama"], 3)), requests)
    assert_right(lms["llama"], requests, completions)
    assert [len(completion.ids) for completion in completions] == [3 * PAGE - prompt] * each
    assert max(pages for *_, pages in decodings) == 3


@pytest.mark.sample("0", seconds=1.4)
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_passes_through_a_cache_that_just_holds_its_longest(lms, decodings, seed):
    requests = crowd(prompts=8, each=3, seed=seed)
    longest = max(len(request.ids) + request.sampling.max_new_tokens for request in requests)
    completions = run(
        build_engine(lms["llama"], stop_ids=[], **held_by(lms["llama"], -(-longest // PAGE))), requests
    )
    assert_right(lms["llama"], requests, completions)
    assert [len(completion.ids) for completion in completions] == [
        request.sampling.max_new_tokens for request in requests
    ]
    assert max(pages for *_, pages in decodings) == -(-longest // PAGE)


def test_rows_of_fixed_shapes_may_take_every_page(lms):
    requests = [
        Request(np.full(2 * PAGE + 4, n % NUM_TOKENS, dtype=np.int32), Sampling(4), KEYS.key("fixed", n))
        for n in range(64)
    ]
    lm = lms["llama"]
    completions = run(
        build_engine(lm, stop_ids=[], max_rows=64, deterministic=True, **held_by(lm, 3 * 64)), requests
    )
    assert_right(lm, requests, completions)


def test_samples_of_a_prompt_share_its_pass_and_its_pages(lms, decodings, monkeypatch):
    lm, passes = lms["llama"], []
    prompt = np.arange(2 * PAGE + 3, dtype=np.int32) % NUM_TOKENS
    requests = [Request(prompt, Sampling(5), KEYS.key("shared", n)) for n in range(8)]
    engine = build_engine(lm, stop_ids=[])
    hidden = model_of(engine).hidden
    monkeypatch.setattr(
        model_of(engine), "hidden", lambda ids, **options: passes.append(ids.shape) or hidden(ids, **options)
    )
    completions = run(engine, requests)
    assert passes[0] == (1, len(prompt))
    assert passes[1:] == [(8, 1)] * 4
    assert decodings[0][2] == 2 + 8
    assert_right(lm, requests, completions)
    assert len({completion.ids.tobytes() for completion in completions}) == 8


def test_a_prompt_that_comes_again_is_several_groups(lms, decodings):
    """A prompt comes five times with 4 samples each. Each time is a group of its own, so no shared page has
    more than 4 readers."""
    prompts = [np.full(2 * PAGE, n, dtype=np.int32) for n in (0, 1, 1, 2, 1, 3, 1, 4, 1)]
    requests = [
        Request(ids, Sampling(3), KEYS.key("again", n, sample))
        for n, ids in enumerate(prompts)
        for sample in range(4)
    ]
    completions = run(build_engine(lms["llama"], stop_ids=[]), requests)
    assert_right(lms["llama"], requests, completions)
    assert decodings[0][0]._cache.shared.readers == 4
    assert decodings[0][2] == 9 * 2 + 36


def test_pages_are_all_given_back_and_close_their_gaps(lms, decodings):
    requests = crowd(prompts=30, each=2, seed=1)
    run(build_engine(lms["qwen3"], max_rows=8), requests)
    cache = decodings[-1][0]._cache
    for pages in (cache.own, cache.shared):
        assert sorted({*pages._free, *np.flatnonzero((pages.rows_PG >= 0).any(1)).tolist()}) == list(
            range(pages.used)
        )
    assert cache.own.used < 8 * 4


@pytest.mark.parametrize("backwards", [False, True])
def test_pages_that_move_are_the_last_ones(backwards):
    pages = Pages(1, Storage(64, torch.float32), backwards=backwards)
    taken = [pages.take() for _ in range(40)]
    pages.rows_PG[taken, 0] = taken
    for page in range(0, 30, 2):
        pages.drop(page)
    memory = pages.layer(torch.nn.Identity(), torch.zeros(0, 1, 1), torch.zeros(0, 1, 1))
    for tensor in memory:
        tensor[pages.at(np.arange(40))] = torch.arange(40.0).view(-1, 1, 1, 1).expand(-1, *tensor.shape[1:])
    places = pages.close_gaps(1.03)
    assert places is not None
    assert (pages.used, pages.live) == (25, 25)
    kept = [page for page in range(40) if page >= 30 or page % 2]
    assert sorted(places[kept].tolist()) == list(range(25))
    assert all(pages.rows_PG[places[page], 0] == page for page in kept)
    assert all(places[page] == page for page in kept if page < 25)
    assert all((tensor[pages.at(places[kept])][:, 0, 0, 0] == torch.tensor(kept)).all() for tensor in memory)
    assert pages.close_gaps(1.03) is None
    assert pages.close_gaps(1.0) is None


@pytest.mark.sample("0", seconds=1.5)
@pytest.mark.parametrize("seed", range(3))
def test_shared_pages_and_others_stay_within_one_memory(lms, decodings, monkeypatch, seed):
    """Shared and other pages fit into one cache of 24 pages, and completions are right although its memory is
    filled with NaN at the start."""
    lm, empty = lms["llama"], torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda like, *shape, **asked: empty(like, *shape, **asked).fill_(torch.nan)
    )
    requests = crowd(prompts=24, each=3, seed=seed)
    completions = run(build_engine(lm, max_rows=24, stop_ids=[], **held_by(lm, 24)), requests)
    assert_right(lm, requests, completions)
    cache = decodings[-1][0]._cache
    assert max(pages for *_, pages in decodings) > 20
    assert (
        sum(tensor.nbytes for layer in cache.storage.layers.values() for tensor in layer)
        == 24 * cache.page_bytes
    )


def test_where_the_two_ends_would_meet_gaps_are_closed_first():
    cache = PagedCache(np.full(32, 12 * PAGE), readers=2, pages=40, dtype=torch.float32)
    for row in range(30):
        cache.admit([row], PAGE)
    keys, _ = cache.own.layer(torch.nn.Identity(), torch.zeros(0, 1, 1), torch.zeros(0, 1, 1))
    keys[:30] = torch.arange(30.0).view(-1, 1, 1, 1).expand(-1, *keys.shape[1:])
    for row in range(0, 30, 2):
        cache.free(row)
    assert (cache.own.used, cache.own.live) == (30, 15)
    cache.admit([30, 31], 12 * PAGE)
    assert (cache.own.used, cache.own.live, cache.shared.used) == (15, 15, 12)
    pages = cache.own.at(cache._entries_NJ[1:30:2, 0])
    assert keys[pages, 0, 0, 0].tolist() == list(range(1, 30, 2))
    assert not set(pages) & set(cache.shared.at(np.arange(12)).tolist())


def test_little_of_the_cache_is_padding(tmp_path):
    """In a batch of rows with geometric lengths of mean 32, at most a tenth of the keys that a step computes
    with belong to no token."""
    lm = load_lm(save_model(tmp_path, build_config("llama", context=256)))
    generator = np.random.default_rng(3)
    requests = []
    for prompt in range(24):
        ids = generator.integers(0, NUM_TOKENS, generator.integers(16, 65)).astype(np.int32)
        lengths = np.minimum(generator.geometric(1 / 32, 4), 128)
        requests += [
            Request(ids, Sampling(int(length)), KEYS.key("padding", prompt, n))
            for n, length in enumerate(lengths)
        ]
    engine = build_engine(lm, stop_ids=[], max_rows=64)
    before = engine.work()
    run(engine, requests)
    work = engine.work().since(before)
    assert 0.01 < work.padded_keys / work.keys <= 0.1
