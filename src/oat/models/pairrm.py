"""A PairRM of LLM-Blender (arXiv:2306.02561): a DeBERTa that reads a prompt and responses behind markers. The
oracle `pairrm` compares with it, and the features of an ensemble may be its hidden states.

The layout of the files is that of `llm-blender/PairRM-hf`.

Departure: a special token in a text is split by a blank, so a text cannot contain a marker.

Not handled: the older `llm-blender/PairRM`, which has no safetensors.
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

from oat.errors import ConfigError, ModelError
from oat.files import absolute
from oat.models.beside import say_left_over_adapter, say_unused_tensors
from oat.models.loading import load_config, load_tokenizer
from oat.models.weight_files import described

MARKERS = {
    "source_prefix_id": "<|source|>",
    "cand1_prefix_id": "<|candidate1|>",
    "cand2_prefix_id": "<|candidate2|>",
    "cand_prefix_id": "<|candidate|>",
}
"""The marker tokens. Keys are the fields of config.json that have the tokens' ids."""
COMPARING = ("source_prefix_id", "cand1_prefix_id", "cand2_prefix_id")
"""The markers of a comparison of two candidates."""
SOURCE_TOKENS, CANDIDATE_TOKENS = 1224, 412
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PairRMModel:
    """A PairRM. The weights are loaded when they are first needed.

    Args:
        path: a directory, or `org/name`.
        dtype: "float32" or "bfloat16"; the head is always float32.
        markers: the fields of `MARKERS` that are needed.

    Raises:
        ConfigError: `dtype` is not one of the two above.
        ModelError: there is no such model or tokenizer, it is no PairRM, or the tokenizer is not the model's.
    """

    def __init__(self, path: str, dtype: str, device: str, markers: Sequence[str] = COMPARING):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; give float32 or bfloat16")
        self.path, self.dtype = path, dtype
        self.device = torch.device(device)
        say_left_over_adapter(path)
        self.config, self.tokenizer = load_config(path), load_tokenizer(path)
        if not is_pairrm(self.config) or not all(hasattr(self.config, name) for name in markers):
            raise ModelError(
                f"{path} is no PairRM (config.json has no {', '.join(markers)} and n_tasks); give one in "
                "the layout of llm-blender/PairRM-hf"
            )
        for name in markers:
            if self.tokenizer.convert_tokens_to_ids(MARKERS[name]) != getattr(self.config, name):
                raise ModelError(
                    f"the tokenizer of {path} does not give {MARKERS[name]} the id of config.json's {name}; "
                    "give the one that belongs to it"
                )

    def piece(self, marker: str, text: str, most: int) -> list[int]:
        """Return the ids of a marker and a text, at most `most`.

        Args:
            marker: a field of `MARKERS`.
        """
        for token in sorted(self.tokenizer.all_special_tokens, key=len, reverse=True):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        ids: list[int] = self.tokenizer.encode(
            MARKERS[marker] + text, max_length=most, truncation=True, verbose=False
        )
        return ids

    @torch.no_grad()
    def marked(self, rows: Sequence[Sequence[int]], markers: Sequence[str]) -> list[Tensor]:
        """Return, for each marker, the last hidden state at its first place in each row: (N, D) float32, on
        the model's device."""
        width = max(map(len, rows))
        ids_NT = torch.tensor(
            [[*row, *[self.tokenizer.pad_token_id or 0] * (width - len(row))] for row in rows],
            device=self.device,
        )
        mask_NT = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device
        )
        hidden_NTD = self.modules[0](input_ids=ids_NT, attention_mask=mask_NT).last_hidden_state.float()
        every_N = torch.arange(len(rows), device=self.device)
        return [
            hidden_NTD[every_N, (ids_NT == getattr(self.config, name)).int().argmax(-1)] for name in markers
        ]

    @cached_property
    def modules(self) -> tuple[Any, Any]:
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
        known = set[str]()
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
            known |= {f"{prefix}{name}" for name in module.state_dict()}
        unused = [name for name in tensors if name not in known and not name.endswith("position_ids")]
        say_unused_tensors(self.path, unused, "PairRM")
        # The checkpoint does not have this tensor.
        backbone.embeddings.position_ids = torch.arange(config.max_position_embeddings)[None]
        return backbone.to(self.device, DTYPES[self.dtype]).eval(), head.to(self.device, torch.float32).eval()

    def _tensors(self) -> dict[str, Tensor]:
        name, found = "model.safetensors", None
        if absolute(self.path).is_dir():
            if (absolute(self.path) / f"{name}.index.json").exists() or (absolute(self.path) / name).exists():
                described(self.path)
            found = str(absolute(self.path) / name) if (absolute(self.path) / name).exists() else None
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


def is_pairrm(config: Any) -> bool:
    """Return True if this is the configuration of a PairRM."""
    return isinstance(config, DebertaV2Config) and hasattr(config, "n_tasks")
