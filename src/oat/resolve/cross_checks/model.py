"""Checks of the section `model`: precision and device of the weights."""

from collections.abc import Iterator

from oat.resolve.model_starts import has_own_reference, starts_alike
from oat.resolve.resolved import Resolved
from oat.types.part import Check


def precision(resolved: Resolved) -> Iterator[Check]:
    yield Check(
        "model.dtype",
        resolved.config.model.dtype == "bfloat16",
        "AdamW loses most of its steps on such weights; keep float32, set learner.autocast",
    )


def weights(resolved: Resolved) -> Iterator[Check]:
    model = resolved.config.model
    is_own = has_own_reference(model)
    beside = "the reference stands beside the policy's frozen weights and has none of its own; remove it"
    yield Check(
        "model.quantize",
        model.quantize is not None and model.lora is None,
        "weights in four bits cannot be trained; set model.lora, whose adapter is",
    )
    yield Check(
        "model.frozen",
        bool(model.frozen) and model.lora is not None,
        "beside an adapter every tensor of the model is frozen; remove one of the two",
    )
    yield Check(
        "model.frozen",
        bool(model.frozen) and model.reference_update is not None and not starts_alike(model),
        "the reference would follow the policy in its other tensors alone; remove model.reference",
    )
    yield Check(
        "model.reference_update",
        model.reference_update is not None
        and resolved.features is not None
        and resolved.features.backbone == "reference",
        "an ensemble's features are the reference's, and those that it has learned from would be of another "
        "reference; leave it frozen",
    )
    yield Check(
        "model.reference_dtype",
        model.reference_dtype == "bfloat16" and model.reference_update is not None,
        "most shares of an update are less than the gap between two such numbers; leave it at float32",
    )
    yield Check("model.reference_device", model.reference_device is not None and not is_own, beside)
    yield Check("model.reference_dtype", model.reference_dtype is not None and not is_own, beside)
    yield Check(
        "model.reference_device",
        model.reference_device is not None and resolved.config.compute.profile == "cpu",
        "everything is there with compute.profile: cpu; remove it",
    )
