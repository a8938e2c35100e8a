"""The losses of `oat` equal TRL's where TRL has the same loss: TRL's own lines are run on our numbers.

The lines are taken from the parsed source of TRL's trainers. So TRL's code is compared, and it need not be
imported.
"""

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import NO_TRL
from torch.nn import functional as F

from oat.functional import contrast, preference

ROOT = Path(__file__).parents[2]
BETA = 0.3
SMOOTHING = 0.1
TAU = 0.5
CHOSEN, REJECTED, CHOSEN_REFERENCE, REJECTED_REFERENCE = (
    -20 * torch.rand(4, 7, generator=torch.Generator().manual_seed(0)) - 0.1
)
RATIOS = CHOSEN - CHOSEN_REFERENCE, REJECTED - REJECTED_REFERENCE
MARGIN = preference.dpo_margin(CHOSEN, REJECTED, CHOSEN_REFERENCE, REJECTED_REFERENCE)


def source(name: str) -> ast.Module:
    """Return the parsed source of a file of TRL, from this environment or from the one that `make bench`
    makes for TRL. The file is not imported."""
    found = importlib.util.find_spec("trl")
    places = (
        [*(found.submodule_search_locations or [])]
        if found
        else [*ROOT.glob(".venv-peers/trl/lib/python*/site-packages/trl")]
    )
    if not places:
        pytest.skip(NO_TRL)
    return ast.parse((Path(places[0]) / name).read_text(encoding="utf-8"))


def run(nodes: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    """Run statements of TRL's, and return the values of all names."""
    names = {"torch": torch, "F": F, **names}
    exec(compile(ast.Module(nodes, type_ignores=[]), "trl", "exec"), names)
    return names


def of_dpo_trainer(loss: str) -> torch.Tensor:
    """Return the loss that DPOTrainer's chain of `if loss_type == ...` computes from our numbers."""
    tree = source("trainer/dpo_trainer.py")
    chains = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "loss_type == 'sigmoid'"
    ]
    settings = SimpleNamespace(beta=BETA, label_smoothing=SMOOTHING, args=SimpleNamespace(discopop_tau=TAU))
    numbers = {
        "chosen_logps": CHOSEN,
        "rejected_logps": REJECTED,
        "ref_chosen_logps": CHOSEN_REFERENCE,
        "ref_rejected_logps": REJECTED_REFERENCE,
    }
    scores = {
        "chosen_logratios": RATIOS[0],
        "rejected_logratios": RATIOS[1],
        "delta_score": MARGIN,
        "device": "cpu",
    }
    found: torch.Tensor = run([chains[0]], {"self": settings, "loss_type": loss, **numbers, **scores})[
        "per_sequence_loss"
    ]
    return found


def aot(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the terms of `aot` in the order of the ranks."""
    terms = preference.dpo_loss(
        first - second[contrast.rank_matches(first, second)], beta=BETA, label_smoothing=SMOOTHING
    )
    return terms[first.argsort()]


OURS = {
    "sigmoid": lambda: preference.dpo_loss(MARGIN, beta=BETA),
    "hinge": lambda: preference.hinge_loss(MARGIN, beta=BETA),
    "robust": lambda: preference.robust_dpo_loss(MARGIN, beta=BETA, label_smoothing=SMOOTHING),
    "exo_pair": lambda: contrast.exo_loss(MARGIN, beta=BETA, label_smoothing=SMOOTHING),
    "nca_pair": lambda: contrast.nca_loss(*RATIOS, beta=BETA),
    "apo_zero": lambda: contrast.apo_zero_loss(*RATIOS, beta=BETA),
    "apo_down": lambda: contrast.apo_down_loss(*RATIOS, beta=BETA),
    "sppo_hard": lambda: contrast.sppo_hard_loss(*RATIOS, beta=BETA),
    "discopop": lambda: contrast.discopop_loss(MARGIN, beta=BETA, tau=TAU),
    "aot": lambda: aot(CHOSEN - REJECTED, CHOSEN_REFERENCE - REJECTED_REFERENCE),
    "aot_unpaired": lambda: aot(*RATIOS),
}


@pytest.mark.parametrize("name", OURS)
def test_losses_of_the_dpo_trainer(name: str) -> None:
    torch.testing.assert_close(OURS[name](), of_dpo_trainer(name))


@pytest.mark.parametrize("is_desirable", [True, False])
def test_loss_of_the_kto_trainer(is_desirable: bool) -> None:
    tree = source("trainer/kto_trainer.py")
    branches = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "self.loss_type == 'kto'"
    ]
    name, ratios = ("chosen", RATIOS[0]) if is_desirable else ("rejected", RATIOS[1])
    (branch,) = (node for node in branches if f"{name}_losses" in ast.unparse(node.body[0]))
    settings = SimpleNamespace(beta=BETA, loss_type="kto")
    found = run([branch], {"self": settings, f"{name}_logratios": ratios, "kl": torch.tensor(1.5)})[
        f"{name}_losses"
    ]
    ours = contrast.kto_loss(
        ratios, torch.full(ratios.shape, is_desirable), torch.full_like(ratios, 1.5), beta=BETA
    )
    torch.testing.assert_close(ours, found)


def method(name: str, file: str) -> Any:
    """Return a method, run without its class, together with the functions of its file."""
    tree = source(file)
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    beside = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return run([*beside, found], {"math": math})[name]


def test_loss_of_the_orpo_trainer() -> None:
    """The ORPO term equals TRL's with the opposite sign, since TRL maximises it. The weight of the term is
    the caller's."""
    settings = SimpleNamespace(beta=1.0, accelerator=SimpleNamespace(device="cpu"))
    found = method("odds_ratio_loss", "experimental/orpo/orpo_trainer.py")(
        settings, CHOSEN / 20, REJECTED / 20
    )[0]
    torch.testing.assert_close(contrast.orpo_loss(CHOSEN / 20, REJECTED / 20), -found)


def test_loss_of_the_cpo_trainer() -> None:
    settings = SimpleNamespace(
        alpha=0.0,
        beta=BETA,
        label_smoothing=0.0,
        loss_type="sigmoid",
        accelerator=SimpleNamespace(device="cpu"),
    )
    found = method("cpo_loss", "experimental/cpo/cpo_trainer.py")(settings, CHOSEN, REJECTED)[0]
    torch.testing.assert_close(contrast.cpo_loss(CHOSEN, REJECTED, beta=BETA), found)
