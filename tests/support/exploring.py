"""Small runs with explorers, by what is special about them: the algorithm and the settings."""

from typing import Any


def _sea(**features: Any) -> dict[str, Any]:
    return {
        "explorer": {
            "name": "ensemble",
            "samples": 5,
            "ensemble": {"members": 3, "hidden": 8},
            "model_labels": {"share": 0.5, "burn_in": 1, "audit": 0.5},
            "features": features,
        },
        "evaluation.best_of": 3,
    }


EXPLORING: dict[str, tuple[str, dict[str, Any]]] = {
    "policy": ("dpo", _sea(backbone="policy", layer="all")),
    "refreshed": ("dpo", _sea(backbone="policy", refresh_every=2)),
    "reference": ("dpo", _sea(backbone="reference", pooling="last")),
    "apl": ("dpo", {"explorer": {"name": "apl", "samples": 4, "oversample": 2}}),
    "xpo": ("xpo", {"algorithm.samples": 2}),
}
