"""Episodes of several turns: the engine keeps the pages of an episode, and computes only the new tokens. What
it draws is what it draws without kept pages."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from engines import KEYS, bits, build_engine, log_normaliser, model_of, page_bytes, plain_logits, run
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_model

from oat.engines.cached_attention import Continuing
from oat.engines.decoding import Decoding
from oat.engines.paged_cache import PAGE, PagedCache
from oat.errors import EngineError
from oat.models.loading import load_lm
from oat.types import Request, Sampling

CONTEXT = 160


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    return {
        family: load_lm(save_model(tmp_path_factory.mktemp(family), build_config(family, context=CONTEXT)))
        for family in FAMILIES
    }


def episodes(*, prompts: int, each: int, seed: int = 0) -> list[Request]:
    """Return the requests of first turns: several samples each for prompts of 1 to 24 tokens, with responses
    of up to 12 tokens."""
    generator = np.random.default_rng(seed)
    requests = []
    for prompt in range(prompts):
        ids = generator.integers(0, NUM_TOKENS, generator.integers(1, 25)).astype(np.int32)
        requests += [
            Request(ids, Sampling(int(generator.integers(1, 13))), KEYS.key("turns", seed, prompt, n), True)
            for n in range(each)
        ]
    return requests


def message(request: Request, turn: int) -> np.ndarray:
    """Return 0 to 12 tokens that an environment says to a response; they depend on episode and turn alone."""
    generator = np.random.default_rng([request.key % 2**32, turn])
    return generator.integers(0, NUM_TOKENS, generator.integers(0, 13)).astype(np.int32)


def played(
    engine,
    requests: list[Request],
    turns: int = 4,
    *,
    keeps: bool = True,
    between: Callable[[int], object] = lambda turn: None,
    goes_on: Callable[[int, int], bool] = lambda number, turn: True,
) -> list[list]:
    """Play episodes, and return for each the completions of its turns, with the request of each.

    Args:
        between: called before each turn after the first.
        goes_on: whether the episode of this number goes on after this turn.
    """
    told: list[list] = [[] for _ in requests]
    playing = dict(enumerate(requests))
    for turn in range(turns):
        if turn:
            between(turn)
        numbers = list(playing)
        sent = [
            Request(playing[number].ids, playing[number].sampling, playing[number].key, keeps)
            for number in numbers
        ]
        for number, request, completion in zip(numbers, sent, run(engine, sent), strict=True):
            told[number].append((request, completion))
            ids = np.concatenate([request.ids, completion.ids, message(request, turn)])
            playing[number] = Request(ids, request.sampling, request.key)
            if not goes_on(number, turn):
                del playing[number]
    return told


def assert_same(found: list[list], expected: list[list]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [completion.ids.tolist() for _, completion in one] == [
            completion.ids.tolist() for _, completion in other
        ]
        for (_, mine), (_, theirs) in zip(one, other, strict=True):
            np.testing.assert_allclose(mine.raw_logps, theirs.raw_logps, atol=1e-5)
            np.testing.assert_allclose(mine.sampled_logps, theirs.sampled_logps, atol=1e-5)
            assert mine.finish_reason == theirs.finish_reason


def assert_right(lm, told: list[list]) -> None:
    for request, completion in itertools.chain.from_iterable(told):
        rows = plain_logits(lm.module, np.concatenate([request.ids, completion.ids]))
        expected = [
            row[token] - log_normaliser(row)
            for row, token in zip(rows[len(request.ids) - 1 : -1], completion.ids, strict=True)
        ]
        np.testing.assert_allclose(completion.raw_logps, expected, atol=1e-5, rtol=1e-5)


def held_by(lm, pages: int) -> dict[str, float]:
    """Return the engine's settings for a cache of so many pages."""
    return {"cache_gb": (pages + 0.01) * page_bytes(build_engine(lm)) / 1e9}


@pytest.fixture
def watched(monkeypatch):
    """Return a dict: `most`, the largest number of pages in use; `bytes`, the largest memory of a cache;
    `new`, the numbers of tokens in passes over new tokens; `fresh`, those of passes over whole sequences."""
    seen = {"most": 0, "bytes": 0, "new": [], "fresh": []}
    step, init, fill = Decoding.step, Continuing.__init__, Decoding._fill

    def stepped(decoding):
        finished = step(decoding)
        cache = decoding._cache
        seen["most"] = max(seen["most"], cache.own.live + cache.shared.live)
        held = [tensor for layer in cache.storage.layers.values() for tensor in layer]
        seen["bytes"] = max(seen["bytes"], sum(tensor.nbytes for tensor in held))
        return finished

    def continued(layout, cache, rows, counts, device):
        init(layout, cache, rows, counts, device)
        seen["new"].append(int(counts.sum()))

    def filled(decoding, groups):
        if groups:
            seen["fresh"].append(sum(len(decoding._so_far(group[0])) for group in groups))
        return fill(decoding, groups)

    monkeypatch.setattr(Decoding, "step", stepped)
    monkeypatch.setattr(Continuing, "__init__", continued)
    monkeypatch.setattr(Decoding, "_fill", filled)
    return seen


@pytest.fixture
def full_of_nan(monkeypatch):
    """Fill new memory with NaN, so that a test fails if something is read that was not written."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda like, *shape, **asked: empty(like, *shape, **asked).fill_(torch.nan)
    )


@pytest.mark.sample("llama", seconds=1.5)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_computes_only_its_new_tokens(lms, family, watched):
    requests = episodes(prompts=5, each=3)
    lm = lms[family]
    expected = played(build_engine(lm), requests, keeps=False)
    assert watched["new"] == []
    watched["fresh"].clear()
    told = played(build_engine(lm), requests)
    assert_same(told, expected)
    assert_right(lm, told)
    assert watched["fresh"] == [sum(len(request.ids) for request in requests[::3])]
    said = [
        sum(len(after[0].ids) - len(before[0].ids) - len(before[1].ids) + 1 for before, after in pairs)
        for pairs in zip(*([*itertools.pairwise(episode)] for episode in told), strict=True)
    ]
    assert watched["new"] == said


@pytest.mark.usefixtures("full_of_nan")
@pytest.mark.sample("0", seconds=1.5)
@pytest.mark.parametrize("seed", range(3))
def test_more_episodes_than_places_and_some_end_early(lms, watched, seed):
    requests = episodes(prompts=9, each=3, seed=seed)

    def goes_on(number: int, turn: int) -> bool:
        return (number + seed) % 4 > turn

    lm = lms["llama"]
    told = played(build_engine(lm, max_rows=6), requests, goes_on=goes_on)
    assert_right(lm, told)
    assert_same(told, played(build_engine(lm), requests, keeps=False, goes_on=goes_on))
    assert len({len(episode) for episode in told}) == 4


@pytest.mark.usefixtures("full_of_nan")
def test_a_memory_that_grows_is_clean():
    """Pages of both sets keep their content, and those that are new hold zeros."""
    cache = PagedCache(np.array([2, 2, 2, 12]) * PAGE, readers=2, pages=100, dtype=torch.float32)
    like, layer = torch.zeros(0, 1, 1), torch.nn.Identity()
    cache.admit([0, 1], 2 * PAGE)
    cache.admit([2], 2 * PAGE)
    cache.admit([3], 12 * PAGE)
    for pages, value in ((cache.own, 3.0), (cache.shared, 5.0)):
        for tensor in pages.tensors(layer, like, like):
            tensor.fill_(value)
    cache.free(1)
    cache.free(3)
    cache.index(np.array([2]))
    cache.park(np.array([0, 2]))
    cache.renumber(np.array([2, -1, 0]), np.full(3, 20 * PAGE))
    assert cache.storage.capacity == 60
    cache.admit_again(np.array([0, 2]), np.array([19, 20]) * PAGE)
    pages = cache.pages_at(np.array([0, 2]))
    keys, _ = cache.own.layer(layer, like, like)
    cache.shared.layer(layer, like, like)
    assert keys[pages, 0, 0, 0].tolist() == [
        [3.0] * 2 + [0.0] * 17 + [keys[-1, 0, 0, 0]],
        [5.0] * 2 + [0.0] * 18,
    ]


@pytest.mark.usefixtures("full_of_nan")
@pytest.mark.sample("4-0", seconds=3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_rows", [4, 64])
def test_under_pressure_pages_are_dropped_and_computed_again(lms, watched, max_rows, seed):
    lm = lms["qwen3"]
    requests = episodes(prompts=6, each=3, seed=seed)
    expected = played(build_engine(lm, stop_ids=[]), requests, keeps=False)
    longest = max(len(request.ids) + len(completion.ids) for _, *_, (request, completion) in expected)
    most = -(-longest // PAGE) + 12
    watched.update(most=0, bytes=0, new=[], fresh=[])
    told = played(build_engine(lm, stop_ids=[], max_rows=max_rows, **held_by(lm, most)), requests)
    assert_same(told, expected)
    assert_right(lm, told)
    assert watched["most"] <= most
    assert watched["bytes"] <= most * page_bytes(build_engine(lm))
    assert watched["new"], "some pages are kept"
    assert len(watched["fresh"]) > 1, "some are not"


def test_samples_of_a_prompt_go_on_sharing_its_pages(lms, watched):
    lm = lms["llama"]
    prompt = np.arange(4 * PAGE + 3, dtype=np.int32) % NUM_TOKENS
    requests = [Request(prompt, Sampling(3), KEYS.key("shared", n), True) for n in range(8)]
    told = played(build_engine(lm, stop_ids=[]), requests, turns=3)
    assert_right(lm, told)
    longest = max(len(request.ids) + len(completion.ids) for _, _, (request, completion) in told)
    assert watched["most"] <= 4 + 8 * (-(-longest // PAGE) - 4)


@pytest.mark.sample("bfloat16", seconds=2.2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_keeps_nothing_and_is_bitwise_the_same(tmp_path, watched, dtype):
    """What was kept would have been computed in other shapes, which round differently."""
    path = save_model(tmp_path, build_config("llama", context=CONTEXT))
    lm = load_lm(path, dtype=dtype)
    requests = episodes(prompts=4, each=2, seed=5)
    told = played(build_engine(lm, deterministic=True), requests)
    beside = episodes(prompts=3, each=1, seed=6)
    other = played(build_engine(lm, deterministic=True), beside + requests, keeps=False)[len(beside) :]
    assert [[bits(completion) for _, completion in episode] for episode in told] == [
        [bits(completion) for _, completion in episode] for episode in other
    ]
    assert watched["new"] == []


def test_bfloat16_goes_on_with_the_cache(tmp_path, watched):
    lm = load_lm(save_model(tmp_path, build_config("qwen3", context=CONTEXT)), dtype="bfloat16")
    requests = episodes(prompts=4, each=2, seed=7)
    told = played(build_engine(lm), requests, turns=2)
    assert watched["new"]
    for request, completion in itertools.chain.from_iterable(told):
        ids = np.concatenate([request.ids, completion.ids])
        expected = build_engine(lm).logps([ids], "sampler")[0][len(request.ids) - 1 :]
        np.testing.assert_allclose(completion.raw_logps, expected, atol=0.05)


def test_the_same_turns_give_the_same_bits(lms):
    requests = episodes(prompts=5, each=3, seed=2)
    first, second = (
        [
            [bits(completion) for _, completion in episode]
            for episode in played(build_engine(lms["llama"], max_rows=6), requests)
        ]
        for _ in range(2)
    )
    assert first == second


def test_new_weights_drop_what_is_kept(lms, tmp_path, watched):
    lm = load_lm(save_model(tmp_path, build_config("llama", context=CONTEXT)))
    requests = episodes(prompts=3, each=2)
    engine = build_engine(lm)
    tensors = {name: tensor.detach() * 1.5 for name, tensor in lm.tensors().items()}
    told = played(engine, requests, turns=2, between=lambda turn: engine.load("sampler", 1, tensors))
    assert watched["new"] == []
    assert_right(model_of(engine), [episode[1:] for episode in told])
    assert {completion.version for _, (_, completion) in told} == {1}


def test_release_gives_the_memory_back(lms, watched):
    requests = episodes(prompts=3, each=2)
    engine, keys = build_engine(lms["llama"]), [request.key for request in requests]
    played(engine, requests, turns=1)
    (kept,) = engine._kept.values()
    held = kept.cache.own.live
    engine.release("sampler", [*keys[:2], 12345])
    assert 0 < kept.cache.own.live < held
    engine.release("sampler", keys)
    assert engine._kept == {}
    engine.release("sampler", keys)
    with pytest.raises(EngineError, match="did you mean `sampler`"):
        engine.release("samplers", [])


def test_an_error_or_an_early_end_leaves_nothing(lms):
    engine, requests = build_engine(lms["llama"]), episodes(prompts=3, each=2)
    iterator = engine.generate(requests, "sampler")
    next(iterator)
    iterator.close()
    assert engine._kept == {}
    played(engine, requests, turns=1)
    iterator = engine.generate(requests, "sampler")
    next(iterator)
    engine.load("sampler", 2, engine._slots["sampler"].tensors())
    with pytest.raises(EngineError, match="were replaced"):
        list(iterator)
    assert engine._kept == {}


def test_other_words_under_the_same_key_are_computed_from_the_start(lms, watched):
    lm, engine = lms["llama"], build_engine(lms["llama"])
    (first, second) = episodes(prompts=2, each=1, seed=3)
    played(engine, [first, second], turns=1)
    changed = Request(
        np.concatenate([first.ids[:-1], [7, 8, 9] * 9]).astype(np.int32), Sampling(4), first.key
    )
    twice = Request(np.concatenate([second.ids, [5]]).astype(np.int32), Sampling(4), first.key)
    watched["new"].clear()
    found = run(engine, [changed, twice])
    assert watched["new"] == []
    assert_right(lm, [[(changed, found[0])], [(twice, found[1])]])


def test_two_requests_with_one_key_do_not_share_a_row(lms):
    lm, engine = lms["llama"], build_engine(lms["llama"], stop_ids=[])
    (first,) = episodes(prompts=1, each=1, seed=4)
    ((_, completion),) = played(engine, [first], turns=1)[0]
    ids = np.concatenate([first.ids, completion.ids, [3]]).astype(np.int32)
    again = [Request(ids, Sampling(12, temperature=heat), first.key, True) for heat in (0.0, 9.0)]
    found = run(engine, again)
    assert found[0].ids[0] != found[1].ids[0]
    assert_right(lm, [[pair] for pair in zip(again, found, strict=True)])


def test_two_iterators_at_once(lms):
    lm, engine = lms["llama"], build_engine(lms["llama"])
    one, other = episodes(prompts=3, each=2, seed=8), episodes(prompts=2, each=2, seed=9)
    first, second = engine.generate(one, "sampler"), engine.generate(other, "sampler")
    found = [[], []]
    for a, b in itertools.zip_longest(first, second):
        found[0] += [a] if a else []
        found[1] += [b] if b else []
    for requests, completions in zip((one, other), found, strict=True):
        completions.sort(key=lambda completion: completion.index)
        assert_right(lm, [[pair] for pair in zip(requests, completions, strict=True)])
