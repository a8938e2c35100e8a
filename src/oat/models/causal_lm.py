"""A causal language model of transformers as the engine and the learner see it: a backbone that makes hidden
states, and a head.

Supported is a model whose logits are its output embeddings applied to the last hidden states of its backbone,
nothing more; a model that scales or caps its logits is refused when it is loaded (`compatibility.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from oat.errors import ModelError
from oat.models.attention import AttentionLayout, Packed, pack, pack_groups
from oat.models.linear import Linear

NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask of four axes keeps transformers from making one of its own; a layout does not look at it."""


class CausalLM:
    """A transformers module with the few operations that this code needs of it.

    Attributes:
        module: the `...ForCausalLM` module itself; whoever trains it owns its mode and its gradients.
        adapter: PEFT's handle of the LoRA layers within the module (`oat.models.lora`), or None.
        is_base: the module is seen as it is without its adapter.
        takes_layouts: its attention is ours (`oat.models.attention`), so that sequences need no padding.
    """

    def __init__(
        self, module: Any, *, adapter: Any = None, is_base: bool = False, takes_layouts: bool = False
    ):
        self.module = module
        self.adapter = adapter
        self.is_base = is_base
        self.takes_layouts = takes_layouts

    def base(self) -> "CausalLM":
        """The same module with the adapter off: what the adapter started from, without a second copy."""
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
        """The ids that its generation config says end a text."""
        eos = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def vocab_rows(self) -> int:
        """Columns of the logits; often more than the tokenizer has tokens."""
        return len(self.module.get_output_embeddings().weight)

    @property
    def model_type(self) -> str:
        return self.module.config.model_type

    @property
    def context_length(self) -> int | None:
        """Most tokens of a sequence; None when the model states no limit.

        The least of the positions it has, of its sliding window or attention chunk (within which it equals
        full attention, the only one done here), and of the length at which its position encoding would change
        for tokens that are already cached ("longrope").
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
        """Last hidden states of the backbone; the gradient flows, in training as in evaluation mode.

        Args:
            input_ids: (R, L).
            positions: (R, L) position of each token; None: 0 to L - 1.
            layout: who sees whom, where the model `takes_layouts`; None: each row itself, causally.
        Returns:
            (R, L, D).
        """
        asked: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        if layout is not None:
            asked |= {"layout": layout, "attention_mask": NO_MASK.to(input_ids.device)}
        with self.as_seen():
            return self.module.base_model(input_ids=input_ids, use_cache=False, **asked).last_hidden_state

    def hidden_of(
        self, sequences: Sequence[np.ndarray], prefixes: Sequence[int] | None = None
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Sequences of any lengths in one pass, end to end without padding; or padded on the right, where the
        model takes no layouts.

        Args:
            prefixes: tokens of each sequence that others may begin with too, and which are then computed
            once; less than all. None: no sharing.
        Returns:
            Last hidden states (T, D), and where those of each sequence lie among them.
        """
        if not self.takes_layouts:
            width = max(len(ids) for ids in sequences)
            ids_1T, _, spans = pack(sequences, self.device, width=width)
            return self.hidden(ids_1T.view(-1, width)).flatten(0, 1), [
                np.arange(span.start, span.stop) for span in spans
            ]
        ids_1T, positions_1T, spans, places = pack_groups(
            sequences, prefixes or [0] * len(sequences), self.device
        )
        return self.hidden(ids_1T, positions=positions_1T, layout=Packed(spans))[0], places

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over `vocab_rows` ids, (..., D) to (..., V), in the model's own precision."""
        with self.as_seen():
            return self.module.get_output_embeddings()(hidden)

    def linear_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (V, D) and bias (V,) of the head; None where the head is more than a linear layer, such as
        one with an adapter."""
        head = self.module.get_output_embeddings()
        return (head.weight, head.bias) if type(head) in (torch.nn.Linear, Linear) else None

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and every buffer that is part of the model's state, by name; a tied parameter once,
        under its first name."""
        state = self.module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if name in state}
        return {**dict(self.module.named_parameters()), **buffers}

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that learning may change, by name: the adapter's where there is one, otherwise
        all."""
        return {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if self.adapter is None or is_adapter(name)
        }

    def checkpoint_gradients(self) -> None:
        """In training mode, keep each layer's input only and compute the layer again in the backward pass.

        Raises:
            ModelError: the model cannot.
        """
        enable = (
            getattr(self.module, "activation_checkpointing_enable", None)
            or self.module.gradient_checkpointing_enable
        )
        try:
            enable({"use_reentrant": False, "preserve_rng_state": False})
        except ValueError as error:
            raise ModelError(
                f"a `{self.model_type}` has no gradient checkpointing; set learner.gradient_checkpointing "
                "to false"
            ) from error

    @contextmanager
    def as_seen(self) -> Iterator[None]:
        """With `is_base`, the adapter's layers are off; no flag of any gradient moves, as it would with
        PEFT's own switch."""
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
    """Whether a tensor has values, rather than a shape alone."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_adapter(name: str) -> bool:
    """Whether a tensor of a model belongs to its LoRA adapter."""
    return "lora_" in name
