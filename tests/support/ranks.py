"""A learner whose models are sharded over ranks (FSDP2), each in a process of its own."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from objectives import OBJECTIVES, VOCABULARY, compared_feedback, scored_feedback
from tiny_models import build_config, save_llama, save_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weights import weights_of

from oat import wire
from oat.learner import limits
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel, RewardModel
from oat.learner.optimiser import OptimiserSettings
from oat.learner.ranks import ALONE, Ranks
from oat.learner.shards import local
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.models.lora import add_adapter
from oat.plugins.registry import ALGORITHMS
from oat.processes.pipe import Pipe
from oat.seeds import Seeds
from oat.types import Sampling

UPDATES = 5
CASES = {
    "grpo": ("plain", "grpo"),
    "dpo": ("plain", "dpo"),
    "grpo, tied embeddings": ("tied", "grpo"),
    "dpo, tied embeddings": ("tied", "dpo"),
    "grpo, LoRA": ("LoRA", "grpo"),
    "dpo, LoRA": ("LoRA", "dpo"),
    "dpo, LoRA on the head": ("LoRA on the head", "dpo"),
    "ppo, a critic": ("plain", "ppo"),
    "a reward model": ("plain", "reward_model"),
    "a reward model, LoRA": ("LoRA", "reward_model"),
}
"""The model and the objective of each case."""


def save_models(folder: Path) -> None:
    save_llama(folder / "plain", vocab_size=VOCABULARY, hidden=16, inner=24, spread=0.3)
    save_model(folder / "tied", build_config("qwen3", VOCABULARY), scale=1.0)


def lm_of(folder: Path, kind: str) -> CausalLM:
    path = str(folder / ("tied" if kind == "tied" else "plain"))
    if not kind.startswith("LoRA"):
        return load_lm(path)
    targets = ("lm_head", "q_proj", "down_proj") if "head" in kind else "all-linear"
    lm = add_adapter(load_lm(path), rank=2, alpha=4.0, targets=targets, seed=1)
    torch.manual_seed(5)
    with torch.no_grad():  # an adapter begins as zero
        for parameter in lm.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return lm


def models_of(folder: Path, kind: str, objective: str) -> dict[str, LanguageModel | Critic]:
    lm, drawn = lm_of(folder, kind), np.random.default_rng(0)
    if objective == "reward_model":
        return {"reward": RewardModel(lm, drawn, trailing=np.array([1]))}
    reference = lm.base() if lm.adapter is not None else load_lm(str(folder / kind))
    lms = {"policy": lm, "reference": reference}
    models: dict[str, LanguageModel | Critic] = {
        name: LanguageModel(lm, num_tokens=VOCABULARY, chunk=5) for name, lm in lms.items()
    }
    return {**models, "critic": Critic(lm_of(folder, kind), drawn)} if objective == "ppo" else models


def objective_of(name: str) -> Any:
    if name in OBJECTIVES:
        return OBJECTIVES[name]()
    sizes = {"prompts": 4, "samples": 4} if name == "ppo" else {"prompts": 6}
    return ALGORITHMS[name](ALGORITHMS[name].Config(**sizes))


def sharded_models(folder: Path, kind: str, objective: str, mesh: Any) -> dict[str, LanguageModel | Critic]:
    """Make models, and shard each root and each of its layers."""
    models = models_of(folder, kind, objective)
    for model in {model.root: model for model in models.values()}.values():
        for layer in model.lm.module.base_model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model.root, mesh=mesh, reshard_after_forward=True)
    return models


class Gloo:
    """The ranks of a group (`oat.learner.ranks.Ranks`)."""

    def agreed(self, decide: Callable[[], Any]) -> Any:
        found = [decide() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        return found[0]

    def joined(self, value: Any) -> list[Any]:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


def updates(
    models: Mapping[str, LanguageModel | Critic], objective: str, ranks: Ranks = ALONE, micro: int = 5
) -> dict[str, Any]:
    """Make updates, and return the metrics of each, the weights afterwards, and the number of moments."""
    settings = OptimiserSettings(1e-2, schedule_steps=10, max_grad_norm=0.5)
    trained = {name: settings for name in models if name != "reference"}
    learner = Learner(models, trained, micro_batch_size=micro, seeds=Seeds(0), ranks=ranks)
    made = objective_of(objective)
    feedback = compared_feedback() if made.requires.feedback == "compare" else scored_feedback()
    metrics = []
    for _ in range(UPDATES):
        batch = made.prepare(feedback, learner.forward, np.random.default_rng(0))
        found = learner.update(made, batch)
        metrics.append({name: value for name, value in found.items() if not name.startswith("roofline")})
    names = {name for name, tensor in learner.state_tensors() if "/moments/exp_avg/" in name}
    weights = {
        f"{model}/{name}": tensor.detach().clone()
        for model in trained
        for name, tensor in weights_of(learner, model).items()
    }
    return {
        "metrics": metrics,
        "weights": weights,
        "moments": len(names),
        "trained": sum(len(learner.trainable(name)) for name in trained),
    }


def measured(models: Mapping[str, LanguageModel | Critic], rank: int) -> dict[str, int]:
    """Return the number of threads that this rank would learn on, and the number of tokens that it would
    learn from at once. By itself, each rank would try other numbers of threads, and count other bytes."""

    class Counted(limits.LiveBytes):
        """Rank 1 counts twice the bytes that it has."""

        def __exit__(self, *raised: Any) -> None:
            super().__exit__(*raised)
            self.peak *= 1 + rank

    settings = OptimiserSettings(1e-2, schedule_steps=10)
    learner = Learner(models, {"policy": settings}, micro_batch_size=5, seeds=Seeds(0), ranks=Gloo())
    objective = OBJECTIVES["grpo"]()
    with patch.object(limits, "candidates", lambda _: [1, 2] if rank == 0 else [3]):
        threads = limits.choose_threads(learner, objective)
    with patch.object(limits, "LiveBytes", Counted):
        most = limits.Limits(memory_gb=1.5e-4, response_tokens=4)
        tokens = limits.measure_tokens(learner, objective, most, Sampling(4), VOCABULARY)
    return {"threads": threads, "tokens": tokens}


def share_of(models: Mapping[str, LanguageModel | Critic]) -> float:
    """Return the part of the bytes of all parameters that this rank holds."""
    parameters = {id(each): each for model in models.values() for each in model.module.parameters()}.values()
    held = sum(local(each).numel() for each in parameters)
    return held / sum(each.numel() for each in parameters)


def serve(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Be a rank, in a process of its own: make the updates of some cases, and measure. Write what came of it
    into a file."""
    torch.set_num_threads(1)
    folder, rank, ranks = Path(order["models"]), order["rank"], order["ranks"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    warnings.simplefilter("error", UserWarning)  # of a root that returns a view, say
    for case in order["cases"]:
        kind, objective = CASES[case]
        models = sharded_models(folder, kind, objective, mesh)
        before = share_of(models)
        # what a rank would decide by itself, it leaves to rank 0
        learned = updates(models, objective, Gloo(), micro=5 - 2 * rank)
        found[case] = {**learned, "share": max(before, share_of(models))}
    found["measured"] = measured(sharded_models(folder, "LoRA", "grpo", mesh), rank)
    dist.destroy_process_group()
    (folder / f"rank{rank}").write_bytes(wire.encode(found))
