"""`check_algorithm` passes every algorithm of `oat`, and finds the faults of others."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wrong_algorithms import (
    Centred,
    Detached,
    EndedAtOnce,
    Flat,
    HalfEnded,
    HalfUsable,
    Hopeful,
    Impatient,
    InColumns,
    InFeedback,
    InOutputs,
    Judged,
    LearnedColumn,
    Left,
    LeftBehind,
    LeftInMetrics,
    LeftOut,
    ListColumn,
    Loaded,
    Lonely,
    LongMetric,
    MissingRows,
    NoBatch,
    NoJSON,
    NotFinite,
    OddMetric,
    OfRows,
    OtherPlans,
    OtherSlot,
    Patient,
    PerSample,
    ReducedAlready,
    Reliant,
    Renaming,
    Saturated,
    Saved,
    Scalar,
    Scaled,
    Secretive,
    ShortColumn,
    Shuffling,
    Sworn,
    Unlearnt,
    Unnamed,
    Untrained,
    UsedUp,
    WantsMore,
    Whitened,
    WithoutAxis,
    WithoutConstant,
    WrongAxis,
)

from oat.algorithms import direct
from oat.algorithms.base import Forward, Objective, step_metrics
from oat.algorithms.direct import DPO
from oat.algorithms.ensemble import EnsembleLearning
from oat.algorithms.group import GRPO, GRPOConfig
from oat.errors import ConfigError, ContractError
from oat.plugins.registry import ALGORITHMS
from oat.testing import check_algorithm
from oat.types import Batch, Feedback, Plan

PROTOCOL = Path(__file__).parents[1] / "protocol"


@pytest.mark.sample("dpo", "grpo", "reward_model", "frozen", seconds=10.4)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ours_pass(name: str) -> None:
    """Every algorithm of `oat` passes with its defaults. `max_length` of dr_grpo has no default and is set
    here."""
    check_algorithm(ALGORITHMS[name])


@pytest.mark.sample("grpo-options3", seconds=1.8)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "dpo",
            {
                "label_smoothing": 0.1,
                "length_alpha": 0.1,
                "positive_lambda": 1.0,
                "sft_weight": 0.5,
                "epochs": 2,
                "minibatches": 2,
            },
        ),
        ("simpo", {"loss": "hinge"}),
        ("sft", {"samples": 4, "threshold": 0.0, "reduction": "prompt"}),
        ("grpo", {"reduction": "token", "kl_coef": 0.1, "epochs": 2, "minibatches": 3}),
        ("grpo", {"kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 24}),
        ("grpo", {"advantage": "vine"}),
    ],
)
def test_ours_pass_with_options(name: str, options: dict[str, Any]) -> None:
    check_algorithm(ALGORITHMS[name], **options)


class Forgetful(DPO):
    """Declares that it learns from older feedback, and does not."""

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        return super().prepare(replace(feedback, older=()), forward, generator)


class Inflated(DPO):
    """Counts older feedback as the step's own."""

    def prepare(self, feedback: Feedback, forward: Forward, generator: np.random.Generator) -> Batch:
        batch = super().prepare(feedback, forward, generator)
        return replace(
            batch, metrics=batch.metrics | step_metrics(replace(feedback, items=feedback.learned, older=()))
        )


def test_what_is_learned_again_is_looked_at() -> None:
    with pytest.raises(
        ContractError,
        match=r"made 12 rows with older answers and 12 without; take its rows from `feedback.learned`",
    ):
        check_algorithm(Forgetful)
    with pytest.raises(ContractError, match=r"with older answers prepare reports other .*response/tokens"):
        check_algorithm(Inflated)


def test_a_rule_for_the_end_of_an_update_that_is_no_bool() -> None:
    with pytest.raises(ContractError, match=r"`ends_passes` of grpo returned 0\.0; return True or False"):
        check_algorithm(HalfEnded)


def test_the_ensemble_passes() -> None:
    check_algorithm(EnsembleLearning, plan=Plan(8, {"sampler": 2}, 8), batch=4, steps=2)


def test_xpo_passes() -> None:
    check_algorithm("oat.algorithms.xpo:XPO")


@dataclass(frozen=True)
class WarmConfig(GRPOConfig):
    temperature: float = field(kw_only=True)


class Warm(GRPO):
    Config = WarmConfig


def test_a_setting_without_a_default_is_to_be_given() -> None:
    with pytest.raises(
        ContractError,
        match=(
            r"Warm: its Config has no default for temperature; give them: check_algorithm\(Warm, "
            r"temperature=...\)"
        ),
    ):
        check_algorithm(Warm)
    check_algorithm(Warm, temperature=1.0)


def test_a_state_that_comes_back_passes() -> None:
    check_algorithm(Loaded)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (ShortColumn, r"the column advantages_N has shape \(23,\); its axis N has 24 places"),
        (WithoutAxis, r"the column extra has no axis; end its name in _N"),
        (ListColumn, r"the column extra_N is list; make it a tensor"),
        (LearnedColumn, r"the column extra_N carries a gradient; .* detach it"),
        (
            LeftOut,
            (
                r"unit_of_N is \[ 0  2 .*; give one whole number a row, from 0 upward, none left out \(N is "
                r"24\)"
            ),
        ),
        (MissingRows, r"there are 23 rows, and unit_of_N has 24 numbers; give one a row"),
        (NoBatch, r"prepare returned NoneType; return a Batch, without rows where there is nothing to learn"),
        (
            Shuffling,
            (
                r"prepare made two different batches of the same feedback and seed; draw numbers from "
                r"`generator` only"
            ),
        ),
        (Secretive, r"prepare reports a name that no list knows: .*'reward/secret'.*user/"),
        (
            Unlearnt,
            r"prepare made no rows of 6 answered questions; check it with options under which it learns",
        ),
        (Sworn, r"learns is False, and prepare made 12 rows; make none, or leave `learns` out"),
        (HalfUsable, r"is_usable returned 1\.0 and then 1\.0 for one item; return a bool"),
        (UsedUp, r"is_usable changed the item that it was given; work on a copy"),
        (Saturated, r"is_usable says something else of an item after two steps"),
        (Impatient, r"ends_passes returned False, True and then False for the same values"),
        (Patient, r"ends_passes returned True, True and then False for the same values"),
        (Reliant, r"ends_passes raised KeyError: 'policy/entropy' \(.*wrong_algorithms.py:\d+\)"),
        (Renaming, r"an update raised TypeError: .*item assignment.*wrong_algorithms.py"),
        (EndedAtOnce, r"an update makes no optimiser step, since ends_passes returns True before the first"),
        (InFeedback, r"prepare changed the feedback that it was given; work on copies"),
        (Hopeful, r"prepare raised ValueError: max\(\).* \(.*wrong_algorithms.py:\d+\)"),
        (
            ReducedAlready,
            (
                r"the terms of loss/policy have shape \(\); per 'sequence' they are \(K,\) = \(\d+,\), not "
                r"reduced \(N = 24\)"
            ),
        ),
        (OfRows, r"the terms of loss/policy have shape \(24,\); per 'sequence' they are \(K,\)"),
        (Detached, r"no loss depends on what the models gave; compute it from `outputs`, without detach"),
        (
            Flat,
            (
                r"no gradient reaches the policy: no loss depends on its entropy, sampled, or each is flat "
                r"there"
            ),
        ),
        (
            Centred,
            (
                r"the gradient differs by \S+% when each unit has a forward pass of its own; .* leave terms "
                r"unreduced"
            ),
        ),
        (
            Whitened,
            (
                r"the gradient differs by \S+% when each unit has a forward pass of its own; .* columns in "
                r"`prepare`"
            ),
        ),
        (NotFinite, r"the loss is nan; look for log\(0\), 0/0"),
        (InColumns, r"the column advantages_N was changed in place; make a new tensor"),
        (InOutputs, r"entropy of the policy was changed in place; make a new tensor"),
        (
            WrongAxis,
            (
                r"losses raised RuntimeError: The size of tensor a \(24\) .* "
                r"\(.*wrong_algorithms.py:\d+\)"
            ),
        ),
        (PerSample, r"the loss loss/policy is per 'sample'; it is one of token, sequence"),
        (WithoutConstant, r'is per "constant"; set Loss.constant, the length to divide by'),
        (Scalar, r"losses returned tensor\(.*; return a dict of Loss by metric name"),
        (Unnamed, r"losses reports a name that no list knows: .*'loss/mine'"),
        (
            WantsMore,
            (
                r"wants raised AssertionError: a language model gives raw, sampled, entropy and states, "
                r"not \{'value'\}"
            ),
        ),
        (
            LongMetric,
            (
                r"the metric user/ratio has shape \(\d+,\); give one value for each of its axis N, at "
                r"most 24 "
                r"here"
            ),
        ),
        (OddMetric, r"the metric user/ratio is joined by 'mean'; it is a mean over K, N or U, or max, min"),
        (
            OtherPlans,
            (
                r"plan\(0\) is Plan\(prompts=1,.* and then Plan\(prompts=2,.*; return a Plan, a function of "
                r"the step"
            ),
        ),
        (
            OtherSlot,
            r"plan\(0\) samples from \{'reference'\}, and requires.slots is \{'sampler'\}; name them there",
        ),
        (Lonely, r"plan\(0\) is Plan\(.*; a comparison needs 2 samples a prompt, or more"),
        (
            Untrained,
            r"wants \{'policy'\}, and requires.models is \{'reference'\}; name every trained model there",
        ),
        (Judged, r"requires.models names judge; a run has policy, reference, critic, ensemble, reward"),
        (
            Scaled,
            (
                r"after load_state it makes other batches or losses than the one whose state that was; put "
                r"all that it keeps"
            ),
        ),
        (Left, r"losses reads self.largest, which is not there before `prepare`; .* a column of the batch"),
        (
            LeftBehind,
            r"loss/total, optim/grad_norm: losses or metrics read what `prepare` left .* a column",
        ),
        (LeftInMetrics, r"user/largest: losses or metrics read what `prepare` left in the objective"),
        (Saved, r"load_state does not bring back the state: \['largest'\] was saved"),
        (
            NoJSON,
            r"state holds what JSON cannot \(.*set.*\); keep tensors, numbers, strings, lists and dicts",
        ),
    ],
)
def test_what_is_wrong_is_said(algorithm: type, said: str) -> None:
    with pytest.raises(ContractError, match=f"^{algorithm.__name__}: .*{said}"):
        check_algorithm(algorithm)


def test_what_is_no_algorithm_is_said() -> None:
    class Nearly(Objective): ...

    for cls in (Nearly, dict):
        with pytest.raises(
            ContractError,
            match=(
                r"is no algorithm; subclass Objective of oat/algorithms/base.py, with a dataclass "
                r"`Config` in "
                r"it"
            ),
        ):
            check_algorithm(cls)
    with pytest.raises(ConfigError, match="a pair needs at least 2"):
        check_algorithm(DPO, samples=1)
    with pytest.raises(ContractError, match=r"DPO: Config raised TypeError: .*'temperature'"):
        check_algorithm(DPO, temperature=1.0)


def test_a_loss_written_before_its_base_class_was_renamed() -> None:
    class Exponential(direct.Tied):
        name = "exponential"
        Config = direct.TiedConfig

        def terms(self, margin_U: torch.Tensor) -> torch.Tensor:
            return (-self.config.beta * margin_U).exp()

    check_algorithm(Exponential, beta=0.5)
