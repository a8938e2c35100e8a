"""The source of a model that a test has: a folder without weights, and an iterator over its tensors."""

import tempfile
from collections.abc import Iterator

import torch

from oat.config.settings import LoraConfig, ModelConfig
from oat.models.causal_lm import CausalLM
from oat.models.identity import model_identity
from oat.models.sources import ModelSource


def source_of(lm: CausalLM) -> ModelSource:
    """Return the source of a model, whose folder has no weights."""
    folder = tempfile.mkdtemp()
    lm.module.config.save_pretrained(folder)
    lora = None
    if lm.adapter is not None:
        config = lm.adapter.peft_config["default"]
        targets = config.target_modules
        lora = LoraConfig(config.r, config.lora_alpha, targets if isinstance(targets, str) else (*targets,))
    dtype = str(next(lm.module.parameters()).dtype).removeprefix("torch.")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in lm.tensors().items():
            yield name, tensor.detach().clone()

    return ModelSource(
        ModelConfig(folder, dtype=dtype, lora=lora),  # type: ignore[arg-type]
        torch.device("cpu"),
        identity=model_identity(lm.module.config),
        tensors=tensors,
        is_whole=True,
    )
