"""`oat export`: write the model that a run trained as a directory that transformers loads, or the ensemble of
the run's explorer. Another run can start from such an ensemble (`explorer.ensemble.start`), and it can choose
among responses (`oat generate --best-of`).

The libraries that it needs take seconds to load, so they are imported within functions.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oat.commands.export_mark import Kind, exported, refuse_foreign
from oat.commands.generation_options import checkpoint_of
from oat.commands.interruptible import say_loading
from oat.errors import ConfigError, ExportError, ModelError, printable
from oat.explore.settings import WITHIN_RUN
from oat.files import absolute, saying_what_is_free

if TYPE_CHECKING:
    import torch

    from oat.answering.learned import Learned
    from oat.models.ensemble import EnsembleDescription
    from oat.resolve.about import RunSummary

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

_ENSEMBLE = ("ensemble.safetensors", "ensemble.json")
"""The files of an ensemble (`oat.models.ensemble`)."""
_KIND = Kind((*_KEYS, *_WEIGHTS, *_BESIDE), _KEYS, lambda name: name not in _ENSEMBLE)
_ENSEMBLE_KIND = Kind(_ENSEMBLE, _ENSEMBLE[1:], _ENSEMBLE.__contains__)


@dataclass(frozen=True)
class Exported:
    """An export.

    Attributes:
        step: the checkpoint's step.
        read_back: a sentence on the comparison of the files with the model.
    """

    step: int
    read_back: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument(
        "--step",
        metavar="N|best",
        help="the checkpoint; by default the newest. best: the one with the highest checkpoint.best_metric",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the LoRA adapter of the run, for PEFT, instead of the merged model",
    )
    parser.add_argument(
        "--critic",
        action="store_true",
        help="write the critic, as a sequence-classification model, instead of the policy",
    )
    parser.add_argument(
        "--ensemble",
        action="store_true",
        help="write the ensemble of the run's explorer, for explorer.ensemble.start, instead of the policy",
    )


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    out, which = Path(arguments.out), checkpoint_of(arguments.step)
    if arguments.ensemble and (arguments.adapter or arguments.critic):
        raise ConfigError("--ensemble writes neither an adapter nor a critic; give one of the three")
    say_loading(arguments.run)
    if arguments.ensemble:
        step = export_ensemble(Path(arguments.run), out, which)
        print(f"oat export: the ensemble after {step} steps is in {arguments.out}")
        return 0
    replaced = any((out / name).exists() for name in ("config.json", "adapter_config.json"))
    made = export_run(Path(arguments.run), out, which, adapter=arguments.adapter, critic=arguments.critic)
    print(
        f"oat export: the {'critic' if arguments.critic else 'model'} after {made.step} steps is in "
        f"{arguments.out}{', in place of the model that was there' if replaced else ''}"
    )
    print(printable(f"oat export: {made.read_back}"))
    return 0


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
    from oat.answering.learned import about_run
    from oat.commands.written import of_adapter, of_model
    from oat.reports.model_card import model_card

    about = about_run(run_dir)
    place = absolute(out).resolve()
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
    run_dir: Path, about: "RunSummary", which: int | Literal["best"] | None, *, adapter: bool, critic: bool
) -> "Learned":
    """Load the model that is to be exported. The arguments are those of `export_run`."""
    from oat.answering.learned import load_learned
    from oat.models.sequence_classifier import check_backbone

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


def _refuse_place(out: Path, about: "RunSummary") -> None:
    is_file = out.exists() and not out.is_dir()
    starts = {Path(start).resolve() for start in (about.model, about.critic) if start}
    if is_file or (out.exists() and out.resolve() in starts):
        raise ConfigError(
            f"{out} is {'a file' if is_file else 'the model that the run started from'}; give a new directory"
        )


def export_ensemble(run_dir: Path, out: Path, which: int | Literal["best"] | None = None) -> int:
    """Write the ensemble of a run's checkpoint into the directory `out`. Return the checkpoint's step.

    Args:
        which: the checkpoint's step, "best" or None, as for `policy_weights`.

    Raises:
        ConfigError: `run_dir` holds no run, the run has no ensemble that learned, or `out` is a file or has
            files of an ensemble that no export wrote.
        CheckpointError: see `policy_weights`.
        ExportError: the files cannot be written, or do not read back as they were written.
    """
    from oat.answering.learned import ensemble_features, ensemble_weights, policy_weights, run_config
    from oat.models.ensemble import EnsembleDescription, save_ensemble

    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; give a directory")
    place = absolute(out).resolve()
    refuse_foreign(place, _ENSEMBLE_KIND)
    step, _, tensors, state = policy_weights(run_dir, which)
    weights = ensemble_weights(tensors)
    if not weights:
        raise ConfigError(
            f"{run_dir}: has no ensemble that learned, so there is none to export; give a run with an "
            "explorer that has one"
        )
    members, _, hidden = weights["weight1"].shape
    options = run_config(run_dir).explorer.options
    backbone = options.get("features", {}).get("backbone")
    description = EnsembleDescription(
        members,
        hidden,
        options["ensemble"]["activation"],
        ensemble_features(state),
        step,
        None if backbone in WITHIN_RUN else backbone,
    )
    try:
        with saying_what_is_free(place), exported(place, _ENSEMBLE_KIND) as new:
            save_ensemble(new, weights, description)
            _refuse_other(str(new), weights, description)
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(
            f"{place}: the ensemble of step {step} could not be written ({error.strerror}); make room, or "
            "give another directory, and run the same command again"
        ) from error
    return step


def _refuse_other(folder: str, weights: "Mapping[str, torch.Tensor]", told: "EnsembleDescription") -> None:
    """Read an ensemble back, and refuse it if it is not the one that was to be written.

    Raises:
        ExportError: it is another one.
    """
    import torch

    from oat.models.ensemble import load_ensemble

    try:
        found, description = load_ensemble(folder)
    except ModelError as error:
        raise ExportError(f"the ensemble does not read back ({error}); nothing is exported") from error
    wrong = sorted(
        name
        for name in {**weights, **found}
        if name not in found or name not in weights or not torch.equal(found[name], weights[name].cpu())
    )
    if wrong or json.dumps(asdict(description)) != json.dumps(asdict(told)):
        what = ", ".join(wrong) or _ENSEMBLE[1]
        raise ExportError(
            f"the ensemble does not read back as it was written ({what}); nothing is exported. Check the "
            "disk, and run the same command again"
        )
