"""The ensemble: M small reward networks on frozen features, evaluated together (SEA, arXiv:2411.01493;
EE4LLM, arXiv:2402.00396).

Each member is x -> act(W1 x + b1) -> act(W2 x + b2) -> W3 x + b3, a scalar. Members differ by their initial
weights. These are normal with standard deviation 1 / (2 sqrt(inputs)), truncated at two standard deviations.
Initial biases are 0. The initial parameters are kept as the anchor. The prior, a term of the loss, pulls the
parameters towards the anchor.

Files of an exported ensemble: `ensemble.safetensors` with its weights, and `ensemble.json` with its shape
and the features that it reads.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch.nn import functional as F

from oat.errors import ModelError, shown
from oat.files import absolute, parse_json
from oat.functional.products import linear
from oat.models.root import Root
from oat.types import Trajectory

Activation = Literal["relu", "swish"]
PriorForm = Literal["mean", "map"]
_WIDE = 256
"""Number of features from which the first layer of several members is one product."""
_LARGE = 2**20
"""Number of a layer's outputs from which members are computed in groups, if there is no gradient."""
_GROUP = 512
"""Least number of outputs that a layer of a group has for each row; a group also has at least two members.
The outputs of a group stay in the processor's cache from layer to layer. Products of fewer outputs are
slower, and may round differently."""
_ACTIVATIONS = {"relu": F.relu, "swish": F.silu}


class Ensemble(Root):
    """M reward networks on D features. In a learner, `outputs` reads the batch's column `features_N`, (N, D),
    and computes "rewards", (N, M), and "prior", ().

    Args:
        features: D.
        members: M.
        hidden: number of outputs of each of the two hidden layers.
        prior_form: see `prior`.
        generator: draws the initial weights.
    """

    def __init__(
        self,
        *,
        features: int,
        members: int,
        hidden: int,
        activation: Activation,
        prior_form: PriorForm = "mean",
        generator: np.random.Generator,
    ):
        super().__init__()
        self.activation = _ACTIVATIONS[activation]
        self.prior_form = prior_form
        self.members = members
        self._stds: dict[str, float] = {}
        for layer, (inputs, outputs) in enumerate(
            ((features, hidden), (hidden, hidden), (hidden, 1)), start=1
        ):
            std = 1 / (2 * math.sqrt(inputs))
            self._stds |= {f"weight{layer}": std, f"bias{layer}": std}
            start = _truncated_normal(generator, (members, inputs, outputs), std)
            self.register_parameter(f"weight{layer}", torch.nn.Parameter(start))
            self.register_parameter(f"bias{layer}", torch.nn.Parameter(torch.zeros(members, 1, outputs)))
        for name, parameter in list(self.named_parameters()):
            self.register_buffer(f"anchor_{name}", parameter.detach().clone())

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give all parameters, and the anchor, these values."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
            getattr(self, f"anchor_{name}").copy_(tensors[name])

    @property
    def module(self) -> torch.nn.Module:
        return self

    @property
    def root(self) -> Root:
        return self

    @property
    def work_counter(self) -> None:
        return None

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.named_parameters())

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())

    def rewards(self, features_ND: torch.Tensor) -> torch.Tensor:
        """Compute the rewards (N, M) of features (N, D)."""
        parameters = dict(self.named_parameters())
        outputs = self.members * parameters["weight1"].shape[2]
        groups = min(self.members // 2, outputs // _GROUP)
        if torch.is_grad_enabled() or groups < 2 or len(features_ND) * outputs < _LARGE:
            return self._rewards(features_ND, parameters).T
        bounds = [self.members * number // groups for number in range(groups + 1)]
        parts = [
            self._rewards(features_ND, {name: value[first:end] for name, value in parameters.items()})
            for first, end in pairwise(bounds)
        ]
        return torch.cat(parts).T

    def _rewards(self, features_ND: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the rewards of the members that have these parameters, (M, N)."""
        x = self._first(features_ND, parameters["weight1"], parameters["bias1"])
        for layer in (2, 3):
            x = self.activation(x, inplace=not torch.is_grad_enabled())
            x = torch.matmul(x, parameters[f"weight{layer}"])
            x += parameters[f"bias{layer}"]
        return x.squeeze(-1)

    def _first(
        self, features_ND: torch.Tensor, weight_MDH: torch.Tensor, bias_M1H: torch.Tensor
    ) -> torch.Tensor:
        """Compute the first layer of members, (M, N, H). For wide features this is nearly all of the work,
        and one product of matrices is faster than one for each member."""
        if features_ND.shape[1] < _WIDE:
            return torch.matmul(features_ND, weight_MDH) + bias_M1H
        weight_OD = weight_MDH.transpose(1, 2).flatten(0, 1)
        made_NO = linear(features_ND, weight_OD, bias_M1H.flatten())
        return made_NO.unflatten(1, (len(weight_MDH), -1)).transpose(0, 1)

    def prior(self) -> torch.Tensor:
        """Return the distance of the parameters from their initial values, a scalar.

        With `prior_form` "mean" it is the squared difference, averaged over all parameters of all members.
        With "map" it is the negative logarithm of the prior density, up to a constant, of one member in the
        mean: half the sum over its parameters of the squared difference, in units of the layer's initial
        standard deviation (biases count in units of that of the weights).
        """
        moved = {
            name: (parameter - getattr(self, f"anchor_{name}")).square()
            for name, parameter in self.named_parameters()
        }
        if self.prior_form == "mean":
            return torch.cat([square.flatten() for square in moved.values()]).mean()
        sums = [square.sum() / (2 * self._stds[name] ** 2) for name, square in moved.items()]
        return torch.stack(sums).sum() / self.members

    def outputs(
        self, rows: Sequence[Trajectory], columns: Mapping[str, torch.Tensor], wants: set[str]
    ) -> dict[str, torch.Tensor]:
        available = {"rewards": lambda: self.rewards(columns["features_N"]), "prior": self.prior}
        assert wants <= set(available), f"an ensemble computes rewards and prior, not {wants}"
        found: dict[str, torch.Tensor] = self(lambda: {want: available[want]() for want in sorted(wants)})
        return found


def _truncated_normal(generator: np.random.Generator, shape: tuple[int, ...], std: float) -> torch.Tensor:
    """Draw normal numbers with mean 0 and standard deviation `std`. A number beyond two standard deviations
    is drawn again."""
    values = generator.normal(size=shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = generator.normal(size=int(outside.sum()))
    return torch.from_numpy((std * values).astype(np.float32))


WEIGHTS, DESCRIPTION = "ensemble.safetensors", "ensemble.json"


@dataclass(frozen=True)
class EnsembleDescription:
    """The facts about an exported ensemble.

    Attributes:
        members, hidden, activation: as in `EnsembleConfig`.
        features: the identity of the features (`oat.rollout.features.Features`).
        step: the step of the run after which it was exported.
        backbone: path or hub id of a backbone that is loaded for the features alone. None: the features are
            the run's policy's or reference's, or the export is from a release that did not write this.
    """

    members: int
    hidden: int
    activation: str
    features: dict[str, Any]
    step: int
    backbone: str | None = None


def save_ensemble(
    folder: Path, weights: Mapping[str, torch.Tensor], description: EnsembleDescription
) -> None:
    """Write the files of an ensemble.

    Args:
        weights: by the names of `Ensemble.tensors`.
    """
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    text = json.dumps(asdict(description), indent=1, sort_keys=True) + "\n"
    (folder / DESCRIPTION).write_text(text, encoding="utf-8")


def refuse_missing(path: str) -> None:
    """Refuse a path that is no directory with an exported ensemble, without reading its files.

    Raises:
        ModelError: a file is missing.
    """
    for name in (DESCRIPTION, WEIGHTS):
        if not (absolute(path) / name).is_file():
            raise _unreadable(path, f"there is no file {absolute(path) / name}")


def load_ensemble(path: str) -> tuple[dict[str, torch.Tensor], EnsembleDescription]:
    """Read an exported ensemble.

    Raises:
        ModelError: a file is missing or damaged, or a weight is not finite.
    """
    folder = absolute(path)
    refuse_missing(path)
    try:
        fields = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
        description = EnsembleDescription(**fields)
        if not isinstance(description.features, dict):
            raise ValueError(f"the identity of its features is {shown(description.features)}")
        values = load_file(folder / WEIGHTS)  # torch's own loader fails where `oat check` runs
        weights = {name: torch.from_numpy(value) for name, value in values.items()}
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise _unreadable(path, str(error)) from error
    for name, value in values.items():
        if bad := int((~np.isfinite(value)).sum()):
            raise ModelError(
                f"{path}: {bad} of {value.size} numbers of `{name}` in {WEIGHTS} are NaN or infinite, so its "
                "rewards would be; export an ensemble with finite weights"
            )
    return weights, description


def _unreadable(path: str, why: str) -> ModelError:
    return ModelError(
        f"{path} has no ensemble that can be read ({why}); give a directory that `oat export RUN OUT "
        "--ensemble` wrote"
    )
