"""Scores of responses from a sequence-classification model of transformers. The oracle `reward_model` and the
reward server share this code.

The chat template of the model's own tokenizer renders the complete conversation. Control tokens in the
conversation's content are read as ordinary text (`oat.text.renderer`). If there is no template, the input
depends on the model:

* A decoder reads prompt, response and end-of-text.
* An encoder reads prompt and response as a pair of texts, which its tokenizer encodes.

Departures from transformers:
1. The score of a decoder is read at the last token that the attention mask keeps. Transformers reads it at
   the last id that is not the pad id. If one id both ends a text and pads, transformers reads the score too
   early. If there is no pad id, transformers refuses batches.
2. A rendered text begins with what the template writes; no second begin-of-text is added.

When a model is loaded, our scores of two rows are compared with those of the model's own code. We score each
row alone, and the two together with padding.

A model without a linear head on its hidden states, such as an encoder, is scored by the logits of its own
code.

Not handled: encoders with a decoder (BART, T5), which are refused; models that bring code of their own;
scores mixed from several labels.
"""

import datetime
import hashlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.utils import cached_file

from oat.errors import ConfigError, ModelError, OatWarning, OracleError, TemplateError, warn
from oat.files import absolute
from oat.models.identity import Identity, hash_of, model_identity, tokenizer_identity, weights_identity
from oat.models.loading import load_config, load_module, load_tokenizer
from oat.text.chat_template import reads_date
from oat.text.renderer import Renderer
from oat.text.vocabulary import check_vocabulary
from oat.types import Message

DATE = datetime.date(2024, 7, 26)
"""The date that templates write as the current day. It is fixed, so that a score is the same on every day.
Llama 3.1's template writes this date when it has no clock."""

_TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest allowed difference between our score and that of the model's own code, by dtype. The difference is
relative to the score if the score's absolute value is at least 1, else absolute."""
_BEHIND_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "data2vec-text",
    "xmod",
    "longformer",
    "mpnet",
    "luke",
    "ibert",
    "esm",
)
"""Types of models whose positions begin at the pad id plus 1. So fewer positions are left for tokens."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_CHUNK = 2**20
_MOST = 10**6
"""A tokenizer's limit counts only if it is below this number. A tokenizer without a limit states a far larger
number."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A prompt with a response, encoded as one row of a model's input.

    Attributes:
        ids: (T,) int32.
        types: (T,) int32 token types: for each token, whether it belongs to the prompt or the response. None
            if the model does not read token types, or if the `Renderer` encoded the row.
    """

    ids: np.ndarray
    types: np.ndarray | None = None


class Scorer:
    """A reward model. The constructor reads its configuration and tokenizer. Its weights are read when they
    are first needed.

    Args:
        path: a directory, or `org/name`.
        dtype: "float32" or "bfloat16", the precision of the model; the score itself is float32.
        device: where the model computes. "auto": the library accelerate spreads the model's layers over all
            devices.
        label: index of the label whose logit is the score; needed if the model has several labels.
        batch_tokens: largest number of tokens in a forward pass, padding included; a longer row is computed
            alone.
        max_tokens: largest number of tokens in a row; a longer row gets no score. None: the limit of the
            model and its tokenizer.

    Raises:
        ModelError: there is no such model or tokenizer, the model is no sequence classifier or is an encoder
            with a decoder, or the tokenizer does not suit the model.
        ConfigError: `dtype` is not one of the two above; the model has no such label; the model has several
            labels and `label` is None; or `max_tokens` is more than the model's number of positions.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        label: int | None = None,
        batch_tokens: int = 16384,
        max_tokens: int | None = None,
    ):
        self.path = path
        self.dtype = dtype
        self.batch_tokens = batch_tokens
        self.is_spread = device == "auto"
        first = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(first if self.is_spread else device)
        if dtype not in _TOLERANCES:
            raise ConfigError(f"the dtype of the reward model {path} is {dtype!r}; give float32 or bfloat16")
        self.config = load_config(path)
        self.tokenizer = load_tokenizer(path)
        if type(self.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelError(
                f"{path} is a `{self.config.model_type}`, which is no reward model; give a "
                "sequence-classification model"
            )
        if self.config.is_encoder_decoder:
            raise ModelError(
                f"{path} is a `{self.config.model_type}`, an encoder with a decoder, which is not supported; "
                "give a decoder, or an encoder, with a classification head"
            )
        check_vocabulary(self.tokenizer, self.config.get_text_config().vocab_size, f"the tokenizer of {path}")
        _say_normalisation(path, self.config)
        self.label = _label(path, self.config, label)
        self.limit = _limit(path, self.config, self.tokenizer, max_tokens)

    def encode(self, messages: Sequence[Message], response: str) -> Encoded:
        """Encode a prompt with a response as the model's input.

        Raises:
            TemplateError: the template refuses the conversation, or there is no template and the prompt is
                not a single message.
        """
        if self._renderer is not None:
            return Encoded(self._renderer.whole(messages, response))
        if len(messages) != 1:
            raise TemplateError(
                f"the reward model {self.path} has no chat template, and reads one text as a prompt, not "
                f"{len(messages)} messages"
            )
        # `split_special_tokens`: content cannot spell the control tokens that separate the texts
        pair = self.tokenizer(
            messages[0].content,
            response,
            split_special_tokens=True,
            return_token_type_ids=True,
            verbose=False,
        )
        ids, types = (np.array(pair[name], dtype=np.int32) for name in ("input_ids", "token_type_ids"))
        return Encoded(ids, types if "token_type_ids" in self._parameters else None)

    def score(self, rows: Sequence[Encoded]) -> list[float | None]:
        """Return one score for each row, in order; None for a row that is longer than the limit. The other
        rows affect a score only by rounding.

        Raises:
            OracleError: a score is not finite.
            ModelError: the model cannot be loaded, or the scores computed here differ from those that the
                model's own code computes.
        """
        scores: list[float | None] = [None] * len(rows)
        fitting = [
            place for place, row in enumerate(rows) if self.limit is None or len(row.ids) <= self.limit
        ]
        for batch in batches([len(rows[place].ids) for place in fitting], self.batch_tokens):
            places = [fitting[number] for number in batch]
            values = self.scores(*self._padded([rows[place] for place in places])).tolist()
            for place, value in zip(places, values, strict=True):
                if not np.isfinite(value):
                    raise OracleError(
                        f"the reward model {self.path} gives {value} as a score; use another one, or dtype: "
                        "float32"
                    )
                scores[place] = value
        return scores

    @torch.no_grad()
    def scores(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the scores of padded rows, (N,) float32 on the CPU.

        Args:
            input_ids: (N, T). For a decoder, padding may be on either side, and ids with mask 0 are ignored.
            attention_mask: (N, T), 1 for tokens and 0 for padding; at least one token in each row.
            token_type_ids: (N, T), or None if the model does not read them.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids.to(self.device),
            "attention_mask": attention_mask.to(self.device),
        }
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids.to(self.device)
        if not self._is_decoder:
            return self._module(**inputs).logits[:, self.label].float().cpu()
        if "position_ids" in self._parameters:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        hidden_NTD = self._module.base_model(**inputs, use_cache=False).last_hidden_state
        hidden_ND = hidden_NTD[torch.arange(len(hidden_NTD)), last_attended(attention_mask)].float()
        head = self._module.score
        weight_D = head.weight[self.label].float()
        scores_N = hidden_ND.to(weight_D.device) @ weight_D
        return (scores_N if head.bias is None else scores_N + head.bias[self.label].float()).cpu()

    @cached_property
    def version(self) -> str:
        """A hash of the files in the model's directory; for a hub model, the commit that its files come
        from."""
        return hash_of_files(self.path)

    @property
    def identity(self) -> Identity:
        """Identity of the model, its tokenizer and its weights (`oat.models.identity`)."""
        tokens = tokenizer_identity(self.tokenizer)
        template = self.tokenizer.chat_template
        tokens["tokenizer_config.json"] |= {"model_max_length": self.tokenizer.model_max_length}
        tokens |= {"chat template": {"text": hash_of(str(template))}} if template else {}
        return {**model_identity(self.config), **tokens, **weights_identity(self.path)}

    @cached_property
    def _module(self) -> Any:
        module = load_module(self.path, self.config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, self.dtype)
        module = _spread(module) if self.is_spread else module.to(self.device)
        self.__dict__["_module"] = module  # `_check` computes with it
        try:
            self._check()
        except BaseException:
            del self.__dict__["_module"]
            raise
        return module

    @cached_property
    def _renderer(self) -> Renderer | None:
        """The renderer. None for an encoder without a template, whose tokenizer encodes prompt and response
        as a pair."""
        template = "tokenizer" if self.tokenizer.chat_template else None
        if template is None and not self._is_decoder:
            return None
        date = DATE if template is not None and reads_date(template, self.tokenizer) else None
        with warnings.catch_warnings():
            # a template that rewrites history is harmless here, since nothing is appended to a conversation
            warnings.simplefilter("ignore", OatWarning)
            return Renderer(self.tokenizer, template=template, date=date)

    @property
    def _is_decoder(self) -> bool:
        """True if the model has a linear head on its hidden states. An encoder's head has further layers, and
        reads the first token."""
        return isinstance(getattr(self._module, "score", None), torch.nn.Linear)

    @cached_property
    def _parameters(self) -> set[str]:
        module = self._module.base_model if self._is_decoder else self._module
        return set(inspect.signature(module.forward).parameters)

    @property
    def _pad_id(self) -> int:
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((id for id in ids if id is not None), 0)

    def _padded(self, rows: Sequence[Encoded]) -> tuple[Tensor, ...]:
        """Pad rows on the right. Return ids and attention mask; if the rows have token types, return these
        too."""
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), self._pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        types = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.from_numpy(row.ids)
            mask[number, : len(row.ids)] = 1
            if row.types is not None:
                types[number, : len(row.ids)] = torch.from_numpy(row.types)
        return (ids, mask, types) if rows[0].types is not None else (ids, mask)

    @torch.no_grad()
    def _check(self) -> None:
        """Compare our scores of two rows with those that the model's own code gives each row alone. Our code
        scores each row alone, and then both together with padding.

        Raises:
            ModelError: the scores differ by more than the tolerance.
        """
        count = self._module.get_input_embeddings().num_embeddings
        usable = [id for id in range(min(count, 16)) if id != self._pad_id]
        rows = [Encoded(np.array(usable[:size], dtype=np.int32)) for size in (7, 4)]
        alone = [self._padded([row]) for row in rows]
        logits = torch.cat([self._module(input_ids=ids.to(self.device)).logits for ids, *_ in alone])
        own = logits[:, self.label].float().cpu()
        for found in (torch.cat([self.scores(*row) for row in alone]), self.scores(*self._padded(rows))):
            difference = ((found - own).abs() / own.abs().clamp(min=1)).max().item()
            if not difference <= _TOLERANCES[self.dtype]:
                raise ModelError(
                    f"a `{self.config.model_type}` does not score as this code does (they differ by "
                    f"{difference:.3g}), or its weights are not finite; give another reward model than "
                    f"{self.path}"
                )


def _spread(module: Any) -> Any:
    """Spread the layers of a module over all devices, by the free memory of each.

    Raises:
        ModelError: accelerate is not installed.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
    except ImportError as error:
        raise ModelError(
            f"one model over several devices needs accelerate ({error}); install it, or name one device"
        ) from error
    places = infer_auto_device_map(module, no_split_module_classes=list(module._no_split_modules or ()))
    return dispatch_model(module, places)


def last_attended(mask_NT: Tensor) -> Tensor:
    """Return for each row the index of the last token whose mask is 1, (N,). Padding may be on the left or on
    the right."""
    return (mask_NT.long() * torch.arange(1, mask_NT.shape[1] + 1, device=mask_NT.device)).argmax(-1)


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield the forward passes, each as a list of indices of rows. The longest rows come first.

    Args:
        lengths: number of tokens of each row.
        tokens: largest number of tokens in a pass, padding included; a longer row is a pass of its own.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def hash_of_files(path: str) -> str:
    """Return 16 hexadecimal digits that change with a model's files. For a directory, they are a hash of its
    files; for a hub model, the first digits of the commit that the files come from.

    Raises:
        ModelError: the files of a hub model are neither in the local cache nor on the hub.
    """
    if not absolute(path).is_dir():
        try:
            found = cached_file(
                path,
                "config.json",
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:  # also where the path cannot be the id of a hub model
            found = None
        if found is None:
            raise ModelError(
                f"the files of {path} cannot be had from the hub; give a local directory, or set HF_HOME to "
                "where they were downloaded"
            )
        return Path(found).parent.name[:16]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted({file for pattern in _FILES for file in absolute(path).glob(pattern)}):
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _say_normalisation(path: str, config: Any) -> None:
    """Warn if the configuration has a mean and a deviation for scores, as OpenRLHF writes them. Transformers
    reads neither."""
    mean, deviation = (getattr(config, name, None) for name in ("mean", "std"))
    if mean not in (None, 0) or deviation not in (None, 1):
        warn(
            f"{path}: config.json has the mean {mean} and the std {deviation} of scores; the score is the "
            "model's own, without them"
        )


def _label(path: str, config: Any, label: int | None) -> int:
    count = config.num_labels
    named = ", ".join(f"{number} ({name})" for number, name in sorted(config.id2label.items()))
    if label is None and count != 1:
        raise ConfigError(
            f"the model {path} has {count} labels, {named}; say by `label` which of them is the score"
        )
    if label is not None and not 0 <= label < count:
        raise ConfigError(f"the model {path} has no label {label}; give one of {named}")
    return label or 0


def num_positions(config: Any) -> int | None:
    """Return the largest number of tokens that a model has positions for; None if it has no such limit.

    DeBERTa's positions may be relative, and then are no limit. RoBERTa's begin at the pad id plus 1, so fewer
    are left for tokens.
    """
    if not getattr(config, "position_biased_input", True):
        return None
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.model_type in _BEHIND_PADDING:
        positions -= (config.pad_token_id or 0) + 1
    return positions


def _limit(path: str, config: Any, tokenizer: Any, given: int | None) -> int | None:
    """Return the largest number of tokens of an input: `given`, or else the lower of the tokenizer's limit
    and the model's number of positions. Return None if there is no limit.

    Raises:
        ConfigError: `given` is more than the model's number of positions.
    """
    positions = num_positions(config)
    stated = [tokenizer.model_max_length] if tokenizer.model_max_length < _MOST else []
    if given is not None and positions is not None and given > positions:
        raise ConfigError(
            f"max_tokens is {given}, and the model {path} has {positions} positions; set as much or less"
        )
    return given or min([*stated, *([positions] if positions is not None else [])], default=None)
