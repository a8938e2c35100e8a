"""Makes of a language model's backbone and a score head a sequence-classification model of transformers."""

from copy import deepcopy
from typing import Any

import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from oat.errors import ModelError
from oat.models.causal_lm import CausalLM
from oat.models.nf4 import shapes
from oat.text.renderer import Renderer


def check_backbone(lm: CausalLM) -> None:
    """Check that transformers has a sequence-classification model with the same backbone, and with a linear
    score head without bias. If `lm` has no weights, check only that transformers has a
    sequence-classification model of this type.

    Raises:
        ModelError: there is no such model, so a model with this backbone and a score could not be saved.
    """
    cls = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(lm.module.config), None)
    if cls is not None and not lm.has_weights:
        return
    if cls is not None:
        with torch.device("meta"):
            module = cls(_config(lm))
        names = {name: shape for name, shape in shapes(lm.module.base_model).items() if "lora_" not in name}
        like = {name.replace(".base_layer.", "."): shape for name, shape in names.items()}
        if (
            isinstance(getattr(module, "score", None), torch.nn.Linear)
            and module.score.bias is None
            and like == shapes(module.base_model)
        ):
            return
    raise ModelError(
        f"a `{lm.model_type}` has no sequence-classification form in transformers that its score could be "
        "saved in; give another model"
    )


def classifier_of(lm: CausalLM, weight: torch.Tensor, tokenizer: Any, renderer: Renderer) -> Any:
    """Make the module of a model that `AutoModelForSequenceClassification` and the oracle `reward_model`
    load. The tokenizer gets the chat template of the run.

    If the tokenizer's pad id may also end a row, the model is saved without a pad id. With this pad id,
    transformers would read the score one token too early. Without a pad id, transformers refuses batches.

    Args:
        weight: (1, D), weight of the score head.
        renderer: the run's renderer.
    """
    config = _config(lm)
    ends = {*renderer.stop_ids, *renderer.trailing.tolist()}
    config.pad_token_id = None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id
    module = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config).to(
        next(lm.module.parameters()).dtype
    )
    module.base_model.load_state_dict(lm.module.base_model.state_dict())
    with torch.no_grad():
        module.score.weight.copy_(weight)
    tokenizer.chat_template = renderer.source or None
    return module.eval()


def _config(lm: CausalLM) -> Any:
    config = deepcopy(lm.module.config)
    config.num_labels = 1
    return config
