"""The actor: renderer and engine. Prompts in, groups of trajectories out."""

from collections.abc import Mapping, Sequence

import numpy as np

from oat.engines.base import Engine
from oat.render import Renderer
from oat.seeds import Seeds
from oat.types import Completion, Group, Prompt, Request, Sampling, Segment, Trajectory


class Actor:
    """Samples and scores.

    Args:
        sampling: how training responses are drawn.
    """

    def __init__(self, renderer: Renderer, engine: Engine, sampling: Sampling, seeds: Seeds):
        self.renderer, self.engine, self.sampling, self.seeds = renderer, engine, sampling, seeds

    def sample(
        self, prompts: Sequence[Prompt], samples: Mapping[str, int], address: Sequence[str | int], sampling: Sampling | None = None
    ) -> list[Group]:
        """One group a prompt; its trajectories stand slot by slot, in the order of `samples`.

        Args:
            samples: responses a prompt, by slot.
            address: purpose, step and round of the random numbers.
            sampling: other than in training.
        """
        sampling = sampling or self.sampling
        contexts = [self.renderer.prompt(prompt.messages) for prompt in prompts]
        groups: list[list[Trajectory]] = [[] for _ in prompts]
        for slot, count in samples.items():
            keys = [self.seeds.key(*address, slot, prompt.occurrence, sample) for prompt in prompts for sample in range(count)]
            owners = [number for number in range(len(prompts)) for _ in range(count)]
            requests = [Request(contexts[owner], sampling, key) for owner, key in zip(owners, keys, strict=True)]
            completions = sorted(self.engine.generate(requests, slot), key=lambda completion: completion.index)
            for owner, completion in zip(owners, completions, strict=True):
                groups[owner].append(self._trajectory(slot, contexts[owner], completion, sampling))
        return [Group(prompt, tuple(trajectories)) for prompt, trajectories in zip(prompts, groups, strict=True)]

    def score(self, groups: Sequence[Group], needs: Sequence[str]) -> dict[str, list[np.ndarray]]:
        """Summed raw log-probabilities of every sample, (G,) float32 a group, under each slot that is needed; "sampler" means those
        recorded at sampling."""
        scores: dict[str, list[np.ndarray]] = {}
        for slot in needs:
            rows = [trajectory for group in groups for trajectory in group.trajectories]
            if slot == "sampler":
                logps = [row.recorded("raw_logps") for row in rows]
            else:
                found = self.engine.logps([row.ids for row in rows], slot)
                logps = [values[row.trained[1:]] for values, row in zip(found, rows, strict=True)]
            sums = np.array([values.sum() for values in logps], dtype=np.float32)
            scores[slot] = np.split(sums, np.cumsum([len(group.trajectories) for group in groups])[:-1])
        return scores

    def _trajectory(self, slot: str, context: np.ndarray, completion: Completion, sampling: Sampling) -> Trajectory:
        size = len(completion.ids)
        response = Segment(
            "model",
            completion.ids,
            mask=np.ones(size, dtype=bool),
            versions=np.full(size, completion.version, dtype=np.int32),
            raw_logps=completion.raw_logps,
            sampled_logps=completion.sampled_logps,
            kept=completion.kept,
        )
        text = self.renderer.text(completion.ids)
        return Trajectory(slot, (Segment("context", context), response), completion.finish_reason, text, sampling.temperature)
