"""The learner's models of trajectories. Each gives one number for each trained token, or for each row.

The sequences that a forward pass of the learner computes for rows.

The simplest choice is the rows themselves. A pass with many tokens to spare computes less:

1. A prompt that several rows begin with is computed once.
2. Rows that are equal, up to the last token whose hidden state is read, are one sequence. Samples of a
   prompt are often equal if responses are short.
3. Tokens of a row after the last one whose hidden state is read are left out. To score a response, nobody
   reads the hidden state of its last token.

Attention is causal, so the hidden states that are read are those of the whole rows. Only the rounding of the
weights' gradients differs, since equal rows are added up earlier.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from oat.algorithms.base import STATES
from oat.errors import CheckpointError
from oat.functional.head import linear_functionals
from oat.functional.logprobs import chunked_head, sampled_logps, token_entropy, token_logps
from oat.hardware.roofline import WorkCounter
from oat.models.beside import has_left_over_adapter
from oat.models.causal_lm import CausalLM, Layer, is_adapter
from oat.models.root import Root
from oat.types import Trajectory

SHARE_FROM = 1.2
"""A pass computes fewer tokens if it would otherwise have more than this many times as many."""
SHORTEN_FROM = 256
"""A pass with fewer tokens than this number shares prompts, but neither joins nor shortens rows. It takes
little time anyway, and the stored numbers of small runs stay as they are."""


def sequences_of(
    rows: Sequence[np.ndarray], prompts: Sequence[np.ndarray], ends: Sequence[int]
) -> tuple[list[np.ndarray], list[int] | None, list[int]]:
    """Choose the sequences that a pass computes.

    Args:
        rows: the ids of each row.
        prompts: the ids of each row's prompt; empty if it has none.
        ends: for each row, the number of its tokens up to the last one whose hidden state is read, at least
            1.

    Returns:
        The ids of each sequence; for each sequence the length of its prompt, or None if no prompts are
        shared; and for each row the number of its sequence, which is the row or its beginning.
    """
    total, prefixes = _shared(rows, prompts)
    each = list(range(len(rows)))
    if total >= SHORTEN_FROM:
        read = [ids[:end] for ids, end in zip(rows, ends, strict=True)]
        number_of: dict[bytes, int] = {}
        sequence_of_N = [number_of.setdefault(ids.tobytes(), len(number_of)) for ids in read]
        firsts = np.unique(sequence_of_N, return_index=True)[1].tolist()
        sequences = [read[row] for row in firsts]
        fewer, its_prefixes = _shared(sequences, [prompts[row][: ends[row]] for row in firsts])
        if total > SHARE_FROM * fewer:
            return sequences, its_prefixes, sequence_of_N
    return list(rows), prefixes, each


def prompt_of(row: Trajectory) -> np.ndarray:
    """Return the ids of a row's prompt; none if the row has no context before the model's tokens."""
    first = row.segments[0]
    return first.ids if first.author == "context" and len(row.segments) > 1 else first.ids[:0]


def shared_prompts(sequences: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> list[int] | None:
    """Return the lengths of the prompts, if a pass over the sequences should compute each different prompt
    once; otherwise None."""
    return _shared(sequences, prompts)[1]


def _shared(sequences: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> tuple[int, list[int] | None]:
    """Return the number of tokens that a pass over the sequences computes; and the lengths of their prompts
    if prompts are shared, otherwise None."""
    total = sum(map(len, sequences))
    different = {ids.tobytes(): len(ids) for ids in prompts}
    fewer = total - sum(map(len, prompts)) + sum(different.values())
    return (fewer, [len(ids) for ids in prompts]) if total > SHARE_FROM * fewer else (total, None)


CHUNK_LOGITS = 2**26
"""Number of logits in a chunk, 0.27 GB in float32. A chunk of this size takes little more time than its
matrix products."""

Functional = Callable[[torch.Tensor, slice], torch.Tensor]


class Model(Protocol):
    """A model of the learner, trained or frozen."""

    @property
    def work_counter(self) -> WorkCounter | None:
        """The counter of the operations in the model's passes; None if the model is too small for a count."""

    @property
    def module(self) -> torch.nn.Module:
        """The module with all parameters of the model."""

    @property
    def root(self) -> Root:
        """The module within whose call the model computes."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that learning may change, by name. With an adapter, these are the adapter's
        and those of a scalar head; otherwise all of the module's."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by name, in the form that engines load."""

    def outputs(
        self, rows: Sequence[Trajectory], columns: Mapping[str, torch.Tensor], wants: set[str]
    ) -> dict[str, torch.Tensor]:
        """Return the wanted values for rows, by name, on the model's device. A language model or a critic
        gives (K,), a value for each trained token. A reward model gives (N,). An
        ensemble gives rewards, (N, M), and the prior, a scalar.

        Args:
            columns: the columns of these rows; the ensemble reads its features from them.
            wants: names of the values.
        """


def device_of(model: Model) -> torch.device:
    """Return the device on which a model computes."""
    return next(model.module.parameters()).device


class LanguageModel:
    """A causal language model. It gives "raw" and "sampled" log-probabilities, and the "entropy" at
    temperature 1, all in nats; or the hidden states of a layer from which the trained tokens are predicted,
    (K, D) (`oat.algorithms.base.states_want`).

    Args:
        num_tokens: number of tokens that the tokenizer has; ids of `num_tokens` and above are never sampled.
        chunk: number of trained tokens whose logits are in memory at once; None: as many tokens as have at
            most `CHUNK_LOGITS` logits together.
        autocast: True: matrix products are computed in bfloat16; log-probabilities stay float32.
    """

    def __init__(self, lm: CausalLM, *, num_tokens: int, chunk: int | None = None, autocast: bool = False):
        self.lm = lm
        self.num_tokens = num_tokens
        self.autocast = autocast
        self.chunk = max(1, CHUNK_LOGITS // lm.vocab_rows) if chunk is None else chunk
        self.work_counter = WorkCounter(lm, autocast=autocast)

    @property
    def module(self) -> torch.nn.Module:
        return self.lm.module

    @property
    def root(self) -> Root:
        return self.lm.root

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return self.lm.trainable()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.lm.tensors()

    def outputs(
        self, rows: Sequence[Trajectory], columns: Mapping[str, torch.Tensor], wants: set[str]
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.root(lambda: self._outputs(rows, wants))
        return found

    def _outputs(self, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        layers = [want.removeprefix(STATES) for want in wants if want.startswith(STATES)]
        if layers:
            assert len(wants) == 1, f"hidden states are given alone, not with others of {wants}"
            return {want: self._states(rows, layers[0]) for want in wants}
        assert wants <= {"raw", "sampled", "entropy"}, (
            f"a language model gives raw, sampled, entropy and states, not {wants}"
        )
        ids, hidden, places = trained_hidden(self.lm, rows, autocast=self.autocast)
        self.work_counter.add(places, heads=len(ids))
        sampled_is_raw = self.num_tokens == self.lm.vocab_rows and not any(_truncated(row) for row in rows)
        others = {"sampled": self._sampled(rows, ids)} if "sampled" in wants and not sampled_is_raw else {}
        head = self.lm.linear_head()
        if head is not None:
            dtype = torch.bfloat16 if self.autocast else None
            values = linear_functionals(
                hidden, *head, ids, self.chunk, entropy="entropy" in wants, others=others, dtype=dtype
            )
        else:
            raw: Functional = lambda logits, tokens: token_logps(logits, ids[tokens])  # noqa: E731
            entropy: dict[str, Functional] = (
                {"entropy": lambda logits, tokens: token_entropy(logits)} if "entropy" in wants else {}
            )
            values = chunked_head(hidden, self._head, {"raw": raw, **entropy, **others}, self.chunk)
        return {want: values["raw" if want == "sampled" and sampled_is_raw else want] for want in wants}

    def _states(self, rows: Sequence[Trajectory], name: str) -> torch.Tensor:
        layer: Layer = "all" if name == "all" else int(name)
        _, hidden_KD, places = trained_hidden(self.lm, rows, autocast=self.autocast, also=layer)
        self.work_counter.add(places, heads=0)
        return self.lm.features(hidden_KD, layer).float()

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        with in_bfloat16(self.lm, self.autocast):
            return self.lm.head(hidden)

    def _sampled(self, rows: Sequence[Trajectory], ids: torch.Tensor) -> Functional:
        temperatures = torch.cat(
            [torch.full((row.num_trained,), row.temperature, device=ids.device) for row in rows]
        )
        kept_ids, bounds = kept_sets(rows)
        kept, counts = torch.from_numpy(kept_ids).to(ids.device), np.diff(bounds)

        def sampled(logits: torch.Tensor, tokens: slice) -> torch.Tensor:
            sets = None
            if len(kept):
                here = counts[tokens]
                token_of = torch.from_numpy(np.arange(len(here)).repeat(here)).to(ids.device)
                sets = (kept[bounds[tokens.start] : bounds[tokens.start + len(here)]], token_of)
            return sampled_logps(logits, ids[tokens], temperatures[tokens], self.num_tokens, sets)

        return sampled


class Critic(Root):
    """A language model's backbone with a scalar head. It gives, for each trained token, the "value" of the
    state before the token, and "value_after", the value of the state after the token.

    If one trained token follows another, the first's "value_after" is the second's "value". After the last
    token of a row, and of each of the model's turns in an episode, only "value_after" has the value.

    The head has no bias. If no weights are given, its initial weights are samples of a normal distribution
    with mean 0 and standard deviation 1 / (hidden size + 1). The head is trained even if the backbone has an
    adapter.

    Args:
        generator: draws the head's initial weights.
        head: (1, hidden size), the head's initial weights; None: they are drawn.
        autocast: True: the backbone's matrix products are computed in bfloat16; values stay float32.
    """

    def __init__(
        self,
        lm: CausalLM,
        generator: np.random.Generator,
        *,
        head: torch.Tensor | None = None,
        autocast: bool = False,
    ):
        super().__init__()
        self.lm, self.autocast = lm, autocast
        self.work_counter = WorkCounter(lm, autocast=autocast)
        self.backbone = lm.module.base_model
        width = lm.module.get_output_embeddings().in_features
        self.score = torch.nn.Linear(width, 1, bias=False, device=lm.device)
        drawn = torch.from_numpy(generator.normal(0, 1 / (width + 1), size=(1, width)))
        with torch.no_grad():
            self.score.weight.copy_(drawn if head is None else head)

    @property
    def module(self) -> torch.nn.Module:
        return self

    @property
    def root(self) -> Root:
        return self

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        backbone = {id(parameter) for parameter in self.lm.trainable().values()}
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if id(parameter) in backbone or name.startswith("score.")
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())

    def outputs(
        self, rows: Sequence[Trajectory], columns: Mapping[str, torch.Tensor], wants: set[str]
    ) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self(lambda: self._outputs(rows, wants))
        return found

    def _outputs(self, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        assert wants <= {"value", "value_after"}, f"a critic gives value and value_after, not {wants}"
        trained = [np.flatnonzero(row.trained) for row in rows]
        ends = [int(t[-1]) + ("value_after" in wants) if len(t) else 0 for t in trained]
        hidden_TD, places = hidden_of_rows(self.lm, rows, ends, autocast=self.autocast)
        self.work_counter.add(places, heads=0)
        values = {}
        for want in wants:
            shift = 1 if want == "value" else 0
            at_K = np.concatenate([place[t - shift] for place, t in zip(places, trained, strict=True)])
            values[want] = self.scores(hidden_TD[torch.from_numpy(at_K).to(hidden_TD.device)])
        return values

    def scores(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        """Return the head's output for hidden states, (X,)."""
        # a copy, since a sharded root may not return a view
        return self.score(hidden_XD.to(self.score.weight.dtype)).squeeze(-1).clone()


class RewardModel(Critic):
    """A language model's backbone with a scalar head. It gives the "score" of each row, (N,), at the row's
    last token.

    Args:
        trailing: ids that the chat template writes after a response. They are appended to every row, as
            `Renderer.whole` does.
        generator, autocast: see `Critic`.
    """

    def __init__(
        self, lm: CausalLM, generator: np.random.Generator, *, trailing: np.ndarray, autocast: bool = False
    ):
        super().__init__(lm, generator, autocast=autocast)
        self.trailing = trailing.astype(np.int32)

    def _outputs(self, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        assert wants == {"score"}, f"a reward model gives score, not {wants}"
        with in_bfloat16(self.lm, self.autocast):
            sequences = [np.concatenate([row.ids, self.trailing]) for row in rows]
            prefixes = shared_prompts([row.ids for row in rows], [prompt_of(row) for row in rows])
            hidden_TD, places = self.lm.hidden_of(sequences, prefixes)
        self.work_counter.add(places, heads=0)
        last_N = torch.tensor([place[-1] for place in places], device=hidden_TD.device)
        return {"score": self.scores(hidden_TD[last_N])}


def refuse_other_tensors(model: str, held: Collection[str], expected: Collection[str]) -> None:
    """Refuse a checkpoint that has other tensors of a model than the model that is loaded now.

    Args:
        model: the model's name, for the message.
        held: names of the tensors in the checkpoint.
        expected: names of the model's tensors that learning changes.

    Raises:
        CheckpointError: the names differ.
    """
    wrong = sorted(set(held) ^ set(expected))
    if not wrong:
        return
    advice = "put its files and settings back as they were, or begin a new run"
    if any(is_adapter(name) for name in set(held) - set(expected)):
        advice = (
            "an earlier version of oat loaded the adapter that stands beside the model in its folder "
            "(adapter_config.json), and trained both; begin a new run, with model.adapter if you want it"
        )
    raise CheckpointError(
        f"the checkpoint has other tensors of the {model} than the model has now: {len(wrong)} differ, for "
        f"example `{wrong[0]}`; {advice}"
    )


def refuse_other_frozen(
    names: Collection[str], models: Mapping[str, Model | None], files: Mapping[str, Collection[str]]
) -> None:
    """Refuse models whose frozen weights are not those with which a run began.

    Args:
        names: names of these models; may be empty.
        models: the models, by name.
        files: for each model, the settings that name its files.

    Raises:
        CheckpointError: there are such models.
    """
    if not names:
        return
    fields = " and ".join(dict.fromkeys(field for name in names for field in files[name]))
    advice = f"put the files of {fields} back as they were, or begin a new run"
    if any(_has_left_over_adapter(models[name]) for name in names):
        advice = (
            "if an earlier version of oat began this run, it loaded the adapter that stands beside the model "
            "in its folder (adapter_config.json), which is not used any more: begin a new run, for which a "
            "folder with the adapter alone may be named too (model.adapter, model.reference); otherwise put "
            f"the files of {fields} back as they were"
        )
    raise CheckpointError(
        f"what is frozen in the {', '.join(names)} is not what this run began with; {advice}"
    )


def _has_left_over_adapter(model: Model | None) -> bool:
    """Return True if the folder from which a model was loaded has an adapter that is not used."""
    module = getattr(getattr(model, "lm", None), "module", None)
    path = getattr(getattr(module, "config", None), "_name_or_path", "")
    return bool(path) and has_left_over_adapter(path)


def in_bfloat16(lm: CausalLM, enabled: bool) -> torch.autocast:
    """Return a context. If `enabled`, matrix products in the context are computed in bfloat16, whether the
    weights are in float32 or in bfloat16."""
    return torch.autocast(lm.device.type, dtype=torch.bfloat16, enabled=enabled)


def hidden_of_rows(
    lm: CausalLM,
    rows: Sequence[Trajectory],
    ends: Sequence[int],
    *,
    autocast: bool = False,
    also: Layer | None = None,
) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Make one forward pass over rows.

    Args:
        ends: for each row, the number of its tokens up to the last one whose hidden state the caller reads.
        also: as in `CausalLM.hidden`.

    Returns:
        (T, D) the last hidden states of all tokens of the pass; and for each row, the indices of its tokens
        along T. A token after the row's end may have none.
    """
    sequences, prefixes, sequence_of_N = sequences_of(
        [row.ids for row in rows], [prompt_of(row) for row in rows], [max(1, end) for end in ends]
    )
    with in_bfloat16(lm, autocast):
        hidden_TD, places = lm.hidden_of(sequences, prefixes, also=also)
    return hidden_TD, [places[sequence] for sequence in sequence_of_N]


def trained_hidden(
    lm: CausalLM, rows: Sequence[Trajectory], *, autocast: bool = False, also: Layer | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Make one forward pass over rows.

    Args:
        also: as in `CausalLM.hidden`.

    Returns:
        (K,) ids of the trained tokens; (K, D) the last hidden states that predict them; and for each row, the
        indices of its tokens among the tokens of the pass. A token after which no token is trained may have
        no index.
    """
    trained = [np.flatnonzero(row.trained) for row in rows]
    ends = [int(tokens[-1]) if len(tokens) else 0 for tokens in trained]
    hidden_TD, places = hidden_of_rows(lm, rows, ends, autocast=autocast, also=also)
    before_K = np.concatenate([place[tokens - 1] for place, tokens in zip(places, trained, strict=True)])
    ids_K = np.concatenate([row.ids for row in rows])[np.concatenate([row.trained for row in rows])].astype(
        np.int64
    )
    return torch.from_numpy(ids_K).to(lm.device), hidden_TD[torch.from_numpy(before_K).to(lm.device)], places


def _truncated(row: Trajectory) -> bool:
    """Return True if the row's tokens were not drawn from the raw distribution: at another temperature than
    1, or from kept sets."""
    return row.temperature != 1.0 or any(segment.kept is not None for segment in row.segments)


def kept_sets(rows: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept sets of all K trained tokens.

    Returns:
        (S,) the kept ids of all tokens, one token after another; and (K + 1,) the index of each token's first
        id, with S at the end. A token without a recorded set has no ids.
    """
    ids: list[np.ndarray] = []
    counts: list[int] = []
    for row in rows:
        start = 0
        for segment in row.segments:
            trained = np.flatnonzero(row.trained[start : start + len(segment.ids)])
            start += len(segment.ids)
            for token in trained:
                kept = segment.kept
                chosen = (
                    kept.ids[kept.offsets[token] : kept.offsets[token + 1]]
                    if kept is not None
                    else np.zeros(0, np.int32)
                )
                ids.append(chosen)
                counts.append(len(chosen))
    flat = np.concatenate(ids).astype(np.int64) if ids else np.zeros(0, np.int64)
    return flat, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
