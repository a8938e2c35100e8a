"""The oracle `pairrm`: a DeBERTa that reads a prompt with two responses at once and says which is better
(LLM-Blender, arXiv:2306.02561, Section 4).

The format is that of `llm-blender/PairRM-hf`, from its model card and the class `DebertaV2PairRM` of
yuchenlin/LLM-Blender: one row of three pieces

    [CLS] <|source|> prompt [SEP]  [CLS] <|candidate1|> first [SEP]  [CLS] <|candidate2|> second [SEP]

The prompt's piece has at most `source_tokens` tokens, by default 1,224. The row has at most `source_tokens` +
2 * `candidate_tokens` tokens, by default 2,048. Each response's piece has at most half of the tokens that the
prompt's piece leaves. Longer pieces are cut on the right.

For each candidate, the hidden state of the source's marker is concatenated with that of the candidate's
marker. Two linear layers, with a tanh between them, map this to one output per task of the model. The
difference between the two candidates' outputs, averaged over the tasks, is the log-odds that the first wins.

Departures:
1. Both orders are asked, and the answer is the mean of the two probabilities. So the answers for (A, B) and
   (B, A) add up to 1.
2. A special token in a text is split by a blank, so a text cannot contain a marker.

Not handled: conversations of several messages, because the format has one text; the older
`llm-blender/PairRM`, which has no safetensors.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import DebertaV2Config, DebertaV2Model
from transformers.utils import cached_file

from oat.errors import ConfigError, ModelError, OracleError
from oat.files import seen
from oat.models.identity import model_identity, tokenizer_identity, weights_identity
from oat.models.loading import load_config, load_tokenizer
from oat.models.scoring import batches, hash_of_files
from oat.oracles.local import LocalOracle, Values
from oat.types import Kind, Question

MARKERS = {
    "source_prefix_id": "<|source|>",
    "cand1_prefix_id": "<|candidate1|>",
    "cand2_prefix_id": "<|candidate2|>",
}
"""The marker tokens. Keys are the fields of config.json that have the tokens' ids."""
SOURCE_TOKENS, CANDIDATE_TOKENS = 1224, 412
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PairRM(LocalOracle):
    """An oracle that compares pairs with a PairRM. The weights are loaded at the first question.

    Its version changes with the model's files, `dtype`, `source_tokens` and `candidate_tokens`.

    Args:
        path: a directory, or `org/name`, in the layout of `llm-blender/PairRM-hf`.
        dtype: "float32", or "bfloat16" for half the memory; the head is always float32.
        batch_tokens: largest number of tokens in a forward pass, padding included.
        source_tokens: largest number of tokens of the prompt, its three special tokens included.
        candidate_tokens: largest number of tokens of each response if the prompt has `source_tokens`. A
            shorter prompt leaves more tokens to the responses.
        device: where the model computes; by default the device of `compute.profile`.

    Raises:
        ConfigError: an option has a value that it does not take.
        ModelError: there is no such model or tokenizer, it is no PairRM, or the tokenizer is not the model's.
    """

    answers: Kind = "compare"

    def __init__(
        self,
        path: str = "llm-blender/PairRM-hf",
        dtype: str = "float32",
        batch_tokens: int = 16384,
        source_tokens: int = SOURCE_TOKENS,
        candidate_tokens: int = CANDIDATE_TOKENS,
        device: str = "cpu",
    ):
        super().__init__("pairrm")
        for option, value in {
            "batch_tokens": batch_tokens,
            "source_tokens": source_tokens,
            "candidate_tokens": candidate_tokens,
        }.items():
            if not isinstance(value, int) or value < 4:
                raise ConfigError(f"{option} is {value!r}; give a whole number, at least 4")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; give float32 or bfloat16")
        self.path = path
        self.dtype = dtype
        self.batch_tokens = batch_tokens
        self.device = torch.device(device)
        self.source_tokens, self.candidate_tokens = source_tokens, candidate_tokens
        self.config, self.tokenizer = load_config(path), load_tokenizer(path)
        if not isinstance(self.config, DebertaV2Config) or not all(
            hasattr(self.config, name) for name in (*MARKERS, "n_tasks")
        ):
            raise ModelError(
                f"{path} is no PairRM (config.json has no {', '.join(MARKERS)} and n_tasks); give one in "
                "the layout of llm-blender/PairRM-hf"
            )
        for name, marker in MARKERS.items():
            if self.tokenizer.convert_tokens_to_ids(marker) != getattr(self.config, name):
                raise ModelError(
                    f"the tokenizer of {path} does not give {marker} the id of config.json's {name}; give "
                    "the one that belongs to it"
                )
        self.version = f"{hash_of_files(path)}/{dtype}/{source_tokens}/{candidate_tokens}"
        self.made_of = {
            **model_identity(self.config),
            **tokenizer_identity(self.tokenizer),
            **weights_identity(path),
            "options": {
                "dtype": dtype,
                "source_tokens": source_tokens,
                "candidate_tokens": candidate_tokens,
            },
        }

    def encode(self, source: str, first: str, second: str) -> list[int]:
        """Return the ids of a prompt with two responses, at most `source_tokens` + 2 * `candidate_tokens`."""
        most = self.source_tokens + 2 * self.candidate_tokens
        ids = self._piece("source_prefix_id", source, self.source_tokens)
        room = (most - len(ids)) // 2
        return [
            *ids,
            *self._piece("cand1_prefix_id", first, room),
            *self._piece("cand2_prefix_id", second, room),
        ]

    def values(self, questions: Sequence[Question]) -> Values:
        """Return, for each pair, the probability that the first candidate wins.

        Raises:
            OracleError: a prompt has several messages, or a number is not finite.
        """
        rows = []
        for question in questions:
            if len(question.messages) != 1:
                raise OracleError(
                    f"pairrm reads one text as the prompt, and question {question.key} has "
                    f"{len(question.messages)} messages; use another oracle"
                )
            source, (first, second) = question.messages[0].content, question.candidates
            rows += [self.encode(source, first, second), self.encode(source, second, first)]
        logits = torch.zeros(len(rows))
        for batch in batches([len(row) for row in rows], self.batch_tokens):
            logits[batch] = self._logits([rows[number] for number in batch])
        if not logits.isfinite().all():
            raise OracleError(
                f"{self.path} gives a score that is not finite; use another model, or dtype: float32"
            )
        found = ((logits[0::2].sigmoid() + (-logits[1::2]).sigmoid()) / 2).tolist()
        return [[value] for value in found]

    def _piece(self, marker: str, text: str, most: int) -> list[int]:
        for token in sorted(self.tokenizer.all_special_tokens, key=len, reverse=True):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        ids: list[int] = self.tokenizer.encode(
            MARKERS[marker] + text, max_length=most, truncation=True, verbose=False
        )
        return ids

    @torch.no_grad()
    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the log-odds that the first candidate of each row wins: (N,), float32, on the CPU."""
        width = max(map(len, rows))
        ids_NT = torch.tensor(
            [[*row, *[self.tokenizer.pad_token_id or 0] * (width - len(row))] for row in rows],
            device=self.device,
        )
        mask_NT = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device
        )
        backbone, head = self._model
        hidden_NTD = backbone(input_ids=ids_NT, attention_mask=mask_NT).last_hidden_state.float()
        every_N = torch.arange(len(rows), device=self.device)
        source, first, second = (
            hidden_NTD[every_N, (ids_NT == getattr(self.config, name)).int().argmax(-1)] for name in MARKERS
        )
        difference = head(torch.cat([source, first], -1)) - head(torch.cat([source, second], -1))
        return difference.mean(-1).cpu()

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        """The backbone and the head."""
        width, config = self.config.hidden_size, self.config
        with torch.device("meta"):
            backbone = DebertaV2Model(config)
            # The published weights are named by these indices; layers 0 and 3 are dropout.
            parts = [
                torch.nn.Identity(),
                torch.nn.Linear(2 * width, width),
                torch.nn.Tanh(),
                torch.nn.Identity(),
            ]
            head = torch.nn.Sequential(*parts, torch.nn.Linear(width, config.n_tasks))
        tensors = self._tensors()
        for module, prefix in ((backbone, "pretrained_model."), (head, "head_layer.")):
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            missing = sorted(
                name
                for name, tensor in module.state_dict().items()
                if name not in own or own[name].shape != tensor.shape
            )
            if missing:
                raise ModelError(
                    f"the weights of {self.path} lack `{prefix}{missing[0]}`, or have it in another "
                    "shape; give a checkpoint of the whole model"
                )
            module.load_state_dict(own, strict=False, assign=True)
        # The checkpoint does not have this tensor.
        backbone.embeddings.position_ids = torch.arange(config.max_position_embeddings)[None]
        return backbone.to(self.device, DTYPES[self.dtype]).eval(), head.to(self.device, torch.float32).eval()

    def _tensors(self) -> dict[str, Tensor]:
        name, found = "model.safetensors", None
        if seen(self.path).is_dir():
            found = str(seen(self.path) / name) if (seen(self.path) / name).exists() else None
        else:
            found = cached_file(
                self.path,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        if found is None:
            raise ModelError(
                f"{self.path} has no {name} that can be had; give a directory with one, or a hub id where "
                "there is a network"
            )
        try:
            return load_file(found)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"the weights of {self.path} cannot be read ({error}); download them again"
            ) from error
