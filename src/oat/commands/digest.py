"""`oat digest`: print hashes of a run. Two runs with equal hashes are equal."""

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oat.errors import ConfigError, DataError
from oat.metrics import repeatable
from oat.rundir.rows import sound_rows

if TYPE_CHECKING:
    import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    for name, value in digest_run(Path(arguments.run)).items():
        print(f"{name:<10} {value}")
    return 0


def digest_run(run_dir: Path) -> dict[str, str]:
    """Return SHA-256 digests of a run, by name. Times measured by a clock are left out, so equal runs have
    equal digests.

    Returns:
        Five digests. The first three are of the newest checkpoint:
        * "weights": of the main model's weights;
        * "optimiser": of all other tensors;
        * "state": of the values that are not tensors;
        * "metrics": of the rows of metrics;
        * "ledger": of the ledger.

    Raises:
        ConfigError: the directory holds no run, or its metrics or its ledger are missing.
        CheckpointError: the run has no usable checkpoint yet.
        DataError: a row of metrics is damaged, missing, repeated or out of order.
    """
    from oat.answering.learned import about_run, learned_model, policy_weights, weights_prefix
    from oat.ledger.reader import Reader
    from oat.loop import ROW
    from oat.rundir.holdings import HELD

    about_run(run_dir)
    for name in ("metrics.jsonl", "ledger.sqlite"):
        if not (run_dir / name).exists():
            raise ConfigError(f"{run_dir}: {name} is missing; give the directory of a whole run")
    step, weights, tensors, state = policy_weights(run_dir)
    others = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(weights_prefix(learned_model(tensors)))
    }
    state.pop("stop", None)  # it has measured hours
    state.pop(HELD, None)  # below, the ledger itself is hashed
    state.get("evaluation", {}).pop("seconds", None)
    state.get("learner", {}).pop("without_moments", None)  # the optimiser's digest says which there are
    rows = _all_rows(run_dir / "metrics.jsonl", 0 if step == 0 else step + (ROW not in state))
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        return {
            "weights": _tensor_digest(weights),
            "optimiser": _tensor_digest(others),
            "state": _text_digest([json.dumps({"step": step, **state}, sort_keys=True)]),
            "metrics": _text_digest(json.dumps(repeatable(row), sort_keys=True) for row in rows),
            "ledger": store.digest(),
        }


def _all_rows(file: Path, least: int) -> list[dict[str, Any]]:
    """Return all rows of a file of metrics.

    Raises:
        DataError: a row is damaged, or the file has fewer than `least` rows.
    """
    rows, damage = sound_rows(file.read_bytes())
    if not damage and len(rows) < least:
        damage = sound_rows(file.read_bytes(), least)[1]
    if damage:
        raise DataError(
            f"{file}: {damage}; no hash could say whether the run is equal to another. Put the file back as "
            "it was"
        )
    return [row for _, row in rows]


def _tensor_digest(tensors: "Mapping[str, torch.Tensor]") -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _text_digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
