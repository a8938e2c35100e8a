"""Helpers for tests of adapters: a learner and an engine whose models have an adapter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fixtures import World, made

from oat.assemble.run import build
from oat.config.load import load_config
from oat.engines.torch import TorchEngine
from oat.learner.learner import Learner
from oat.loop import Run
from oat.models.causal_lm import CausalLM
from oat.resolve.resolve import resolve

LORA = {"model.lora": {"rank": 4, "alpha": 8}}


def bend(lm: CausalLM) -> None:
    """Give the adapter weights that change every logit."""
    with torch.no_grad():
        for tensor in lm.trainable().values():
            tensor.add_(0.05 * torch.sin(torch.arange(tensor.numel())).view_as(tensor))


@torch.no_grad()
def logits(lm: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    return lm.head(lm.hidden(ids))


def built(world: World, folder: Path, changes: Mapping[str, Any], algorithm: str = "dpo") -> Run:
    config, origins = load_config(world.config(algorithm, folder, {**LORA, **changes, "evaluation": None}))
    return build(resolve(config, origins), directory=made(folder / "built"))


def learner_in(run: Run) -> Learner:
    learner: Any = run.parts["learner"]
    return learner if isinstance(learner, Learner) else learner._box


def engine_in(run: Run) -> TorchEngine:
    actor: Any = run.collector.actor  # type: ignore[attr-defined]
    engine: TorchEngine = getattr(actor, "_box", actor).engine
    return engine
