"""An engine loads weights: which ones, when, and what it refuses."""

import pytest
import torch
from engines import DECODE, ONE, bits, build_engine, build_requests, model_of, run
from tiny_models import (
    NUM_TOKENS,
)

from oat.engines.torch import TorchEngine
from oat.errors import EngineError, WeightsError
from oat.models.loading import load_lm
from oat.runtime.transfer import checksums
from oat.types import Request, Sampling


class TestLoad:
    @pytest.fixture
    def learner(self, paths):
        lm = load_lm(paths["qwen3"])
        with torch.no_grad():
            for tensor in lm.tensors().values():
                tensor.mul_(0.9)
        return lm

    @pytest.fixture
    def engine(self, paths):
        return build_engine(load_lm(paths["qwen3"]))

    def test_version_and_results_change(self, engine, learner):
        requests = build_requests(Sampling(4))
        before = run(engine, requests)
        engine.load("sampler", 3, learner.tensors())
        after = run(engine, requests)
        assert engine.version("sampler") == 3
        assert checksums(engine.tensors("sampler")) == checksums(learner.tensors())
        assert {completion.version for completion in before} == {0}
        assert {completion.version for completion in after} == {3}
        assert [bits(completion) for completion in after] == [
            bits(completion) for completion in run(build_engine(learner), requests)
        ]
        assert [bits(completion) for completion in after] != [bits(completion) for completion in before]

    def test_one_flipped_bit_in_the_engine_is_seen(self, learner, paths):
        engine = build_engine(load_lm(paths["qwen3"]))
        engine.load("sampler", 1, learner.tensors())
        held = model_of(engine)
        name = "model.layers.1.mlp.up_proj.weight"
        for place, bit in ((0, 0), (17, 31)):
            sent = {key: tensor.detach().clone() for key, tensor in held.tensors().items()}
            held.tensors()[name].data.view(-1).view(torch.int32)[place] ^= (
                1 << bit if bit < 31 else -(1 << 31)
            )
            found, before = checksums(engine.tensors("sampler")), checksums(sent)
            assert [key for key in sent if found[key] != before[key]] == [name]

    def test_the_tensors_are_those_that_generate(self, learner, paths):
        engine = build_engine(load_lm(paths["qwen3"], dtype="bfloat16"))
        engine.load("sampler", 1, learner.tensors())
        held = model_of(engine)
        assert {name: id(tensor) for name, tensor in engine.tensors("sampler").items()} == {
            name: id(tensor) for name, tensor in held.tensors().items()
        }
        assert checksums(engine.tensors("sampler")) != checksums(learner.tensors())

    def test_what_does_not_fit_is_refused_and_nothing_changes(self, engine, learner):
        before = run(engine, build_requests(Sampling(3)))
        tensors = learner.tensors()
        name = sorted(tensors)[-1]
        with pytest.raises(WeightsError, match=r"was not sent `model\.embed_tokens\.weight`"):
            engine.load(
                "sampler",
                1,
                {key: tensor for key, tensor in tensors.items() if key != "model.embed_tokens.weight"},
            )
        with pytest.raises(
            WeightsError,
            match=(
                r"was sent `model\.norm\.weigth`, which its model lacks; did you mean "
                r"`model\.norm\.weight`"
            ),
        ):
            engine.load("sampler", 1, {**tensors, "model.norm.weigth": tensors["model.norm.weight"]})
        with pytest.raises(WeightsError, match=r"holds `.*` as \(.*\) and was sent \(3,\)"):
            engine.load("sampler", 1, {**tensors, name: torch.zeros(3)})
        assert engine.version("sampler") == 0
        assert [bits(completion) for completion in run(engine, build_requests(Sampling(3)))] == [
            bits(completion) for completion in before
        ]

    def test_shared_memory_is_not_copied_and_stays_trainable(self, learner):
        engine = build_engine(learner)
        versions = {name: tensor._version for name, tensor in learner.tensors().items()}
        engine.load("sampler", 7, {name: tensor.detach() for name, tensor in learner.tensors().items()})
        assert {name: tensor._version for name, tensor in learner.tensors().items()} == versions
        assert checksums(engine.tensors("sampler")) == checksums(learner.tensors())
        run(engine, build_requests(Sampling(2)))
        learner.head(learner.hidden(torch.tensor([[1, 2]]))).sum().backward()
        assert not any(tensor.is_inference() for tensor in learner.tensors().values())

    def test_copied_weights_stay_trainable(self, learner, paths):
        engine = build_engine(load_lm(paths["qwen3"]))
        engine.load("sampler", 1, learner.tensors())
        held = model_of(engine)
        held.head(held.hidden(torch.tensor([[1, 2]]))).sum().backward()
        assert all(parameter.grad is not None for parameter in held.module.parameters())

    def test_slots_that_share_a_model_share_its_version(self, learner, paths):
        own = load_lm(paths["qwen3"])
        engine = TorchEngine(
            {"sampler": own, "policy": own, "reference": learner},
            num_tokens=NUM_TOKENS,
            stop_ids=[0],
            decode=DECODE,
        )
        engine.load("sampler", 2, {name: tensor * 1.1 for name, tensor in own.tensors().items()})
        assert [engine.version(slot) for slot in ("sampler", "policy", "reference")] == [2, 2, 0]
        requests = build_requests(Sampling(4))
        assert [bits(completion) for completion in run(engine, requests, "policy")] == [
            bits(completion) for completion in run(engine, requests)
        ]
        assert [bits(completion) for completion in run(engine, requests, "reference")] != [
            bits(completion) for completion in run(engine, requests)
        ]

    def test_a_load_while_generating_is_an_error(self, engine, learner):
        completions = engine.generate([Request(ONE, Sampling(size), size) for size in (1, 9)], "sampler")
        next(completions)
        engine.load("sampler", 1, learner.tensors())
        with pytest.raises(EngineError, match="were replaced while it was generating"):
            next(completions)
