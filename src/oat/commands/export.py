"""`oat export` and `oat digest`: write a run's model in the format of transformers, and compute digests with
which two runs can be compared."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from oat.answering.learned import (
    Learned,
    about_run,
    learned_model,
    load_learned,
    policy_weights,
    weights_prefix,
)
from oat.commands.export_ensemble import FILES as ENSEMBLE_FILES
from oat.commands.export_mark import Kind, exported, refuse_foreign
from oat.commands.written import of_adapter, of_model
from oat.errors import ConfigError, DataError, ExportError
from oat.files import saying_what_is_free, seen
from oat.ledger.reader import Reader
from oat.loop import ROW
from oat.metrics import repeatable
from oat.models.sequence_classifier import check_backbone
from oat.reports.model_card import model_card
from oat.resolve.about import About
from oat.rundir.holdings import HELD
from oat.rundir.rows import sound_rows

_KEYS = ("config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_model.bin")
_BESIDE = (
    "README.md",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Further files of a model: the model card, and the files in which transformers stores a tokenizer and the
settings of generation."""


_KIND = Kind((*_KEYS, *_WEIGHTS, *_BESIDE), _KEYS, lambda name: name not in ENSEMBLE_FILES)


@dataclass(frozen=True)
class Exported:
    """An export.

    Attributes:
        step: the checkpoint's step.
        read_back: a sentence on the comparison of the files with the model.
    """

    step: int
    read_back: str


def export_run(
    run_dir: Path,
    out: Path,
    which: int | Literal["best"] | None = None,
    *,
    adapter: bool = False,
    critic: bool = False,
) -> Exported:
    """Write the model of a run's checkpoint, with a model card, into the directory `out`.

    `AutoModelForCausalLM` loads an exported policy, `AutoModelForSequenceClassification` a reward model or
    critic. If `out` has an export already, the new one replaces it (`oat.commands.swap`). Before the files
    get to `out`, they are read back and compared (`oat.models.read_back`).

    Args:
        which: the checkpoint's step, "best" or None, as for `policy_weights`.
        adapter: True: write only the LoRA adapter, in PEFT's format; False: merge the adapter into the model.
        critic: True: write the critic; False: write the run's main model, the policy or the reward model.

    Raises:
        ConfigError: `run_dir` holds no run; `adapter` is set for a run without an adapter, for a reward model
            or for a critic; `critic` is set for a run without a critic; or `out` is a file, is a model that
            the run started from, has files of a model that no export wrote, or cannot be written to.
        CheckpointError: the run has no usable checkpoint yet; the checkpoint `which` is missing or damaged;
            or the frozen weights are not those beside which the adapter was trained.
        ModelError, TemplateError: the model that the run started from cannot be loaded, or its files have
            changed; or the critic's backbone has no sequence-classification form.
        ExportError: the model cannot be written, or the files do not hold it.
    """
    about = about_run(run_dir)
    place = seen(out).resolve()
    _refuse_place(out, about)
    refuse_foreign(place, _KIND)
    found = _loaded(run_dir, about, which, adapter=adapter, critic=critic)
    step = found.step
    card = model_card(run_dir, about, step, out, what="adapter" if adapter else found.name)
    writing = of_adapter(found, about.model) if adapter else of_model(found)
    del found  # so that reading back takes no second model's memory
    try:
        with saying_what_is_free(place), exported(place, _KIND) as new:
            read_back = writing.write_and_compare(new, place)
            card += f"\n## Read back\n\nThis model was {read_back}.\n"
            (new / "README.md").write_text(card, encoding="utf-8")
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(
            f"{place}: the model of step {step} could not be written ({error.strerror}); it needs "
            f"{writing.bytes:,} bytes, beside a model that it replaces. What stood there is as it was, and "
            "no part of the new one is left: make room, or give another directory, and run the same command "
            "again"
        ) from error
    return Exported(step, read_back)


def _loaded(
    run_dir: Path, about: About, which: int | Literal["best"] | None, *, adapter: bool, critic: bool
) -> Learned:
    """Load the model that is to be exported. The arguments are those of `export_run`."""
    if adapter and not about.has_adapter:
        raise ConfigError(f"{run_dir}: trained every weight, so there is no adapter; leave --adapter out")
    found = load_learned(run_dir, which, critic=critic)
    if adapter and found.name != "policy":
        what = "--critic names the critic" if critic else "trained a reward model"
        raise ConfigError(
            f"{run_dir}: {what}, whose adapter is useless without its score; leave --adapter out"
        )
    if critic:
        check_backbone(found.lm)
    return found


def _refuse_place(out: Path, about: About) -> None:
    is_file = out.exists() and not out.is_dir()
    starts = {Path(start).resolve() for start in (about.model, about.critic) if start}
    if is_file or (out.exists() and out.resolve() in starts):
        raise ConfigError(
            f"{out} is {'a file' if is_file else 'the model that the run started from'}; give a new directory"
        )


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


def _tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
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
