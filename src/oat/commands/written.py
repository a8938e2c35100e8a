"""The model that an export writes, and the comparison of its files with it."""

import gc
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oat.answering.learned import Learned
from oat.errors import ExportError, described, plural, warn
from oat.hardware.memory import free_memory
from oat.learner.models import Critic
from oat.models.loading import save_module, without_bars
from oat.models.lora import adapter_tensors, merged, read_by_peft, save_adapter
from oat.models.nf4 import is_packed
from oat.models.read_back import Compared, Facts, compare, facts
from oat.models.sequence_classifier import classifier_of

_MOST_NAMES = 3


@dataclass
class Writing:
    """A model that is to be written.

    Attributes:
        facts: what is compared of it.
        save: function that writes it into a folder. It holds the model, and is dropped afterwards.
        read: function that reads it from a folder, as its users do: the module, and the tensors that were
            written; None: it is not read.
        bytes: bytes of its tensors on disk.
    """

    facts: Facts
    save: Callable[[Path], None] | None
    read: Callable[[Path], tuple[Any, Mapping[str, torch.Tensor]]] | None
    bytes: int

    def write_and_compare(self, folder: Path, place: Path) -> str:
        """Write the model, free it, read it back, and return a sentence on the comparison. Warn if
        transformers reads the model otherwise than the files hold it.

        Args:
            folder: the folder to write into.
            place: where the files will be, for messages.

        Raises:
            ExportError: the files do not hold the model, or transformers cannot read them.
            OSError: the files cannot be written.
        """
        assert self.save is not None, "a model is written once"
        self.save(folder)
        self.save = None
        gc.collect()
        files = sorted(folder.glob("*.safetensors"))
        read = None if self.read is None else partial(self.read, folder)
        try:
            found = compare(self.facts, files, read, free_memory("cpu"))
        except Exception as error:
            raise ExportError(
                f"{place}: transformers cannot read the model that was written ({described(error)}); nothing "
                "is exported. Try another version of transformers, or export an adapter"
            ) from error
        if found.lost:
            raise ExportError(
                f"{place}: the model does not read back as it was: {_listed(found.lost)}; nothing is "
                "exported. Check the disk, or try another version of transformers"
            )
        if found.misread:
            names = [f"{name} by {gap:.2g}" for name, gap in found.misread.items()]
            warn(
                f"{place}: the files hold what was trained, but transformers {_version()} reads "
                f"{_listed(names)} otherwise; a program that loads the model with it computes something else"
            )
        if found.is_other:
            warn(
                f"{place}: one pass of the model that was read back differs by {found.gap:.2g} from that of "
                "the model that was trained; a program that loads it computes something else"
            )
        return _sentence(found)


def of_model(found: Learned) -> Writing:
    """Prepare a model to be written whole, for transformers: a policy with its adapter merged, or a backbone
    with its score."""
    lm, renderer, tokenizer = merged(found.lm), found.renderer, found.tokenizer
    loader: Any = AutoModelForCausalLM
    if isinstance(found.model, Critic):
        loader = AutoModelForSequenceClassification
        module = classifier_of(lm, found.model.score.weight, tokenizer, renderer)
    else:
        module = lm.module
        module.generation_config.eos_token_id = sorted(renderer.stop_ids)
        if renderer.template is not None:
            tokenizer.chat_template = renderer.template
    noted = facts(module)

    def save(folder: Path) -> None:
        save_module(module, tokenizer, str(folder))

    return Writing(noted, save, partial(_read, loader), noted.bytes)


def of_adapter(found: Learned, base: str) -> Writing:
    """Prepare the adapter of a policy to be written alone, for PEFT.

    Args:
        base: path or hub id of the base model.
    """
    lm, tokenizer, template = found.lm, found.tokenizer, found.renderer.template
    if template is not None:
        tokenizer.chat_template = template
    lm.module.generation_config.eos_token_id = sorted(found.renderer.stop_ids)
    tensors, dtype = adapter_tensors(lm), next(lm.module.parameters()).dtype
    no_pass = "the base of the run is packed into four bits, and PEFT's is not" if is_packed(lm) else ""

    def save(folder: Path) -> None:
        save_adapter(lm, base, folder)
        tokenizer.save_pretrained(folder)

    def read(folder: Path) -> tuple[Any, Mapping[str, torch.Tensor]]:
        return read_by_peft(base, folder, dtype)

    noted = facts(lm.module, tensors, no_pass=no_pass)
    return Writing(noted, save, None if no_pass else read, sum(tensor.nbytes for tensor in tensors.values()))


def _read(loader: Any, folder: Path) -> tuple[Any, Mapping[str, torch.Tensor]]:
    with without_bars():
        module = loader.from_pretrained(str(folder))
    return module, module.state_dict()


def _sentence(found: Compared) -> str:
    of = (
        f"{found.count} of {plural(found.total, 'tensor')}"
        if found.count != found.total
        else (plural(found.total, "tensor"))
    )
    right = f", {len(found.misread)} of them in the files only" if found.misread else ""
    start = f"read back with transformers {_version()}: {of} equal by name, shape and checksum{right}"
    if found.gap is None:
        return f"{start}; pass not compared ({found.no_pass})"
    return f"{start}; " + (
        f"one pass differs by {found.gap:.2g}" if found.is_other else "one pass gives the same results"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _version() -> str:
    return importlib.metadata.version("transformers")
