"""Weights leave a model a bucket at a time: the copies that live at once are those of one bucket."""

import gc
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from fixtures import World
from weights import Source

from oat.models.loading import load_lm
from oat.runtime import weights as sending
from oat.runtime.transfer import in_shares
from oat.runtime.weights import Weights
from oat.types import Bucket, Receipt, Shipment

MOST = 2000


class Copying(Source):
    """A learner whose weights leave as copies, as those of shards or of another process. It knows which
    copies live."""

    def __init__(self, world: World):
        super().__init__(load_lm(str(world.folder / "model")))
        self.living: dict[int, int] = {}

    def named_tensors(
        self, model: str, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().named_tensors(model, names):
            copy = tensor.clone()
            self.living[id(copy)] = copy.nbytes
            weakref.finalize(copy, self.living.pop, id(copy))
            yield name, copy
            del copy


class Watching:
    """A holder that notes how many bytes of copies live when a bucket comes. It keeps nothing."""

    def __init__(self, learner: Copying):
        self.learner = learner
        self.most = 0
        self.sums: dict[str, int] = {}
        self.shipment: Shipment | None = None

    def begin(self, shipment: Shipment) -> None:
        self.shipment, self.sums = shipment, {}

    def put(self, bucket: Bucket) -> None:
        self.most = max(self.most, sum(self.learner.living.values()))
        self.sums |= bucket.sums

    def commit(self) -> Receipt:
        assert self.shipment is not None
        return Receipt(self.shipment.slot, self.shipment.version, self.sums)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending.buckets, "__defaults__", (MOST,))


@pytest.mark.usefixtures("small")
def test_one_bucket_lives_at_a_time(world: World) -> None:
    learner = Copying(world)
    holder: Any = Watching(learner)
    gc.disable()  # a copy that only a circle keeps would be found too late
    try:
        Weights({"sampler": holder}, 1).sync(learner, 1)  # type: ignore[arg-type]
    finally:
        gc.enable()
    sizes = dict(learner.sizes("policy"))
    shares = [sum(sizes[name] for name in names) for names in in_shares(sizes.items(), MOST)]
    assert len(shares) > 4, "the model travels in several buckets"
    assert holder.most == max(shares)
    assert learner.living == {}


def test_a_copy_that_lags_behind_is_replaced_tensor_by_tensor(world: World) -> None:
    """With `sync_every` above 1 the sampler's weights are kept, and there is never a second copy of them."""
    learner = Copying(world)
    weights = Weights({"sampler": Watching(learner)}, 2)  # type: ignore[dict-item]
    weights.take(learner, 1)  # type: ignore[arg-type]
    old = {name: weakref.ref(tensor) for name, tensor in weights.kept["sampler"].items()}
    living: list[int] = []
    named = learner.named_tensors

    def watched(*given: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named(*given):
            living.append(sum(each() is not None for each in old.values()))
            yield name, tensor

    learner.named_tensors = watched  # type: ignore[method-assign]
    gc.disable()
    try:
        weights.take(learner, 2)  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert living == [*range(len(old), 0, -1)]
    assert not any(each() for each in old.values())
