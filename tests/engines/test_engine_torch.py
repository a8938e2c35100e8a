import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from engines import (
    DECODE,
    KEYS,
    ONE,
    SAMPLINGS,
    bits,
    build_engine,
    build_requests,
    log_normaliser,
    model_of,
    plain_logits,
    run,
)
from tiny_models import (
    CONTEXT,
    FAMILIES,
    NUM_TOKENS,
    VOCAB_ROWS,
    build_config,
    save_model,
    slow_distribution,
)
from transformers import AutoModelForCausalLM, MambaConfig

from oat import seeds
from oat.errors import EngineError, ModelError, NonFiniteError
from oat.models.loading import load_lm, load_tokenizer, save_lm
from oat.types import Request, Sampling
from oat.wire import roundtrip


@pytest.fixture(scope="module")
def lms(paths):
    return {family: load_lm(path) for family, path in paths.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_against_a_plain_forward(lms, family):
    requests = build_requests(*SAMPLINGS.values())
    completions = run(build_engine(lms[family], max_rows=8), requests)
    for request, completion in zip(requests, completions, strict=True):
        prompt, sampling = len(request.ids), request.sampling
        logits = plain_logits(lms[family].module, np.concatenate([request.ids, completion.ids]))
        uniforms = seeds.uniforms(
            np.full(len(completion.ids), request.key, np.uint64), prompt + np.arange(len(completion.ids))
        )
        for t, token in enumerate(completion.ids):
            row = logits[prompt - 1 + t]
            expected = slow_distribution(row[:NUM_TOKENS], sampling)
            assert completion.raw_logps[t] == pytest.approx(row[token] - log_normaliser(row), abs=1e-5)
            assert completion.sampled_logps[t] == pytest.approx(expected[token], abs=1e-5)
            below = sum(math.exp(logp) for other, logp in expected.items() if other < token)
            assert below - 1e-5 < uniforms[t] < below + math.exp(expected[token]) + 1e-5
            if sampling.keep_sets:
                kept = completion.kept
                assert kept.ids[kept.offsets[t] : kept.offsets[t + 1]].tolist() == list(expected)
        assert (completion.kept is not None) == sampling.keep_sets
        assert (completion.raw_logps.dtype, completion.sampled_logps.dtype, completion.ids.dtype) == (
            np.float32,
            np.float32,
            np.int32,
        )
        assert completion.finish_reason == ("stop" if completion.ids[-1] == 0 else "length")


def exact_joint(module, prompt: list[int], tokens: int, sampling: Sampling) -> np.ndarray:
    """Return the (8, 8, 8) probabilities of three tokens, computed one prefix at a time."""
    joint = np.zeros((tokens,) * 3)

    def conditional(prefix):
        row = plain_logits(module, np.array(prompt + list(prefix)))[-1][:tokens]
        return {token: math.exp(logp) for token, logp in slow_distribution(row, sampling).items()}

    for first, p_first in conditional(()).items():
        for second, p_second in conditional((first,)).items():
            for third, p_third in conditional((first, second)).items():
                joint[first, second, third] = p_first * p_second * p_third
    return joint


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return the p value of Pearson's test. Cells with an expectation below 5 are merged into one."""
    small = expected < 5
    if small.any():
        counts, expected = (
            np.append(counts[~small], counts[small].sum()),
            np.append(expected[~small], expected[small].sum()),
        )
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(
        torch.tensor((len(counts) - 1) / 2).double(), torch.tensor(statistic / 2).double()
    ).item()


JOINT = {
    "none": Sampling(3),
    "temperature": Sampling(3, temperature=0.6),
    "top_k": Sampling(3, top_k=3),
    "top_p": Sampling(3, top_p=0.8137),
    "min_p": Sampling(3, min_p=0.1537),
    "all": Sampling(3, temperature=1.5, top_k=6, top_p=0.9137, min_p=0.0737),
}


@pytest.mark.sample("all", seconds=6.2)
@pytest.mark.fault("R2")
@pytest.mark.parametrize("name", JOINT)
def test_joint_law_of_three_tokens(tmp_path_factory, name, figure):
    lm = load_lm(
        save_model(
            tmp_path_factory.mktemp("joint"), build_config("llama", vocab_rows=10, layers=1), scale=8.0
        )
    )
    engine = build_engine(lm, num_tokens=8, stop_ids=[], max_rows=4000)
    expected = exact_joint(lm.module, [3, 1], 8, JOINT[name])
    assert expected.sum() == pytest.approx(1)
    for seed in range(5):
        address = seeds.Seeds(seed)
        requests = [
            Request(np.array([3, 1], np.int32), JOINT[name], address.key("joint", name, sample))
            for sample in range(4000)
        ]
        counts = np.zeros_like(expected)
        for completion in engine.generate(requests, "sampler"):
            counts[tuple(completion.ids)] += 1
        assert chi_square_p(counts, expected * 4000) > 0.001, f"seed {seed}"
        figure("1 of 1 chi-square tests of the joint law of 3 tokens with p > 0.001")


@pytest.mark.fault("R2")
def test_the_joint_test_sees_a_wrong_law():
    expected = np.full(64, 4000 / 64)
    counts = np.random.default_rng(0).multinomial(4000, np.linspace(0.8, 1.2, 64) / 64)
    assert chi_square_p(counts.astype(float), expected) < 0.001


@pytest.mark.sample("gpt_neox", seconds=1.2)
@pytest.mark.fault("R2")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_alone_and_in_a_batch(lms, family):
    requests = build_requests(*SAMPLINGS.values(), each=4, seed=1)
    together = run(build_engine(lms[family]), requests)
    engine = build_engine(lms[family])
    for request, expected in zip(requests, together, strict=True):
        (alone,) = run(engine, [request])
        assert alone.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(alone.raw_logps, expected.raw_logps, atol=1e-5)
        np.testing.assert_allclose(alone.sampled_logps, expected.sampled_logps, atol=1e-5)


@pytest.mark.sample("qwen3-24-bfloat16", seconds=10.2)
@pytest.mark.fault("R2")
@pytest.mark.parametrize(("max_rows", "dtype"), [(3, "float32"), (24, "float32"), (24, "bfloat16")])
@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_is_bitwise_under_any_batching(paths, family, max_rows, dtype, figure):
    lengths = [2, 9, 20]
    samplings = [
        dataclasses.replace(sampling, max_new_tokens=length)
        for sampling, length in zip(SAMPLINGS.values(), itertools.cycle(lengths))
    ]
    requests = build_requests(*samplings, each=6, seed=2)
    others = build_requests(*SAMPLINGS.values(), each=4, seed=3)
    engine = build_engine(load_lm(paths[family], dtype=dtype), max_rows=max_rows, deterministic=True)
    expected = [bits(completion) for completion in run(engine, requests)]
    generator = np.random.default_rng(0)
    for parts in (1, 2, 4, 7):
        for part in np.array_split(generator.permutation(len(requests)), parts):
            mixed = [requests[index] for index in part] + others[: generator.integers(len(others))]
            order = generator.permutation(len(mixed))
            found = run(engine, [mixed[place] for place in order])
            for completion, place in zip(found, order, strict=True):
                if place < len(part):
                    assert bits(completion) == expected[part[place]]
        figure(
            f"{len(requests)} of {len(requests)} completions bitwise equal in 1, 2, 4 and 7 queues, in "
            "any order"
        )


def test_deterministic_computes_on_two_threads_at_most(lms, monkeypatch):
    seen = []
    engine = build_engine(lms["llama"], deterministic=True)
    backbone = model_of(engine).module.base_model
    forward = backbone.forward
    monkeypatch.setattr(
        backbone,
        "forward",
        lambda *args, **kwargs: seen.append(torch.get_num_threads()) or forward(*args, **kwargs),
    )
    torch.set_num_threads(4)
    try:
        run(engine, build_requests(Sampling(2)))
        assert set(seen) == {2}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(1)


@pytest.mark.fault("R2")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logps_of_sequences(lms, family, deterministic):
    sequences = [request.ids for request in build_requests(Sampling(1), each=20, seed=4)]
    engine = build_engine(lms[family], max_rows=7, deterministic=deterministic)
    found = engine.logps(sequences, "sampler")
    for ids, logps in zip(sequences, found, strict=True):
        logits = plain_logits(lms[family].module, ids)
        expected = [logits[t][ids[t + 1]] - log_normaliser(logits[t]) for t in range(len(ids) - 1)]
        assert logps.tolist() == pytest.approx(expected, abs=1e-5)
        assert logps.dtype == np.float32
        if deterministic:
            assert engine.logps([ids], "sampler")[0].tobytes() == logps.tobytes()
    assert engine.logps([], "sampler") == []


def test_logps_of_many_tokens_come_in_chunks(lms, monkeypatch):
    monkeypatch.setattr("oat.engines.scoring._HEAD_LOGITS", 8 * VOCAB_ROWS)
    monkeypatch.setattr("oat.engines.shapes.PASS_TOKENS", 32)
    sequences = [request.ids for request in build_requests(Sampling(1), each=9, seed=5)]
    pieces = build_engine(lms["llama"]).logps(sequences, "sampler")
    monkeypatch.undo()
    for piece, whole in zip(pieces, build_engine(lms["llama"]).logps(sequences, "sampler"), strict=True):
        np.testing.assert_allclose(piece, whole, atol=1e-5)


def test_prompts_prefilled_in_several_passes(lms, monkeypatch):
    requests = build_requests(Sampling(4), Sampling(4), each=12, seed=6)
    requests = requests + [dataclasses.replace(request, key=request.key + 1) for request in requests[:10]]
    whole = run(build_engine(lms["qwen3"]), requests)
    monkeypatch.setattr("oat.engines.shapes.PASS_TOKENS", 48)
    for deterministic in (False, True):
        for found, expected in zip(
            run(build_engine(lms["qwen3"], deterministic=deterministic), requests), whole, strict=True
        ):
            assert found.ids.tolist() == expected.ids.tolist()
            np.testing.assert_allclose(found.raw_logps, expected.raw_logps, atol=1e-5)


def test_stop_ids_end_a_response_and_stay(lms):
    requests = build_requests(Sampling(20), each=30, seed=7)
    free = run(build_engine(lms["llama"], stop_ids=[]), requests)
    stopping = run(build_engine(lms["llama"], stop_ids=[4, 5, 6]), requests)
    assert {completion.finish_reason for completion in stopping} == {"stop", "length"}
    for completion, whole in zip(stopping, free, strict=True):
        hits = np.flatnonzero(np.isin(whole.ids, [4, 5, 6]))
        size = hits[0] + 1 if len(hits) else 20
        assert completion.ids.tolist() == whole.ids[:size].tolist()
        assert completion.finish_reason == ("stop" if len(hits) else "length")
        np.testing.assert_allclose(completion.raw_logps, whole.raw_logps[:size], atol=1e-5)


def test_stop_strings_span_tokens_and_stay(lms):
    requests = build_requests(Sampling(24), each=12, seed=8)
    free = run(build_engine(lms["gpt_neox"], stop_ids=[]), requests)
    texts = [DECODE(completion.ids.tolist()) for completion in free]
    stops = tuple(text[9:12] for text in texts[:3])
    stopped = run(
        build_engine(lms["gpt_neox"], stop_ids=[]),
        [
            dataclasses.replace(request, sampling=Sampling(24, stop=stops if index % 2 == 0 else ()))
            for index, request in enumerate(requests)
        ],
    )
    assert sum(completion.finish_reason == "stop" for completion in stopped) >= 2
    for index, (completion, text) in enumerate(zip(stopped, texts, strict=True)):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text] if index % 2 == 0 else []
        assert DECODE(completion.ids.tolist()) == text[: min(ends, default=None)]
        assert completion.finish_reason == ("stop" if ends else "length")


def test_a_stop_string_is_not_looked_for_in_the_prompt(lms):
    engine, prompt = build_engine(lms["llama"], stop_ids=[]), np.array([5, 6, 7], np.int32)
    (free,) = run(engine, [Request(prompt, Sampling(8), 5)])
    text, across = DECODE(free.ids.tolist()), DECODE([7, free.ids[0]])
    assert across not in text
    assert "efg" not in text
    (completion,) = run(engine, [Request(prompt, Sampling(8, stop=("efg", across)), 5)])
    assert bits(completion) == bits(free)


def test_length_and_the_end_of_the_context(lms):
    engine = build_engine(lms["llama"], stop_ids=[])
    long, full = np.ones(CONTEXT - 3, np.int32), np.ones(CONTEXT, np.int32)
    at_length, at_end, no_room, nothing = run(
        engine,
        [
            Request(long, Sampling(2), 1),
            Request(long, Sampling(9), 2),
            Request(full, Sampling(9), 3),
            Request(long, Sampling(0), 4),
        ],
    )
    assert [len(completion.ids) for completion in (at_length, at_end, no_room, nothing)] == [2, 3, 0, 0]
    assert {completion.finish_reason for completion in (at_length, at_end, no_room, nothing)} == {"length"}
    logits = plain_logits(lms["llama"].module, np.concatenate([long, at_end.ids]))
    assert at_end.raw_logps[-1] == pytest.approx(
        logits[-2][at_end.ids[-1]] - log_normaliser(logits[-2]), abs=1e-5
    )
    (shorter,) = run(
        build_engine(lms["llama"], stop_ids=[], context_length=10),
        [Request(np.ones(4, np.int32), Sampling(9), 2)],
    )
    assert len(shorter.ids) == 6


def test_samples_of_a_prompt_differ_by_key_and_repeat(lms):
    prompt = np.array([5, 6, 7], np.int32)
    requests = [Request(prompt, Sampling(12), KEYS.key("n", sample)) for sample in range(16)]
    engine = build_engine(lms["qwen3"], stop_ids=[])
    first, second = run(engine, requests), run(engine, requests)
    assert [bits(completion) for completion in first] == [bits(completion) for completion in second]
    assert len({completion.ids.tobytes() for completion in first}) == 16
    torch.manual_seed(1)
    assert bits(run(engine, requests)[3]) == bits(first[3])


def test_ids_beyond_the_tokenizer_are_never_sampled(paths):
    lm = load_lm(paths["llama"])
    with torch.no_grad():
        lm.module.get_output_embeddings().weight[NUM_TOKENS:] *= 20
    requests = build_requests(
        Sampling(20), Sampling(20, temperature=0.0), Sampling(20, temperature=3.0, top_k=30), each=20
    )
    completions = run(build_engine(lm), requests)
    assert max(completion.ids.max() for completion in completions) < NUM_TOKENS
    for completion in completions[:20]:
        assert (completion.raw_logps <= completion.sampled_logps + 1e-5).all()
    assert min(completion.raw_logps.min() for completion in completions[:20]) < -10


def test_completions_come_as_they_finish_and_travel(lms):
    requests = [
        Request(np.array([3], np.int32), Sampling(size, top_k=3, keep_sets=True), size) for size in (9, 2, 5)
    ]
    order = [
        completion.index
        for completion in build_engine(lms["llama"], stop_ids=[]).generate(requests, "sampler")
    ]
    assert order == [1, 2, 0]
    completion = run(build_engine(lms["llama"]), requests)[0]
    assert bits(roundtrip(completion)) == bits(completion)


def test_kept_sets_are_bounded(lms, monkeypatch):
    wide = Sampling(3, top_p=0.999, keep_sets=True)
    monkeypatch.setattr("oat.engines.decoding.KEPT_LIMIT", 3)
    with pytest.raises(
        EngineError,
        match=r"holds at most 3; lower sampling\.top_k or sampling\.top_p, or use a preference algorithm",
    ):
        run(build_engine(lms["llama"]), build_requests(wide))
    run(
        build_engine(lms["llama"]),
        build_requests(dataclasses.replace(wide, keep_sets=False), Sampling(3, top_k=3, keep_sets=True)),
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.array([], np.int32), Sampling(1), 0), "has no token"),
        (
            Request(np.ones(CONTEXT + 1, np.int32), Sampling(1), 0),
            f"has {CONTEXT + 1} tokens and the context holds {CONTEXT}",
        ),
        (Request(np.array([VOCAB_ROWS], np.int32), Sampling(1), 0), "has an id outside 0 to 43"),
        (Request(np.array([-1], np.int32), Sampling(1), 0), "has an id outside"),
        (Request(ONE, Sampling(1, temperature=-1.0), 0), "temperature = -1.0"),
        (Request(ONE, Sampling(1, temperature=math.nan), 0), "temperature = nan"),
        (Request(ONE, Sampling(1, top_p=0.0), 0), "top_p = 0.0"),
        (Request(ONE, Sampling(1, top_k=-1), 0), "top_k = -1"),
        (Request(ONE, Sampling(1, min_p=1.5), 0), "min_p = 1.5"),
        (Request(ONE, Sampling(-1), 0), "max_new_tokens = -1"),
        (Request(ONE, Sampling(1, stop=("",)), 0), "stop = "),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(lms, request_, message):
    with pytest.raises(EngineError, match=f"request 1 .*{message}"):
        build_engine(lms["llama"]).generate([Request(ONE, Sampling(1), 0), request_], "sampler")


def test_other_refusals(lms, tmp_path):
    engine = build_engine(lms["llama"])
    with pytest.raises(EngineError, match="did you mean `sampler`"):
        engine.generate([], "samplers")
    with pytest.raises(EngineError, match="sequence 0 has no token"):
        engine.logps([np.array([], np.int32)], "sampler")
    with pytest.raises(EngineError, match="tokenizer has 45 tokens"):
        build_engine(lms["llama"], num_tokens=45)
    with pytest.raises(EngineError, match="context of 49"):
        build_engine(lms["llama"], context_length=49)
    with pytest.raises(EngineError, match="max_rows = 0"):
        build_engine(lms["llama"], max_rows=0)
    recurrent = load_lm(
        save_model(tmp_path, MambaConfig(vocab_size=VOCAB_ROWS, hidden_size=32, num_hidden_layers=1))
    )
    with pytest.raises(ModelError, match="`mamba` cannot be decoded with this engine's cache"):
        build_engine(recurrent)


def test_logits_that_are_not_finite_stop_the_run(paths):
    engine = build_engine(load_lm(paths["llama"]))
    model_of(engine).module.get_output_embeddings().weight.data[2, 0] = torch.inf
    for sampling in (*SAMPLINGS.values(), Sampling(2, top_k=NUM_TOKENS - 1)):
        with pytest.raises(NonFiniteError, match="not finite"):
            run(engine, build_requests(sampling))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_in_training_mode_does_not_lose_the_cache(paths, lms):
    engine = build_engine(load_lm(paths["llama"]))
    model_of(engine).module.gradient_checkpointing_enable()
    model_of(engine).module.train()
    requests = build_requests(Sampling(5))
    for found, expected in zip(run(engine, requests), run(build_engine(lms["llama"]), requests), strict=True):
        assert bits(found) == bits(expected)
    assert model_of(engine).module.training


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_gives_transformers_the_engines_log_probabilities(lms, paths, family, tmp_path):
    requests = build_requests(Sampling(8), each=6, seed=9)
    completions = run(build_engine(lms[family]), requests)
    save_lm(lms[family], load_tokenizer(paths[family]), str(tmp_path))
    module = AutoModelForCausalLM.from_pretrained(tmp_path)
    for request, completion in zip(requests, completions, strict=True):
        logits = plain_logits(module, np.concatenate([request.ids, completion.ids]))
        for t, token in enumerate(completion.ids):
            row = logits[len(request.ids) - 1 + t]
            assert completion.raw_logps[t] == pytest.approx(row[token] - log_normaliser(row), abs=1e-5)
