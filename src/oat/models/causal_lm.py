"""A causal language model of transformers in the form that the engine and the learner use: a backbone that
computes hidden states, and a head that computes logits.

The logits must be the output embeddings applied to the last hidden states of the backbone, and nothing more.
A model that scales or caps its logits is refused when it is loaded (`compatibility.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from oat.errors import ModelError
from oat.models.attention import AttentionLayout, Packed
from oat.models.linear import Linear
from oat.models.packing import pack, pack_groups

NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask of four axes. If transformers is given such a mask, it makes none of its own. Layouts ignore the
mask."""


class CausalLM:
    """A transformers module with the operations that engine and learner need.

    Attributes:
        module: the `...ForCausalLM` module itself; the code that trains it sets its mode and its gradients.
        adapter: PEFT's object for the LoRA layers within the module (`oat.models.lora`), or None.
        is_base: if true, the operations compute without the adapter.
        takes_layouts: if true, the module's attention is ours (`oat.models.attention`), so sequences need no
            padding.
    """

    def __init__(
        self, module: Any, *, adapter: Any = None, is_base: bool = False, takes_layouts: bool = False
    ):
        self.module = module
        self.adapter = adapter
        self.is_base = is_base
        self.takes_layouts = takes_layouts

    def base(self) -> "CausalLM":
        """Return the model without its adapter. It uses the same module, so there is no second copy of the
        weights."""
        return CausalLM(self.module, adapter=self.adapter, is_base=True, takes_layouts=self.takes_layouts)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def has_weights(self) -> bool:
        """False for an outline (`oat.models.outline`), whose tensors have shapes and no values."""
        return has_memory(next(self.module.parameters()))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, according to the model's generation config; empty if it names none."""
        eos = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the output embeddings, which is the number of logits of a token; often larger
        than the tokenizer's vocabulary."""
        return len(self.module.get_output_embeddings().weight)

    @property
    def model_type(self) -> str:
        return self.module.config.model_type

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens of a sequence; None if the model states no limit.

        It is the lowest of these limits, as far as the model has them:

        * The number of positions.
        * The sliding window or the attention chunk. Only full attention is computed here, and it equals the
          model's attention up to this length.
        * With the position encoding "longrope", the length at which the encoding would change for tokens that
          are already in the KV cache.
        """
        config = self.module.config.get_text_config()
        layer_types = getattr(config, "layer_types", None)
        limits = [getattr(config, "max_position_embeddings", None)]
        if layer_types is None or "sliding_attention" in layer_types:
            limits.append(getattr(config, "sliding_window", None))
        if layer_types is not None and "chunked_attention" in layer_types:
            limits.append(config.attention_chunk_size)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
        return min((limit for limit in limits if limit is not None), default=None)

    def hidden(
        self, input_ids: Tensor, *, positions: Tensor | None = None, layout: AttentionLayout | None = None
    ) -> Tensor:
        """Compute the last hidden states of the backbone. Gradients flow in training and in evaluation mode.

        Args:
            input_ids: (R, L).
            positions: (R, L), the position of each token; None: 0 to L - 1 in each row.
            layout: decides which token attends to which; only for a model that `takes_layouts`. None: each
                token attends causally within its row.

        Returns:
            (R, L, D).
        """
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if positions is not None:
            inputs |= {"position_ids": positions}
        if layout is not None:
            inputs |= {"layout": layout, "attention_mask": NO_MASK.to(input_ids.device)}
        with self.as_seen():
            return self.module.base_model(**inputs, use_cache=False).last_hidden_state

    def hidden_of(
        self, sequences: Sequence[np.ndarray], prefixes: Sequence[int] | None = None
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Compute the last hidden states of sequences of any lengths in one pass. If the model takes layouts,
        the sequences follow each other without padding; else each is padded on the right.

        Args:
            sequences: the ids of each sequence.
            prefixes: for each sequence, the number of tokens at its beginning that are computed once for all
                sequences that begin with them; less than its length. None, or a model that takes no layouts:
                nothing is shared.

        Returns:
            Last hidden states (T, D); and for each sequence the indices of its tokens among the T.
        """
        if not self.takes_layouts:
            width = max(len(ids) for ids in sequences)
            ids_1T, _, spans = pack(sequences, self.device, width=width)
            hidden_TD = self.hidden(ids_1T.view(-1, width)).flatten(0, 1)
            return hidden_TD, [np.arange(span.start, span.stop) for span in spans]
        ids_1T, positions_1T, spans, places = pack_groups(
            sequences, prefixes or [0] * len(sequences), self.device
        )
        return self.hidden(ids_1T, positions=positions_1T, layout=Packed(spans))[0], places

    def head(self, hidden: Tensor) -> Tensor:
        """Compute the logits of hidden states, (..., D) to (..., V), in the precision of the model or of
        autocast. V is `vocab_rows`."""
        with self.as_seen():
            return self.module.get_output_embeddings()(hidden)

    def linear_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the head's weight (V, D) and its bias (V,), which may be None. Return None instead of both
        if the head is not a plain linear layer, for example if it has an adapter."""
        head = self.module.get_output_embeddings()
        return (head.weight, head.bias) if type(head) in (torch.nn.Linear, Linear) else None

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter and every buffer of the model's state, by name. A tied parameter is there
        once, under its first name."""
        state = self.module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name in state}
        return {**dict(self.module.named_parameters()), **buffers}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that learning may change, by name: those of the adapter, or all parameters if
        there is no adapter."""
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if self.adapter is None or is_adapter(name)
        }

    def checkpoint_gradients(self) -> None:
        """Turn on gradient checkpointing: in training mode, keep only each layer's input and compute the
        layer again in the backward pass.

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
    def as_seen(self) -> Iterator[None]:
        """Turn the adapter off in the body if `is_base`. Unlike PEFT's own switch, this method leaves every
        `requires_grad` as it is."""
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


def has_memory(tensor: Tensor) -> bool:
    """Return true if a tensor has values; false if it has only a shape, as on `meta` or in a fake tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_adapter(name: str) -> bool:
    """Return true if the tensor of this name belongs to the model's LoRA adapter."""
    return "lora_" in name
