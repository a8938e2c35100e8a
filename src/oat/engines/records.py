"""What a running batch has drawn: for each request its tokens so far, their log-probabilities, kept sets, and
the hidden states of which features are made."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oat.errors import EngineError
from oat.functional.sampling import kept_ids
from oat.models.causal_lm import Layer
from oat.types import KEPT_LIMIT, Completion, FinishReason, KeptSets, Request


class Pooling(NamedTuple):
    """The features of a response that the engine keeps while it samples.

    Attributes:
        layer: the layer whose hidden states are read, or "all".
        takes_last: True: the hidden states from which the last token was drawn. False: their mean over the
            tokens.
    """

    layer: Layer
    takes_last: bool


class Records:
    """The tokens that have been drawn for N requests.

    Attributes:
        made_N: (N,) number of tokens of each request so far. The caller counts.
        ids_NT: (N, T) the tokens.

    Args:
        most: largest number of tokens of a response, T.
        pooling: None: no features are kept.
    """

    def __init__(self, requests: Sequence[Request], most: int, pooling: Pooling | None):
        shape = len(requests), most
        self.ids_NT = np.zeros(shape, np.int32)
        self.made_N = np.zeros(len(requests), dtype=np.int64)
        self._raw_NT = np.zeros(shape, np.float32)
        self._sampled_NT = np.zeros(shape, np.float32)
        self._keeps_N = np.array([request.sampling.keep_sets for request in requests])
        self._kept: dict[int, list[np.ndarray]] = {int(row): [] for row in np.flatnonzero(self._keeps_N)}
        self._pooling = pooling
        self._states_ND = torch.zeros(0)

    def write(self, rows: np.ndarray, drawn: np.ndarray, raw: np.ndarray, sampled: np.ndarray) -> None:
        """Record one token of each of these requests, with its log-probabilities."""
        places = rows, self.made_N[rows]
        for record_NT, column in ((self.ids_NT, drawn), (self._raw_NT, raw), (self._sampled_NT, sampled)):
            record_NT[places] = column

    def keeping(self, rows: np.ndarray) -> np.ndarray:
        """Return which of these requests record kept sets, (R,) bool."""
        return self._keeps_N[rows]

    def write_kept(self, rows: np.ndarray, logits_SV: Tensor) -> None:
        """Record the kept sets of the tokens of these requests.

        Raises:
            EngineError: a set has more than `KEPT_LIMIT` ids.
        """
        ids, counts = (values.cpu().numpy() for values in kept_ids(logits_SV))
        if counts.max() > KEPT_LIMIT:
            raise EngineError(
                f"a token keeps {counts.max()} ids and a recorded kept set holds at most {KEPT_LIMIT}; lower "
                "sampling.top_k or sampling.top_p, or use a preference algorithm, which needs no kept sets"
            )
        ends = np.cumsum(counts)
        for row, start, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            self._kept[row].append(ids[start:end].astype(np.int32))

    def write_states(self, rows: np.ndarray, states_RD: Tensor) -> None:
        """Record the hidden states from which a token of each of these requests is drawn."""
        if self._pooling is None:
            return
        if not len(self._states_ND):
            self._states_ND = torch.zeros(len(self.made_N), states_RD.shape[1], device=states_RD.device)
        at = torch.from_numpy(rows).to(states_RD.device)
        if self._pooling.takes_last:
            self._states_ND[at] = states_RD.float()
        else:
            self._states_ND[at] += states_RD.float()

    def completion(self, row: int, index: int, reason: FinishReason, version: int) -> Completion:
        """Return the completion of a request, with its tokens so far.

        Args:
            index: index that the completion reports for its request.
        """
        made = int(self.made_N[row])
        kept = None
        if self._keeps_N[row]:
            offsets = np.cumsum([0] + [len(ids) for ids in self._kept[row]])
            kept = KeptSets(np.concatenate(self._kept.pop(row)), offsets)
        ids, raw, sampled = (
            values[row, :made].copy() for values in (self.ids_NT, self._raw_NT, self._sampled_NT)
        )
        return Completion(index, ids, raw, sampled, kept, reason, version, self._features(row, made))

    def _features(self, row: int, made: int) -> np.ndarray | None:
        if self._pooling is None:
            return None
        count = 1 if self._pooling.takes_last else made
        return (self._states_ND[row] / count).cpu().numpy()
