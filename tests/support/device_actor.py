"""The side of an actor, which looks where the tensors are that it gets and has."""

from collections.abc import Sequence
from typing import Any

import torch
from pretended import DEVICE

from oat.assemble.actor_side import ActorWorker
from oat.types import ENSEMBLE


class DeviceActor(ActorWorker):
    """Refuses weights that arrive elsewhere than on the CPU, and holders that have theirs elsewhere than on
    the pretended device."""

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        if name == "put":
            _, bucket = arguments
            assert {tensor.device for tensor in bucket.tensors.values()} == {torch.device("cpu")}
        reply = super().call(name, arguments)
        if name == "commit" and arguments[0] != ENSEMBLE:
            lm = self._side.inboxes[arguments[0]].holder._model(arguments[0])
            assert {tensor.device for tensor in lm.tensors().values()} == {DEVICE}
        return reply
