"""Weights travel in buckets. Until all have arrived undamaged, the old weights answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, made, oat
from hypothesis import given
from hypothesis import strategies as st
from weights import Source, held, in_buckets, weights_of

from oat import wire
from oat.assemble.run import build
from oat.config.load import load_config
from oat.engines.torch import TorchEngine
from oat.errors import WeightsError
from oat.loop import train
from oat.models.loading import load_lm
from oat.resolve.resolve import resolve
from oat.runtime.local import over_wire
from oat.runtime.transfer import Inbox
from oat.runtime.weights import Weights
from oat.types import Bucket, Completion, Request, Shipment

SMALL = 600
"""Most bytes of a bucket in these tests; the tiny model then travels in many."""


@pytest.fixture
def source(world: World) -> Source:
    return Source(load_lm(str(world.folder / "model")))


def engine_of(world: World) -> TorchEngine:
    slots = {"sampler": load_lm(str(world.folder / "model"))}
    return TorchEngine(slots, num_tokens=16, stop_ids=[1], decode=lambda ids: "")


def sent(source: Source) -> tuple[Shipment, list[Bucket]]:
    """Return the transfer of the source's weights as version 1."""
    tensors = weights_of(source)
    found = in_buckets("sampler", 1, tensors, SMALL)
    assert len(found) > 8
    return Shipment("sampler", 1, tuple(tensors)), found


@given(sizes=st.lists(st.integers(0, 12), max_size=12), most=st.integers(1, 40))
def test_buckets_have_every_tensor_once_and_in_order(sizes: list[int], most: int) -> None:
    tensors = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    found = [bucket.tensors for bucket in in_buckets("sampler", 1, tensors, most)]
    assert [name for bucket in found for name in bucket] == [*tensors]
    for bucket in found:
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket.values()) <= most


@pytest.mark.fault("R15")
@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("how", ["cut off", "lost", "damaged"])
def test_a_torn_transfer_leaves_the_old_weights(
    how: str, wired: bool, world: World, source: Source, figure: Callable[[str], None]
) -> None:
    """A transfer is torn at each of its buckets. The engine answers with its old weights and version, and
    the next whole transfer succeeds."""
    engine = engine_of(world)
    inbox: Any = over_wire(Inbox(engine)) if wired else Inbox(engine)
    before = held(engine, "sampler")
    source.move()
    shipment, all_buckets = sent(source)
    for torn in range(len(all_buckets)):
        inbox.begin(shipment)
        for number, bucket in enumerate(all_buckets):
            if number != torn:
                inbox.put(bucket)
            elif how == "cut off":
                break
            elif how == "damaged":
                name = next(iter(bucket.tensors))
                turned = bucket.tensors[name].clone()
                turned.view(-1).view(torch.uint8)[0] ^= 1
                with pytest.raises(WeightsError, match=rf"1 tensors changed on the way \({name}\)"):
                    inbox.put(replace(bucket, tensors={**bucket.tensors, name: turned}))
        with pytest.raises(
            WeightsError, match=r"tensors did not arrive .*; the holder keeps its old weights"
        ):
            inbox.commit()
        assert (held(engine, "sampler"), engine.version("sampler")) == (before, 0)
    inbox.begin(shipment)
    for bucket in all_buckets:
        inbox.put(bucket)
    receipt = inbox.commit()
    assert (receipt.checksums, engine.version("sampler")) == (held(engine, "sampler"), 1)
    assert receipt.checksums != before
    figure(f"{len(all_buckets)} of {len(all_buckets)} torn transfers left the old weights ({how})")


def test_a_bucket_of_another_transfer_is_refused(world: World, source: Source) -> None:
    inbox = Inbox(engine_of(world))
    shipment, all_buckets = sent(source)
    with pytest.raises(WeightsError, match="without the beginning of a transfer"):
        inbox.put(all_buckets[0])
    inbox.begin(shipment)
    with pytest.raises(WeightsError, match="a bucket of slot sampler, version 2, came in between"):
        inbox.put(replace(all_buckets[0], version=2))
    with pytest.raises(WeightsError, match="without the beginning of a transfer"):
        Inbox(engine_of(world)).commit()


def test_a_bucket_travels(source: Source) -> None:
    shipment, all_buckets = sent(source)
    assert wire.roundtrip(shipment) == shipment
    arrived = wire.roundtrip(all_buckets[0])
    assert arrived.sums == all_buckets[0].sums
    assert all(torch.equal(arrived.tensors[name], tensor) for name, tensor in all_buckets[0].tensors.items())


def test_who_loads_one_of_two_slots_with_one_storage_has_loaded_both(world: World, source: Source) -> None:
    engine = TorchEngine(
        {"sampler": source.lm, "policy": source.lm}, num_tokens=16, stop_ids=[1], decode=lambda ids: ""
    )
    holders = {"sampler": Inbox(engine), "policy": Inbox(engine)}
    weights = Weights(holders, 1, shared=[{"sampler", "policy"}])
    weights.push("policy", 4, source)
    assert weights.versions == {"sampler": 4, "policy": 4}
    assert engine.version("sampler") == 4


class Stale(TorchEngine):
    """An engine that answers with the version before the one that it was given."""

    def generate(self, requests: Sequence[Request], slot: str) -> Iterator[Completion]:
        for completion in super().generate(requests, slot):
            yield replace(completion, version=completion.version - 1)


@pytest.mark.sample("training", seconds=0.3)
@pytest.mark.fault("R15")
@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_stale_version_is_found_at_its_first_completion(
    where: str, world: World, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """After two steps the engine begins to answer with old weights. The run ends before it learns from one
    of these answers, and so does an evaluation, whose other errors a run survives."""
    evaluation = {"evaluation.every": 3 if where == "evaluation" else 50}
    config = world.config("dpo", tmp_path, {"stop.max_steps": 5, "compute.serialise": False, **evaluation})
    run = build(resolve(*load_config(config)), directory=made(tmp_path / "run"))
    engine: Any = run.collector.actor.engine  # type: ignore[attr-defined]
    steps = []

    def planted(step: int, values: Any) -> None:
        steps.append(step)
        if step == 2 and where == "training":
            engine.__class__ = Stale

    if where == "evaluation":
        original = run.weights.push

        def push(slot: str, version: int, learner: Any) -> None:
            original(slot, version, learner)
            if slot == "policy" and version == 3:
                engine.__class__ = Stale

        run.weights.push = push  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match=r"slot (sampler|policy): a response came from version"):
        train(run, planted)
    assert steps[-1] == 2
    figure("1 of 1 stale versions found at their first completion")


def test_a_whole_run_agrees_about_versions(world: World, tmp_path: Path) -> None:
    """A sampler that lags, a reference that follows, and an evaluation: no response is refused."""
    changes = {
        "learner.sync_every": 2,
        "model.reference_update": {"every": 1, "mix": 0.5},
        "algorithm": {"name": "xpo", "prompts": 4},
        "evaluation.every": 1,
        "stop.max_steps": 4,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
