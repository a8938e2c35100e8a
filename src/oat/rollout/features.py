"""Features of responses: the hidden states of a backbone, from which an ensemble computes rewards
(`explorer.features`).

There are four kinds of backbones:

* `SecondPass`: a causal model of the run, the reference. A pass over prompt and response; a prompt that
  responses share is computed once.
* `FromSampling`: the policy. The engine keeps the hidden states while it samples, so there is no pass.
* `OwnBackbone`: a causal model or an encoder that is loaded for the features alone. It reads the texts of
  prompt and response in its own tokens (`oat.rollout.features`).
* `PairRMFeatures`: a PairRM (LLM-Blender, arXiv:2306.02561) that is loaded for the features alone. It reads
  prompt and response behind two markers (`oat.rollout.features`). The feature is the two markers' hidden
  states, one after the other.

With `pooling: mean`, a causal model's feature is the mean of the hidden states from which the response's
tokens are predicted: those of the last token of the prompt and of all tokens of the response but the last. So
`FromSampling` and `SecondPass` with equal weights give equal features. With `pooling: last`, `FromSampling`
has the state from which the last token was drawn, and other causal models have the state at the last token;
an encoder has the state at its first token.

Departures from the sources (SEA and EE4LLM, which read the last token): the mean, and layers other than the
last. On the story model the mean predicts rewards better (docs/exploration.md).

Backbones that are loaded for features alone: a causal model, an encoder, or a PairRM. They read the texts
of prompt and response in their own tokens.

* A causal model reads the prompt as its chat template renders it, if it has one, and then the response.
* An encoder, such as BERT or DeBERTa, reads prompt and response as a pair of texts.
* A PairRM reads each behind a marker. The feature is the two markers' last hidden states, one after the
  other (SEA, arXiv:2411.01493; EE4LLM, arXiv:2402.00396).

A row has at most `max_tokens` tokens, and no more than the model has positions. A prompt and a response that
are too long together lose the beginning of the prompt. If one token of the prompt is left, they lose the end
of the response. PairRM cuts both at the end, as its authors do.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from oat.engines.shapes import PASS_TOKENS
from oat.errors import ConfigError, TemplateError
from oat.models.causal_lm import CausalLM, Layer, states_of
from oat.models.loading import load_config, load_module, load_tokenizer
from oat.models.pairrm import SOURCE_TOKENS, PairRMModel, is_pairrm
from oat.models.scoring import batches, hash_of_files, num_positions
from oat.text.renderer import Renderer
from oat.types import Group, Message, Trajectory


class Features(Protocol):
    """A backbone of features.

    Attributes:
        width: number of features of a response, D.
        identity: the facts that decide what the features are, as plain data. An ensemble that learned on
            features of another identity is refused.
    """

    width: int
    identity: dict[str, Any]

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        """Return the features of each group's responses, (G, D) float32."""


class SecondPass:
    """Features of a causal model of the run. See the module's docstring.

    Args:
        weights: a checksum of the model's weights, for `identity`.
        is_policy: True: with `pooling="last"`, the state from which the last token was drawn, as
            `FromSampling` has it.
        is_former: True: no prompt is shared, as in runs that began before prompts were.
    """

    def __init__(
        self,
        lm: CausalLM,
        layer: Layer,
        pooling: str,
        *,
        name: str,
        weights: int,
        is_policy: bool = False,
        is_former: bool = False,
    ):
        self.lm, self.layer, self.pooling = lm, layer, pooling
        self.is_policy, self.is_former = is_policy, is_former
        self.width = lm.width_of(layer)
        self.identity = {
            "backbone": name,
            "layer": layer,
            "pooling": pooling,
            "width": self.width,
            "weights": weights,
        }

    @torch.no_grad()
    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        rows = [trajectory for group in groups for trajectory in group.trajectories]
        found = [
            self.lm.root(partial(self._features, [rows[number] for number in some])) for some in _passes(rows)
        ]
        return by_group(torch.cat(found).numpy(), groups)

    def _features(self, rows: Sequence[Trajectory]) -> Tensor:
        prefixes = (
            None
            if self.is_former
            else [len(row.segments[0].ids) if len(row.segments) > 1 else 0 for row in rows]
        )
        hidden_TD, places = self.lm.hidden_of([row.ids for row in rows], prefixes, also=self.layer)
        states_TD = self.lm.features(hidden_TD, self.layer)
        return torch.stack(
            [
                pooled(states_TD, read_at(row, self.pooling, place, is_policy=self.is_policy))
                for row, place in zip(rows, places, strict=True)
            ]
        ).cpu()


class FromSampling:
    """Features that the engine kept while it sampled (`Trajectory.features`)."""

    def __init__(self, lm: CausalLM, layer: Layer, pooling: str):
        self.width = lm.width_of(layer)
        self.identity = {"backbone": "policy", "layer": layer, "pooling": pooling, "width": self.width}

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [np.stack([self._of(trajectory) for trajectory in group.trajectories]) for group in groups]

    def _of(self, trajectory: Trajectory) -> np.ndarray:
        if trajectory.num_trained == 0:  # no room for a token; such a response is no candidate
            return np.zeros(self.width, dtype=np.float32)
        assert trajectory.features is not None, "assemble/engine.py makes an engine that keeps features"
        return trajectory.features


def read_at(row: Trajectory, pooling: str, places: np.ndarray, *, is_policy: bool = False) -> np.ndarray:
    """Return the indices of the hidden states that make a feature.

    Args:
        places: (T,) for each token of the row, the index of its hidden state.
        is_policy: as in `SecondPass`.
    """
    read = places[np.flatnonzero(row.trained) - 1]
    if pooling == "last" and is_policy:
        return read[-1:] if len(read) else places[-1:]
    return read if len(read) and pooling == "mean" else places[-1:]


def pooled(states_TD: Tensor, places: np.ndarray) -> Tensor:
    """Return the mean of the hidden states at these places, (D,) float32."""
    return states_TD[torch.from_numpy(places).to(states_TD.device)].float().mean(dim=0)


def by_group(features_ND: np.ndarray, groups: Sequence[Group]) -> list[np.ndarray]:
    """Divide the features of all responses among their groups."""
    sizes = [len(group.trajectories) for group in groups]
    return np.split(features_ND, np.cumsum(sizes)[:-1])


def _passes(rows: Sequence[Trajectory]) -> Iterator[list[int]]:
    """Yield the indices of the rows of each pass. A pass has at most `PASS_TOKENS` tokens, where a prompt
    that follows itself counts once; a longer row is a pass of its own."""
    some: list[int] = []
    total = 0
    prompt = b""
    for number, row in enumerate(rows):
        first = row.segments[0].ids
        is_shared = some and first.tobytes() == prompt
        size = len(row.ids) - (len(first) if is_shared else 0)
        if some and total + size > PASS_TOKENS:
            yield some
            some, total, size = [], 0, len(row.ids)
        some.append(number)
        total += size
        prompt = first.tobytes()
    if some:
        yield some


_BATCH_TOKENS = 16_384
"""Largest number of tokens in a forward pass, padding included."""
_PAIRRM_MARKERS = ("source_prefix_id", "cand_prefix_id")


class _Row(NamedTuple):
    """A prompt with a response as a backbone reads it.

    Attributes:
        ids: of all tokens.
        read: indices of the tokens whose hidden states make the feature.
    """

    ids: list[int]
    read: np.ndarray


def load_backbone(path: str, layer: Layer, pooling: str, max_tokens: int, device: str) -> Features:
    """Load a backbone.

    Args:
        path: a directory, or `org/name`.
        max_tokens: largest number of tokens of a row. A backbone with fewer positions has rows of as many.

    Raises:
        ModelError: there is no such model or tokenizer.
        ConfigError: the backbone has no such layer, or is a PairRM and another layer or pooling is wanted.
    """
    config = load_config(path)
    if is_pairrm(config):
        if layer != -1 or pooling != "mean":
            raise ConfigError(
                f"{path} is a PairRM, whose features are the last hidden states of its markers; remove "
                "explorer.features.layer and pooling"
            )
        return PairRMFeatures(path, max_tokens, device)
    return OwnBackbone(path, config, layer, pooling, max_tokens, device)


def positions_of(path: str) -> int | None:
    """Return the largest number of tokens that a backbone has positions for; None if it has no such limit.

    Args:
        path: a directory, or `org/name`.

    Raises:
        ModelError: there is no such model.
    """
    return num_positions(load_config(path))


def reads_conversations(path: str) -> bool:
    """Return True if a backbone reads prompts of several messages: an encoder, which reads them one after
    another, or a causal model with a chat template.

    Args:
        path: a directory, or `org/name`.

    Raises:
        ModelError: there is no such model or tokenizer.
    """
    config = load_config(path)
    if is_pairrm(config):
        return False
    return not _is_causal(config) or bool(load_tokenizer(path).chat_template)


def _is_causal(config: Any) -> bool:
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING


class OwnBackbone:
    """Features of a causal model or an encoder. See the module's docstring and `oat.rollout.features`."""

    def __init__(self, path: str, config: Any, layer: Layer, pooling: str, max_tokens: int, device: str):
        layers, width = config.get_text_config().num_hidden_layers, config.get_text_config().hidden_size
        if layer != "all" and abs(layer) > layers:
            raise ConfigError(
                f"explorer.features.layer is {layer}, and {path} has {layers} layers; give one of them, or "
                "all"
            )
        self.layer, self.pooling, self.most = layer, pooling, _most_tokens(max_tokens, config)
        self.width = width * (layers if layer == "all" else 1)
        self.identity = {
            "backbone": hash_of_files(path),
            "layer": layer,
            "pooling": pooling,
            "max_tokens": max_tokens,
            "width": self.width,
        }
        self.is_causal = _is_causal(config)
        self.tokenizer = load_tokenizer(path)
        template = "tokenizer" if self.tokenizer.chat_template else None
        self.renderer = Renderer(self.tokenizer, template=template) if self.is_causal else None
        self.module = load_module(path, config, MODEL_MAPPING, "float32").to(device)
        self.device = torch.device(device)

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        encode = self._encode_causal if self.is_causal else self._encode_pair
        rows = [
            encode(group.prompt.messages, trajectory) for group in groups for trajectory in group.trajectories
        ]
        return by_group(_in_batches(rows, self._features, self.width), groups)

    def _encode_causal(self, messages: Sequence[Message], trajectory: Trajectory) -> _Row:
        assert self.renderer is not None, "a causal model has one"
        prompt = self.renderer.prompt(messages).tolist()
        own = self.renderer.within(messages, trajectory.text).tolist()[: self.most - 1]
        prompt = prompt[max(0, len(prompt) + len(own) - self.most) :]
        ids = [*prompt, *own]
        if self.pooling == "last" or not own:
            return _Row(ids, np.array([len(ids) - 1]))
        return _Row(ids, np.arange(len(prompt) - 1, len(ids) - 1))

    def _encode_pair(self, messages: Sequence[Message], trajectory: Trajectory) -> _Row:
        texts = "\n".join(message.content for message in messages)
        pair = self.tokenizer(texts, trajectory.text, split_special_tokens=True, verbose=False)
        parts = np.array([-1 if part is None else part for part in pair.sequence_ids()])
        kept = _kept(parts, self.most)
        ids = [pair["input_ids"][place] for place in kept]
        of_response = np.flatnonzero(parts[kept] == 1)
        if self.pooling == "last" or not len(of_response):
            return _Row(ids, np.array([0]))
        return _Row(ids, of_response)

    @torch.no_grad()
    def _features(self, rows: Sequence[_Row]) -> Tensor:
        ids_NT, mask_NT = _padded([row.ids for row in rows], self.tokenizer.pad_token_id or 0, self.device)
        found = self.module(input_ids=ids_NT, attention_mask=mask_NT, output_hidden_states=True)
        states_NTD = (
            found.last_hidden_state if self.layer == -1 else states_of(found.hidden_states, self.layer)
        )
        return torch.stack(
            [
                states_TD[torch.from_numpy(row.read).to(self.device)].float().mean(dim=0)
                for states_TD, row in zip(states_NTD, rows, strict=True)
            ]
        ).cpu()


class PairRMFeatures:
    """Features of a PairRM: the last hidden states of the markers of prompt and response."""

    def __init__(self, path: str, max_tokens: int, device: str):
        self.model = PairRMModel(path, "float32", device, _PAIRRM_MARKERS)
        self.most = _most_tokens(max_tokens, self.model.config)
        self.width = 2 * self.model.config.hidden_size
        self.identity = {"backbone": hash_of_files(path), "max_tokens": max_tokens, "width": self.width}

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        rows = [self._encode(group, trajectory) for group in groups for trajectory in group.trajectories]
        return by_group(_in_batches(rows, self._features, self.width), groups)

    def _encode(self, group: Group, trajectory: Trajectory) -> _Row:
        messages = group.prompt.messages
        if len(messages) != 1:
            raise TemplateError(
                f"features of PairRM are of one text as the prompt, and a prompt has {len(messages)} "
                "messages; use another backbone"
            )
        most = min(SOURCE_TOKENS, self.most // 2)
        source = self.model.piece("source_prefix_id", messages[0].content, most)
        response = self.model.piece("cand_prefix_id", trajectory.text, self.most - len(source))
        return _Row([*source, *response], np.zeros(0, dtype=np.int64))

    def _features(self, rows: Sequence[_Row]) -> Tensor:
        return torch.cat(self.model.marked([row.ids for row in rows], _PAIRRM_MARKERS), dim=-1).cpu()


def _most_tokens(max_tokens: int, config: Any) -> int:
    """Return the largest number of tokens of a row."""
    positions = num_positions(config)
    return max_tokens if positions is None else min(max_tokens, positions)


def _kept(parts_T: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of the tokens of a pair of texts that a row of at most `most` tokens keeps: all
    special tokens, the end of the first text, and the beginning of the second. The second text loses tokens
    only if one token of the first is left.

    Args:
        parts_T: for each token, the number of its text, 0 or 1; -1 for a special token.
    """
    first, second = (np.flatnonzero(parts_T == part) for part in (0, 1))
    room = max(0, most - int((parts_T == -1).sum()))
    second = second[: max(0, room - min(1, len(first)))]
    first = first[max(0, len(first) + len(second) - room) :]
    return np.sort(np.concatenate([np.flatnonzero(parts_T == -1), first, second]))


def _in_batches(rows: Sequence[_Row], features: Callable[[Sequence[_Row]], Tensor], width: int) -> np.ndarray:
    found_ND = torch.zeros(len(rows), width)
    for batch in batches([len(row.ids) for row in rows], _BATCH_TOKENS):
        found_ND[batch] = features([rows[number] for number in batch])
    return found_ND.numpy()


def _padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> Iterator[Tensor]:
    """Yield ids padded on the right, and the attention mask, (N, T) each."""
    width = max(map(len, rows))
    yield torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
    yield torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
