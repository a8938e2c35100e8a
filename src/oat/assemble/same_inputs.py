"""The models and the tokenizer of a run in its other processes, which read them themselves. One that starts
late may find files that were edited since. So each compares what it reads with the fingerprints of the run's
own process. The user's code is compared in `runtime/worker_group.py`."""

from typing import Any

from oat.assemble.fingerprints import (
    Inputs,
    inputs_of_explorer,
    inputs_of_models,
    inputs_of_template,
    inputs_of_weights,
    refuse_other_models,
    refuse_other_weights,
)
from oat.models.causal_lm import CausalLM
from oat.models.identity import Identity
from oat.resolve.resolved import Resolved


def inputs_sent(resolved: Resolved, inputs: Inputs) -> Inputs:
    """Return the fingerprints that other processes compare.

    Args:
        inputs: the fingerprints of the run's own process.
    """
    return {name: inputs[name] for name in ("readers", "models", "template") if name in inputs} | {
        "weights": _weights(resolved)
    }


def refuse_other_inputs(resolved: Resolved, sent: Inputs, lm: CausalLM, tokenizer: Any) -> None:
    """Refuse models, a tokenizer or a template that this process reads otherwise than the run's own process.

    Args:
        sent: the result of `inputs_sent` there; {}: nothing is compared.
        lm: the policy; only its configuration is read.

    Raises:
        ModelError, TemplateError: something differs.
    """
    if not sent:
        return
    config, error_context = resolved.config, resolved.error_context
    now = inputs_of_models(config, lm, tokenizer, error_context) | inputs_of_template(config, tokenizer)
    refuse_other_models(config, sent, now, error_context)
    weights = _weights(resolved)
    refuse_other_weights(sent, {"weights": weights}, [*weights], error_context)


def identities(sent: Inputs) -> dict[str, Identity]:
    """Return what the run's own process has found in the configuration of each model, by the hash of its
    path.

    Args:
        sent: the result of `inputs_sent` there.
    """
    found = [(each["of"], each["is"]) for each in sent.get("models", {}).values()]
    return {of: {"config.json": held["config.json"]} for of, held in found if "config.json" in held}


def _weights(resolved: Resolved) -> Inputs:
    """Return the fingerprints of weights that an actor reads and is not sent: those of the reference, and of
    a backbone of features."""
    features = resolved.features
    found: Inputs = {}
    if "reference" in resolved.slots or features is not None:
        found = inputs_of_weights(resolved.config)["weights"]
    if features is not None and features.is_own:
        found |= inputs_of_explorer(features.backbone, None, resolved.error_context)
    return {field: each for field, each in found.items() if field != "model.critic"}
