"""A causal language model of transformers in the form that the engine and the learner use: a backbone that
computes hidden states, and a head that computes logits.

The logits must be the output embeddings applied to the last hidden states of the backbone, and nothing more.
A model that scales or caps its logits is refused when it is loaded (`compatibility.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from oat.errors import ModelError, shown
from oat.models.attention import AttentionLayout, Packed, pack, pack_groups
from oat.models.linear import Linear
from oat.models.root import Root

Layer = int | Literal["all"]
"""A layer whose hidden states are read: -1 is the last one, 1 the first one, "all" every one."""
NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""An attention mask with four axes. If transformers is given such a mask, it makes no mask of its own. Our
attention (`oat.models.attention`) ignores it."""


class NoHead(torch.nn.Module):
    """The place of a head that was dropped (`CausalLM.drop_head`). It has sizes and no weights."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features


class Counted(dict[str, int]):
    """Numbers that follow from a model's files. Copies of a model share them."""

    def __deepcopy__(self, memo: object) -> "Counted":
        return self


class CausalLM:
    """A module of transformers with the operations that engine and learner need.

    Attributes:
        module: the `...ForCausalLM` module, in evaluation mode, also while it is trained (`checkpointing`).
        root: the module within whose call the learner computes with `module`.
        adapter: PEFT's object for the LoRA layers within the module (`oat.models.lora`), or None.
        is_base: True if the operations compute without the adapter.
        takes_layouts: True if the module's attention is ours (`oat.models.attention`). Sequences then need no
            padding.
        frozen: names of parameters that are not trained (`oat.models.frozen`).
        unknown: of an outline (`oat.models.outline`): why it does not tell whether the loaded model will be
            refused; empty if it tells.
        counted: of an outline: numbers that were counted in it, by name. Its copies share them.
        is_in_files: of an outline: True if a model on the CPU has its weights in pages of its files, until
            they change.
    """

    def __init__(
        self,
        module: Any,
        *,
        adapter: Any = None,
        is_base: bool = False,
        takes_layouts: bool = False,
        root: Root | None = None,
    ):
        self.module = module
        self.root = Root(module) if root is None else root
        self.adapter = adapter
        self.is_base = is_base
        self.takes_layouts = takes_layouts
        self.frozen: frozenset[str] = frozenset()
        self.unknown = ""
        self.counted = Counted()
        self.is_in_files = False

    def base(self) -> "CausalLM":
        """Return the model without its adapter. Both use the same module, so there is no second copy of the
        weights."""
        return CausalLM(
            self.module,
            adapter=self.adapter,
            is_base=True,
            takes_layouts=self.takes_layouts,
            root=self.root,
        )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def has_weights(self) -> bool:
        """False for an outline (`oat.models.outline`): its tensors have shapes and no values."""
        return has_memory(next(self.module.parameters()))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, from the model's generation config; empty if the config has none.

        Raises:
            ModelError: the config has something else in their place.
        """
        eos = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        if eos is None:
            return ()
        ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        if not all(type(each) is int and each >= 0 for each in ids):
            raise ModelError(
                f"generation_config.json: `eos_token_id` is {shown(eos)}; give the id of a token, or a list "
                "of such ids"
            )
        return ids

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the output embeddings, and so of logits for each token. It is often larger than
        the tokenizer's vocabulary."""
        head = self.module.get_output_embeddings()
        return head.out_features if isinstance(head, NoHead) else len(head.weight)

    @property
    def model_type(self) -> str:
        return self.module.config.model_type

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens of a sequence: the lowest of the model's limits. None if the model has
        none of these limits:

        * The number of positions.
        * The sliding window or the attention chunk. Our attention is full attention, which equals the model's
          attention up to this length.
        * With the position encoding "longrope", the length above which the encoding would change for tokens
          that are already in the KV cache.

        Raises:
            ModelError: the layers have different limits.
        """
        config = self.module.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)
        limits = [self._limit("max_position_embeddings")]
        if layer_types is None or "sliding_attention" in layer_types:
            limits.append(self._limit("sliding_window"))
        if layer_types is not None and "chunked_attention" in layer_types:
            limits.append(self._limit("attention_chunk_size"))
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
        return min((limit for limit in limits if limit is not None), default=None)

    def _limit(self, name: str) -> int | None:
        """Return a field of the configuration that limits the context; None if there is none.

        Raises:
            ModelError: the field differs from layer to layer.
        """
        try:
            limit: int | None = getattr(self.module.config.get_text_config(), name, None)
        except RuntimeError as error:
            raise ModelError(
                f"the layers of this {self.model_type} differ in `{name}`, which is not done here; give "
                "another model"
            ) from error
        return limit

    def hidden(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        layout: AttentionLayout | None = None,
        also: Layer | None = None,
    ) -> Tensor:
        """Compute the last hidden states of the backbone. Evaluation mode does not turn gradients off.

        Args:
            input_ids: (R, L) token ids, R rows of L tokens.
            positions: (R, L), the position of each token; None: 0 to L - 1 in each row.
            layout: the rule by which tokens attend to each other; only for a model that `takes_layouts`.
                None: each token attends causally within its row.
            also: append the hidden states of this layer, or of all layers, along the last axis. If this is
                the last layer, nothing is appended (`width_of`).

        Returns:
            (R, L, D), where D is the hidden size; with `also`, D + `width_of(also)`.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if positions is not None:
            inputs |= {"position_ids": positions}
        if layout is not None:
            inputs |= {"layout": layout, "attention_mask": NO_MASK.to(input_ids.device)}
        with self.without_adapter():
            if also is None or self.is_last(also):
                return self.module.base_model(**inputs, use_cache=False).last_hidden_state
            found = self.module.base_model(**inputs, use_cache=False, output_hidden_states=True)
        return torch.cat([found.last_hidden_state, states_of(found.hidden_states, also)], dim=-1)

    @property
    def num_layers(self) -> int:
        return self.module.config.get_text_config().num_hidden_layers

    def is_last(self, layer: Layer) -> bool:
        """Return True if this names the last layer alone."""
        return layer in (-1, self.num_layers)

    def width_of(self, layer: Layer) -> int:
        """Return the number of hidden states of a token in this layer, or in all layers."""
        own = self.module.get_output_embeddings().in_features
        return own * (self.num_layers if layer == "all" else 1)

    def features(self, hidden_xD: Tensor, layer: Layer) -> Tensor:
        """Return, from the result of `hidden` with `also`, the hidden states of this layer."""
        return hidden_xD if self.is_last(layer) else hidden_xD[..., -self.width_of(layer) :]

    def hidden_of(
        self,
        sequences: Sequence[np.ndarray],
        prefixes: Sequence[int] | None = None,
        *,
        also: Layer | None = None,
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Compute the last hidden states of sequences of any lengths in one pass. If the model takes layouts,
        the sequences follow each other without padding. Otherwise each is padded on the right.

        Args:
            sequences: the ids of each sequence.
            prefixes: for each sequence, the length of its prefix, which may be the whole sequence; 0 for no
                prefix. If the model takes layouts, equal prefixes are computed once. None: no sequence has
                a prefix.
            also: as in `hidden`.

        Returns:
            (T, D) last hidden states of the pass; and for each sequence, the indices of its tokens along T.
        """
        if not self.takes_layouts:
            width = max(len(ids) for ids in sequences)
            ids_1T, _, spans = pack(sequences, self.device, width=width)
            hidden_TD = self.hidden(ids_1T.view(-1, width), also=also).flatten(0, 1)
            return hidden_TD, [np.arange(span.start, span.stop) for span in spans]
        ids_1T, positions_1T, spans, places = pack_groups(
            sequences, prefixes or [0] * len(sequences), self.device
        )
        return self.hidden(ids_1T, positions=positions_1T, layout=Packed(spans), also=also)[0], places

    def head(self, hidden: Tensor) -> Tensor:
        """Compute the logits of hidden states, (..., D) to (..., V), in the precision of the model or of
        autocast. V is `vocab_rows`."""
        with self.without_adapter():
            return self.module.get_output_embeddings()(hidden)

    def linear_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the head's weight (V, D) and its bias, (V,) or None. If the head is not a plain linear
        layer, for example if it has an adapter, return None instead of both."""
        head = self.module.get_output_embeddings()
        return (head.weight, head.bias) if type(head) in (torch.nn.Linear, Linear) else None

    def drop_head(self) -> None:
        """Free the weights of the head, which a model with another head does not need. A tied head stays in
        memory as the input embedding. Do this last: copies of the model have no head either."""
        head = self.module.get_output_embeddings()
        self.module.set_output_embeddings(NoHead(head.in_features, len(head.weight)))

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter of the model, and every buffer of its state dict, by name. A tied parameter
        appears once, under its first name."""
        state = self.module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name in state}
        return {**dict(self.module.named_parameters()), **buffers}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that learning may change, by name. If there is an adapter, these are the
        adapter's parameters; otherwise all parameters that are not in `frozen`."""
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if (self.adapter is None or is_adapter(name)) and name not in self.frozen
        }

    def checkpoint_gradients(self) -> None:
        """Turn on gradient checkpointing: within `checkpointing`, keep only each layer's input and compute
        the layer again in the backward pass.

        Raises:
            ModelError: the model does not support gradient checkpointing.
        """
        enable = (
            getattr(self.module, "activation_checkpointing_enable", None)
            or self.module.gradient_checkpointing_enable
        )
        try:
            enable({"use_reentrant": False, "preserve_rng_state": False})
        except ValueError as error:
            raise ModelError(
                f"a `{self.model_type}` has no gradient checkpointing; set learner.gradient_checkpointing to "
                "false"
            ) from error

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """If `is_base`, turn the adapter off within the body. Unlike PEFT's own switch, this method leaves
        every `requires_grad` as it is."""
        layers = (
            [module for module in self.module.modules() if hasattr(module, "_disable_adapters")]
            if self.is_base
            else []
        )
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


@contextmanager
def checkpointing(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the body, let the layers checkpoint for which `checkpoint_gradients` was called.

    Transformers does so for layers in training mode. Only these layers themselves get this mode, not the
    modules in them: some routers draw their experts at random in training mode.
    """
    parts = [part for module in modules for part in module.modules()]
    able = [part for part in parts if getattr(part, "gradient_checkpointing", False)]
    layers = [part for part in able if isinstance(part, GradientCheckpointingLayer)] or able
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def states_of(hidden_states: Sequence[Tensor], layer: Layer) -> Tensor:
    """Return the hidden states of one layer, or of all layers one after another along the last axis.

    Args:
        hidden_states: those of a module of transformers: of the embeddings, then of each layer.
    """
    return torch.cat(list(hidden_states[1:]), dim=-1) if layer == "all" else hidden_states[layer]


def number_in(lm: CausalLM, *names: str) -> int:
    """Return the first of these fields that the configuration of a model has as a number above 0; 0 if it has
    none. A field that differs from layer to layer is no number."""
    config = lm.module.config.get_text_config()
    for name in names:
        with suppress(RuntimeError):  # which transformers raises for a field that differs between layers
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0


def has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor has values. Return False if it has only a shape: a tensor on `meta`, or a fake
    tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_adapter(name: str) -> bool:
    """Return True if the tensor of this name belongs to the model's LoRA adapter."""
    return "lora_" in name
