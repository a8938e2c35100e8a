"""A probe of weights that cannot be read back: after a transfer, log-probabilities of a fixed sequence.

The learner and the holder compute the log-probabilities of the same tokens. A holder that goes on with old
weights, or with keys and values that it cached under old weights, has other log-probabilities. The sequence
is always the same, since only what was computed before can be cached.
"""

from dataclasses import dataclass

import numpy as np

from oat.engines.base import Engine
from oat.errors import WeightsError
from oat.protocols import Learner
from oat.types import Probe, Segment, Shipment, Trajectory

PROBE_TOKENS = 160
"""Most tokens of the sequence. Engines that cache prefixes do so in blocks of up to 128 tokens."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference of log-probabilities, nats, by the lowest precision of learner and engine."""
_STRIDE = 7919


@dataclass(frozen=True, eq=False)
class Probing:
    """How a run probes its slots.

    Attributes:
        ids: the sequence (`probe_ids`).
        tolerance: largest mean absolute difference of log-probabilities, nats.
    """

    ids: np.ndarray
    tolerance: float

    def probe(self, learner: Learner, model: str) -> Probe:
        """Return the sequence with its log-probabilities under the learner's present weights of a model."""
        response = Segment("model", self.ids[1:], mask=np.ones(len(self.ids) - 1, dtype=bool))
        row = Trajectory("recorded", (Segment("context", self.ids[:1]), response), "stop", "")
        return Probe(self.ids, learner.forward(model, [row], {"raw"})["raw"].numpy(), self.tolerance)


def probe_ids(num_tokens: int, context: int | None) -> np.ndarray:
    """Return the sequence of a probe, (T,) int32: ids from all over the vocabulary.

    Args:
        num_tokens: size of the vocabulary.
        context: largest number of tokens of a sequence; None: no limit.
    """
    length = PROBE_TOKENS if context is None else min(PROBE_TOKENS, context)
    return (np.arange(1, length + 1) * _STRIDE % num_tokens).astype(np.int32)


def refuse_other_logps(probe: Probe, engine: Engine, shipment: Shipment) -> None:
    """Refuse weights under which the engine's log-probabilities are not those of the probe.

    Raises:
        WeightsError: they differ by more than the tolerance.
    """
    found = engine.logps([probe.ids], shipment.slot)[0]
    difference = float(np.abs(found - probe.logps).mean())
    if not difference <= probe.tolerance:
        raise WeightsError(
            f"slot {shipment.slot}, version {shipment.version}: after the load, its log-probabilities of the "
            f"probe differ from the learner's by {difference:.3g} nats in the mean, and "
            f"{probe.tolerance:g} is allowed; it goes on with old weights, or with keys and values of old "
            "weights. Do not trust this run's newest samples"
        )
