"""Reference implementations of the protocol tests: a step written from its formulas, in plain PyTorch with
padded batches.

They read the trajectories and answers from a run's ledger, so the tokens are the same. They share no code
with the learner, the losses or the optimiser.
"""

import functools
import json
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from oat.answering.learned import policy_weights
from oat.ledger.store import Store
from oat.types import Item, Trajectory

TOLERANCE = 1e-5


def recorded_steps(run_dir: Path) -> list[list[Item]]:
    """Return the items that each step of a run learned from, in recorded order."""
    store = Store(run_dir / "ledger.sqlite")
    steps: list[list[Item]] = []
    while store.has_take("train", len(steps)):
        items = []
        for row in store.taken("train", len(steps)):
            key = row.question.key
            answer, label = store.answer(row)
            items.append(
                Item(store.groups(key.purpose, key.step, key.round)[row.member], row.question, answer, label)
            )
        steps.append(items)
    store.close()
    return steps


def added(numbers: Iterable[float]) -> float:
    """Return the numbers added one after the other. From Python 3.12 on, `sum` rounds once only."""
    return functools.reduce(operator.add, numbers, 0.0)


@dataclass(frozen=True)
class Padded:
    """A batch of sequences, padded on the right with id 0.

    Attributes:
        ids, attention: (N, T).
        mask: (N, T - 1), True if token t + 1 belongs to the response.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor
    rows: Sequence[Trajectory]

    def scattered(self, name: str) -> Tensor:
        """Return (N, T - 1) recorded values of the response tokens, and 0 for other tokens."""
        values = torch.zeros(self.mask.shape)
        for n, row in enumerate(self.rows):
            at = -1
            for segment in row.segments:
                if segment.author == "model":
                    values[n, at : at + len(segment.ids)] = torch.from_numpy(getattr(segment, name))
                at += len(segment.ids)
        return values


def pad(rows: Sequence[Trajectory]) -> Padded:
    width = max(sum(len(segment.ids) for segment in row.segments) for row in rows)
    ids, attention, response = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    for n, row in enumerate(rows):
        at = 0
        for segment in row.segments:
            end = at + len(segment.ids)
            ids[n, at:end], attention[n, at:end] = torch.from_numpy(segment.ids).long(), 1
            response[n, at:end] = int(segment.author == "model")
            at = end
    return Padded(ids, attention, response[:, 1:].float(), rows)


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits_of(model: torch.nn.Module, batch: Padded) -> Tensor:
    """Return the (N, T - 1, V) logits that predict token t + 1."""
    return model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1]


def log_softmax(logits: Tensor) -> Tensor:
    shifted = logits - logits.max(-1, keepdim=True).values.detach()
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def picked(values: Tensor, batch: Padded) -> Tensor:
    """Return the (N, T - 1) values of the next tokens, and 0 outside the responses."""
    chosen = values.gather(2, batch.ids[:, 1:, None]).squeeze(2)
    return torch.where(batch.mask > 0, chosen, 0.0)


def sequence_logps(model: torch.nn.Module, batch: Padded) -> Tensor:
    """Return the (N,) summed log-probabilities of the responses."""
    return picked(log_softmax(logits_of(model, batch)), batch).sum(1)


def dpo_curve(
    steps: Sequence[Sequence[Item]],
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    optimiser: "Optimiser",
    beta: float,
) -> list[dict[str, float] | None]:
    """Train the policy by DPO on the recorded pairs of every step. Return loss and gradient norm of each
    step."""
    curve: list[dict[str, float] | None] = []
    for items in steps:
        pairs = [item for item in items if item.label is not None]
        if not pairs:
            curve.append(None)
            continue
        picks = [item.question.picks if item.label == 0 else item.question.picks[::-1] for item in pairs]
        batch = pad(
            [item.group.trajectories[pick] for item, pair in zip(pairs, picks, strict=True) for pick in pair]
        )
        with torch.no_grad():
            reference_N = sequence_logps(reference, batch)
        corrected_N = sequence_logps(policy, batch) - reference_N
        loss = torch.log(1 + torch.exp(-beta * (corrected_N[0::2] - corrected_N[1::2]))).mean()
        loss.backward()
        curve.append({"loss/total": loss.item(), "optim/grad_norm": optimiser.step()})
    return curve


def gradient_norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


class Optimiser:
    """AdamW with weight decay on matrices only, gradients clipped by norm, and a warm-up followed by a linear
    decay to a tenth."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        rate: float,
        decay: float,
        max_norm: float,
        warmup: int = 0,
        total: int | None = None,
    ):
        self.parameters = list(parameters)
        self.rate = rate
        self.max_norm = max_norm
        self.warmup = warmup
        self.total = total
        self.steps = 0
        matrices, vectors = (
            [p for p in self.parameters if p.ndim > 1],
            [p for p in self.parameters if p.ndim == 1],
        )
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)

    def step(self) -> float:
        """Update the parameters with their gradients, and clear the gradients. Return the norm before
        clipping."""
        norm = gradient_norm(self.parameters)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, self.max_norm / (norm + 1e-6)))
        for group in self.adamw.param_groups:
            group["lr"] = self.rate * self._height()
        self.adamw.step()
        self.adamw.zero_grad()
        self.steps += 1
        return norm

    def _height(self) -> float:
        if self.steps < self.warmup:
            return (self.steps + 1) / self.warmup
        if self.total is None:
            return 1.0
        return 1.0 - 0.9 * min(1.0, (self.steps - self.warmup) / (self.total - self.warmup))


def assert_same_curve(run_dir: Path, expected: Sequence[dict[str, float] | None]) -> None:
    """Check losses and gradient norms of every step. None stands for a step without anything to learn
    from."""
    rows = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ][1:]
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        assert ("loss/total" in row) == (values is not None)
        for name, value in (values or {}).items():
            assert abs(row[name] - value) <= TOLERANCE * abs(value), (row["step"], name, row[name], value)


def assert_same_weights(run_dir: Path, model: torch.nn.Module, start: torch.nn.Module) -> None:
    """Check the policy's weights after the last step, and that they changed."""
    _, weights, *_ = policy_weights(run_dir)
    assert_close(weights, dict(model.named_parameters()), dict(start.named_parameters()))


@torch.no_grad()
def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() == start.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= TOLERANCE * value.norm(), (
            name,
            float((found[name] - value).norm() / value.norm()),
        )
        assert (value - start[name]).norm() > 100 * TOLERANCE * value.norm(), f"{name} did not move"
