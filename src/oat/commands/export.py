"""What a run leaves behind: a model others can load, and a digest that proves two runs equal."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from oat.build.fingerprints import inputs_of_models, inputs_of_template, recorded, refuse_other_models
from oat.build.run_inputs import make_renderer
from oat.commands.swap import swapped_in
from oat.config.load import blaming, stored_config
from oat.config.settings import Config
from oat.errors import CheckpointError, ConfigError, DataError, ExportError
from oat.files import saying_what_is_free, seen
from oat.learner.models import RewardModel, frozen_checksum
from oat.ledger.reader import Reader
from oat.loop import ROW, Run
from oat.metrics import repeatable
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer, save_lm
from oat.models.lora import load_model, merged, save_adapter
from oat.models.sequence_classifier import save_classifier
from oat.reports.model_card import model_card
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.holdings import HELD
from oat.rundir.reading import sound_rows
from oat.text.renderer import Renderer

_KEYS = ("config.json", "adapter_config.json")
_WEIGHTS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_BESIDE = (
    *(
        "README.md",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""What stands beside a model, and goes with it when another one comes: the card, and what transformers writes
of tokenizers and of generation."""


@dataclass(frozen=True, eq=False)
class Learned:
    """The model that a run is about, as a checkpoint has it.

    Attributes:
        name: "policy" or "reward".
        step: of the checkpoint.
        lm: with its adapter, if it has one, beside the other weights.
        model: the same, or the reward model on it.
    """

    name: str
    step: int
    lm: CausalLM
    model: CausalLM | RewardModel
    tokenizer: Any
    renderer: Renderer


def run_config(run_dir: Path) -> Config:
    """The resolved configuration of a run.

    Raises:
        ConfigError: the directory holds no run.
    """
    file = run_dir / "config.yaml"
    if not file.exists():
        raise ConfigError(
            f"{run_dir}: holds no run (config.yaml is missing); give the directory that `oat train` named"
        )
    return stored_config(run_dir)[0]


def policy_weights(
    run_dir: Path, which: int | Literal["best"] | None = None
) -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """A checkpoint's step, the policy's weights by parameter name (or those of a reward model), all its
    tensors, and its state.

    Args:
        which: of a step, or the one whose row had the highest `checkpoint.best_metric`; None: the newest.

    Raises:
        CheckpointError: the run has no usable checkpoint yet, or not this one.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", **asdict(run_config(run_dir).checkpoint))
    if not checkpoints.steps:
        raise CheckpointError(
            f"{run_dir}: has no checkpoint yet; let `oat train` reach its first one (checkpoint.every steps)"
        )
    loaded = (
        checkpoints.load()
        if which is None
        else checkpoints.load_step(checkpoints.best() if which == "best" else which)
    )
    assert loaded is not None, "a run with checkpoints loads one or says why not"
    step, tensors, state = loaded
    prefix = _prefix(_learned(tensors))
    return (
        step,
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
        tensors,
        state,
    )


def _learned(tensors: Collection[str]) -> str:
    """The model that the run of these tensors is about."""
    return "policy" if any(name.startswith(_prefix("policy")) for name in tensors) else "reward"


def _prefix(model: str) -> str:
    return f"learner/{model}/weights/"


def take_up_policy(run: Run, run_dir: Path) -> int:
    """Give a run's boxes the policy of the newest checkpoint of another run of the same model, and its slots
    the weights that they had; or the reward model, where that is what it has learned. Returns the
    checkpoint's step.

    Raises:
        ConfigError: it has learned a reward model, and these boxes have none.
        CheckpointError: there is no usable checkpoint yet, or the model is not the one that was trained.
    """
    step, weights, tensors, state = policy_weights(run_dir)
    learner, name = run.parts["learner"], _learned(tensors)
    own, frozen = learner.state, state["learner"]["frozen"][name]
    if name not in own["frozen"]:
        raise ConfigError(
            f"{run_dir}: trained a reward model, and its policy is the model that it started from; give "
            "that model"
        )
    if own["frozen"][name] != frozen:
        raise CheckpointError(
            f"the model is not the one that the adapter of {run_dir} was trained beside; put its files "
            "back as they were"
        )
    if "following" in own:  # an evaluation may be of the reference
        learner.load_state(
            {
                **state["learner"],
                **{name.removeprefix("learner/"): tensor for name, tensor in tensors.items()},
            }
        )
    else:
        run.learner.load_weights(name, weights)
    kept = {
        name.removeprefix("weights/"): tensor
        for name, tensor in tensors.items()
        if name.startswith("weights/")
    }
    run.parts["weights"].load_state({"version": step, **kept})
    run.weights.restore(run.learner)
    return step


def load_learned(
    run_dir: Path,
    config: Config,
    which: int | Literal["best"] | None = None,
    device: torch.device | str = "cpu",
) -> Learned:
    """The model of a run's checkpoint, with its weights.

    Args:
        config: of the run.
        which: as `policy_weights`.

    Raises:
        CheckpointError: the run has no usable checkpoint yet, or not this one.
        ModelError, TemplateError: what the run started from cannot be loaded, or is not what it was.
    """
    step, weights, tensors, state = policy_weights(run_dir, which)
    name = _learned(tensors)
    lm, tokenizer = load_model(config.model, device=device), load_tokenizer(config.model.path)
    now = {**inputs_of_models(config, lm, tokenizer), **inputs_of_template(config, tokenizer)}
    refuse_other_models(config, recorded(run_dir), now, partial(blaming, config, {(): str(run_dir)}))
    renderer = make_renderer(config, lm, tokenizer)
    model = lm if name == "policy" else RewardModel(lm, np.random.default_rng(), trailing=renderer.trailing)
    if frozen_checksum(model.module, model.trainable().values()) != state["learner"]["frozen"][name]:
        raise CheckpointError(
            f"{config.model.path} is not the model that the adapter of {run_dir} was trained beside; put "
            "its files back as they were"
        )
    with torch.no_grad():
        for tensor, parameter in model.trainable().items():
            parameter.copy_(weights[tensor])
    return Learned(name, step, lm, model, tokenizer, renderer)


def export_run(
    run_dir: Path, out: Path, which: int | Literal["best"] | None = None, *, adapter: bool = False
) -> int:
    """Write the model of a run's checkpoint as a directory that `AutoModelForCausalLM.from_pretrained` loads,
    or that of a reward model `AutoModelForSequenceClassification`, with a model card; returns its step. A
    model that stands there is replaced in one step (`oat.commands.swap`).

    Args:
        which: as `policy_weights`.
        adapter: of a run with LoRA the adapter alone, as PEFT has it; otherwise it is merged into the model.

    Raises:
        ConfigError: the directory holds no run, or none with an adapter, or `out` is a file or the model that
            the run started from, or nothing can be made there.
        CheckpointError: the run has no usable checkpoint yet, or not this one.
        ExportError: the model cannot be written.
    """
    config = run_config(run_dir)
    is_file = out.exists() and not out.is_dir()
    if is_file or (out.exists() and out.resolve() == Path(config.model.path).resolve()):
        raise ConfigError(
            f"{out} is {'a file' if is_file else 'the model that the run started from'}; give a new directory"
        )
    if adapter and config.model.lora is None:
        raise ConfigError(f"{run_dir}: trained every weight, so there is no adapter; leave --adapter out")
    found = load_learned(run_dir, config, which)
    if adapter and found.name == "reward":
        raise ConfigError(
            f"{run_dir}: trained a reward model, whose adapter is of no use without its score; leave "
            "--adapter out"
        )
    model = found.model
    tokenizer = found.tokenizer
    renderer = found.renderer
    lm = found.lm if adapter else merged(found.lm)
    place, card = (
        seen(out).resolve(),
        model_card(run_dir, config, found.step, out, is_adapter=adapter, is_reward=found.name == "reward"),
    )
    try:
        with saying_what_is_free(place), swapped_in(place, partial(_of_a_model, place), _KEYS) as new:
            if isinstance(model, RewardModel):
                save_classifier(lm, model.score.weight, tokenizer, renderer, new)
            else:
                _save_policy(lm, tokenizer, renderer, config.model.path, new, adapter=adapter)
            (new / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        needed = sum(tensor.nbytes for tensor in (lm.trainable() if adapter else lm.tensors()).values())
        raise ExportError(
            f"{place}: the model of step {found.step} could not be written ({error.strerror}); it needs "
            f"{needed:,} bytes, beside a model that it "
            "replaces. What stood there is as it was, and no part of the new one is left: make room, or "
            "give another directory, and run the same "
            "command again"
        ) from error
    return found.step


def _of_a_model(folder: Path) -> set[str]:
    """The files in a folder that are of a model, or of what an export that was killed has left of one; none
    where no part of a model is."""
    if not folder.is_dir():
        return set()
    found = {
        pattern: {file.name for file in folder.glob(pattern)} for pattern in (*_KEYS, *_WEIGHTS, *_BESIDE)
    }
    return set().union(*found.values()) if any(found[pattern] for pattern in (*_KEYS, *_WEIGHTS)) else set()


def _save_policy(
    lm: CausalLM, tokenizer: Any, renderer: Renderer, base: str, out: Path, *, adapter: bool
) -> None:
    if renderer.template is not None:
        tokenizer.chat_template = renderer.template
    lm.module.generation_config.eos_token_id = sorted(renderer.stop_ids)
    if adapter:
        save_adapter(lm, base, out)
        tokenizer.save_pretrained(out)
    else:
        save_lm(lm, tokenizer, str(out))


def digest_run(run_dir: Path) -> dict[str, str]:
    """SHA-256 of a run in canonical form: weights, optimiser and every other state, metrics and ledger,
    without clock times.

    Two runs with the same digest are the same run.

    Raises:
        ConfigError: the directory holds no run, or not all of it.
        CheckpointError: the run has no usable checkpoint yet.
        DataError: a row of metrics up to the checkpoint is damaged or missing.
    """
    run_config(run_dir)
    for name in ("metrics.jsonl", "ledger.sqlite"):
        if not (run_dir / name).exists():
            raise ConfigError(f"{run_dir}: {name} is missing; give the directory of a whole run")
    step, weights, tensors, state = policy_weights(run_dir)
    others = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(_prefix(_learned(tensors)))
    }
    state.pop("stop", None)  # hours
    state.pop(HELD, None)  # the ledger itself is below
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
    """The rows of metrics, so many or more, and nothing else."""
    rows, damage = sound_rows(file.read_bytes())
    if not damage and len(rows) < least:
        damage = sound_rows(file.read_bytes(), least)[1]
    if damage:
        raise DataError(
            f"{file}: {damage}; no hash could say whether the run is equal to another. Put the file back "
            "as it was"
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
