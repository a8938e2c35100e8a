"""Fields that TRL ignores unless another field, their switch, is on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oat.config.peers.table import family_of

ON: Any = object()
"""Stands for every value of a switch that is not false, 0 or null."""


@dataclass(frozen=True)
class Switch:
    """A field that switches others on.

    Attributes:
        fields: the field, and further ones each of which does so too; with the values that do, and the
            default.
        shown: how a message writes it.
        families: our families of algorithms for which it holds; empty: all.
        verb: what TRL does with a field that lacks it.
        algorithms: our algorithms with which it is on, whatever the fields are.
    """

    fields: tuple[tuple[str, tuple[Any, ...], Any], ...]
    shown: str
    families: tuple[str, ...] = ()
    verb: str = "ignores"
    algorithms: tuple[str, ...] = ()

    def is_on(self, given: Mapping[str, Any]) -> bool:
        values = [(given.get(name, default), on) for name, on, default in self.fields]
        return any(value is ... or (bool(value) if ON in on else value in on) for value, on in values)


def _true(name: str) -> Switch:
    return Switch(((name, (ON,), False),), f"{name}: true")


_VLLM = _true("use_vllm")
_VLLM_WEIGHTS = Switch(
    (("vllm_importance_sampling_correction", (ON,), True),), "vllm_importance_sampling_correction: true"
)
_PEFT = _true("use_peft")
_SYNC = _true("sync_ref_model")
_ENTROPY = _true("use_adaptive_entropy")
_KL = Switch((("beta", (ON,), 0.0),), "beta", ("group",))
_REFERENCE = replace(_KL, verb="refuses")
_EVAL_STEPS = Switch(
    (("eval_strategy", ("steps",), "no"), ("evaluation_strategy", ("steps",), "no")), "eval_strategy: steps"
)
_EVAL = Switch(
    (("eval_strategy", ("steps", "epoch"), "no"), ("evaluation_strategy", ("steps", "epoch"), "no")),
    "eval_strategy",
)
_SAVE_STEPS = Switch((("save_strategy", ("steps",), "steps"),), "save_strategy: steps")
_BEST = Switch(
    (("load_best_model_at_end", (ON,), False), ("save_strategy", ("best",), "steps")),
    "load_best_model_at_end: true",
)
_SAPO, _VESPO = (
    Switch((("loss_type", (loss,), ""),), f"loss_type: {loss}", ("group",), algorithms=(loss,))
    for loss in ("sapo", "vespo")
)
SWITCHES: dict[str, tuple[Switch, ...]] = {
    "sync_ref_model": (_REFERENCE,),
    "ref_model_sync_steps": (_SYNC, _KL),
    "ref_model_mixup_alpha": (_SYNC, _KL),
    "use_bias_correction_kl": (_KL,),
    "entropy_target": (_ENTROPY,),
    "entropy_coef_min": (_ENTROPY,),
    "entropy_coef_max": (_ENTROPY,),
    "entropy_coef_delta": (_ENTROPY,),
    "sapo_temperature_neg": (_SAPO,),
    "sapo_temperature_pos": (_SAPO,),
    "vespo_k_pos": (_VESPO,),
    "vespo_lambda_pos": (_VESPO,),
    "vespo_k_neg": (_VESPO,),
    "vespo_lambda_neg": (_VESPO,),
    "eval_steps": (_EVAL_STEPS,),
    "num_generations_eval": (_EVAL,),
    "per_device_eval_batch_size": (_EVAL,),
    "save_steps": (_SAVE_STEPS,),
    "metric_for_best_model": (_BEST,),
    "greater_is_better": (_BEST,),
    "lora_r": (_PEFT,),
    "lora_alpha": (_PEFT,),
    "lora_target_modules": (_PEFT,),
    "bnb_4bit_quant_type": (_true("load_in_4bit"),),
    "vllm_gpu_memory_utilization": (_VLLM,),
    "vllm_tensor_parallel_size": (_VLLM,),
    "vllm_importance_sampling_correction": (_VLLM,),
    "vllm_importance_sampling_mode": (_VLLM, _VLLM_WEIGHTS),
    "vllm_importance_sampling_clip_max": (_VLLM, _VLLM_WEIGHTS),
    "vllm_importance_sampling_clip_min": (_VLLM, _VLLM_WEIGHTS),
    "vllm_importance_sampling_cap": (_VLLM, _VLLM_WEIGHTS),
    "transformers_continuous_batching_config": (_true("use_transformers_continuous_batching"),),
}
"""For each such field of TRL its switches, which all have to be on. A field that gives no setting here needs
no entry."""


def lacking(field: str, given: Mapping[str, Any], algorithm: str | None) -> str:
    """Return which switch TRL misses for a field, such as "ignores it without beta"; "": it reads the field.

    Args:
        given: the fields of TRL that are set, with their values.
        algorithm: name of the run's algorithm.
    """
    for switch in SWITCHES.get(field, ()):
        is_meant = not switch.families or family_of(algorithm) in switch.families
        if is_meant and algorithm not in switch.algorithms and not switch.is_on(given):
            return f"{switch.verb} it without {switch.shown}"
    return ""
