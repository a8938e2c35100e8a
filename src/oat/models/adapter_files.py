"""What the files of an adapter say of it. An adapter is described without the libraries that load models."""

from typing import Any

from oat.config.settings import LoraConfig
from oat.errors import ModelError
from oat.files import absolute, parse_json
from oat.models.beside import ADAPTER

WEIGHTS = "adapter_model.safetensors"
_PLAIN = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Fields of PEFT's configuration that a plain LoRA adapter may have set. An adapter with another field set is
refused: it may compute something else, as `use_dora` or `rank_pattern` do."""


def described_adapter(path: str) -> tuple[LoraConfig, str]:
    """Read the description in an adapter's directory.

    Returns:
        The adapter's settings; and the name of its base model, or "" if the description names none.

    Raises:
        ModelError: there is no adapter that can be read, or it is of a kind that this code does not compute.
    """
    try:
        found = parse_json((absolute(path) / ADAPTER).read_text(encoding="utf-8"))
        kind = found["peft_type"]
        if kind != "LORA":
            raise _other_kind(path, kind)
        rank = int(found["r"])
        alpha = float(found["lora_alpha"])
        targets = found["target_modules"]
        if targets != "all-linear":
            targets = tuple(sorted(targets)) if isinstance(targets, list) else ()
        others = [name for name, value in found.items() if value and name not in _PLAIN]
        start = found.get("init_lora_weights", True)
        bias = found.get("bias", "none")
        config = LoraConfig(rank=rank, alpha=alpha, targets=targets)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} holds no adapter that can be read ({type(error).__name__}: {error}); give a directory "
            f"with {ADAPTER} and {WEIGHTS}, as PEFT's `save_pretrained` and `oat export --adapter` write them"
        ) from error
    others += [] if bias == "none" else ["bias"]
    others += [] if isinstance(start, bool) or start == "gaussian" else ["init_lora_weights"]
    others += [] if targets else ["target_modules"]
    if others:
        said = ", ".join(f"{name} {found[name]!r}" for name in others)
        raise ModelError(
            f"the adapter in {path} is none of plain LoRA ({ADAPTER}: {said[:200]}); merge it with PEFT, and "
            "give the merged model"
        )
    return config, str(found.get("base_model_name_or_path") or "")


def _other_kind(path: str, kind: Any) -> ModelError:
    return ModelError(
        f"{path} holds an adapter of PEFT's kind {kind!s:.60}, and only LORA is read; if PEFT can merge it "
        "(`merge_and_unload`), give the merged model"
    )
