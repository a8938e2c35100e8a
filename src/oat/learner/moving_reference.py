"""A reference that follows the policy: theta_ref <- mix * theta + (1 - mix) * theta_ref, every `every` steps
(TR-DPO, arXiv:2404.09656).

A mix of 1 sets the reference to the policy (the paper's hard update). A small mix at every step makes the
reference a moving average of the policy.

If the policy has an adapter, the reference has a second adapter on the same base weights. The formula then
applies to the matrices of the adapters: A is mixed with A, and B with B. The products B A follow the formula
only if the mix is 1.
"""

from typing import Any

import torch

from oat.errors import ConfigError
from oat.learner.models import Model


class Following:
    """Updates a reference that follows the policy.

    Args:
        every: number of updates of the policy from one update of the reference to the next.
        mix: share of the policy in the new reference, above 0 and at most 1.

    Attributes:
        steps: number of updates of the policy so far.
        updates: number of updates of the reference so far, which is its version.
    """

    def __init__(self, every: int, mix: float):
        self.every, self.mix = every, mix
        self.steps = self.updates = 0

    @torch.no_grad()
    def step(self, policy: Model, reference: Model) -> None:
        """Count one more update of the policy. If an update of the reference is due, make it in place."""
        self.steps += 1
        if self.steps % self.every:
            return
        self.updates += 1
        theirs = policy.trainable()
        for name, parameter in reference.trainable().items():
            parameter.lerp_(theirs[name].to(parameter.device), self.mix)

    @staticmethod
    def check(policy: Model, reference: Model) -> None:
        """Refuse models whose trainable tensors do not correspond.

        Raises:
            ConfigError: names or shapes differ.
        """
        theirs = {name: parameter.shape for name, parameter in policy.trainable().items()}
        ours = {name: parameter.shape for name, parameter in reference.trainable().items()}
        wrong = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if wrong:
            raise ConfigError(
                f"model.reference_update mixes the policy into the reference, and {len(wrong)} of their "
                f"tensors do not correspond, for example `{wrong[0]}`; give a model.reference of the "
                "policy's shape (leave it out: then it is the policy's start)"
            )

    @property
    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "updates": self.updates}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps, self.updates = state["steps"], state["updates"]
