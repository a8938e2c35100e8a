"""A model that answers outside of any training: the policy of a run's checkpoint, or a model as it lies
there, with its tokenizer and template.

A checkpoint is loaded as `oat export` loads it, with the same refusals, and the engine samples, so people
hear what training and evaluation sample. A chat renders the whole conversation anew at each turn, as the
model is used elsewhere, though a template may then drop reasoning that the model sampled; episodes of
training keep their ids. Each answer is one pass over the whole conversation, since the engine's KV cache ends
with a request.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from oat.build.engine import make_engine, plain_sampling
from oat.build.learned import load_learned, run_config
from oat.build.models import check_tokenizer, device_of
from oat.build.parts import settings_of
from oat.build.run_inputs import make_renderer
from oat.config.settings import Config, ModelConfig, SamplingConfig
from oat.engines.torch import TorchEngine
from oat.engines.torch_config import TorchEngineConfig
from oat.errors import ConfigError, OatWarning
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer
from oat.models.lora import described_adapter, is_adapter_directory, load_model
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Completion, Message, Request, Sampling

SLOT = "policy"
NO_TEMPLATE = "none"


@dataclass(frozen=True)
class Manner:
    """How a model is to answer. None: as its run samples in training; of a model without a run, as
    `SamplingConfig` and its tokenizer have it.

    Attributes:
        step: of the checkpoint, or "best"; None: the newest.
        template: as `render.template`, or "none": a prompt is a text that the model continues.
        system: put first, as a system message, in conversations that have none.
        profile: where it computes, as `compute.profile`; None: as the run, where its device is here; of a
        model without a run the CPU.
        dtype: precision of a model without a run; a run's is its own.
    """

    seed: int = 0
    step: int | Literal["best"] | None = None
    template: str | None = None
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    profile: Literal["cpu", "gpu"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: a number is out of range.
        """
        sound = {
            "--temperature": self.temperature is None or 0.0 <= self.temperature < math.inf,
            "--top-p": self.top_p is None or 0.0 < self.top_p <= 1.0,
            "--max-new-tokens": self.max_new_tokens is None or self.max_new_tokens > 0,
            "--seed": self.seed >= 0,
        }
        for flag, is_sound in sound.items():
            if not is_sound:
                value = getattr(self, flag.removeprefix("--").replace("-", "_"))
                what = {
                    "--temperature": "0 (greedy) or more",
                    "--top-p": "more than 0, at most 1",
                    "--max-new-tokens": "at least 1",
                }.get(flag, "0 or more")
                raise ConfigError(f"{flag} is {value}; give {what}")


@dataclass(frozen=True, eq=False)
class Speaker:
    """A model that answers.

    Attributes:
        name: as it was given, with the step of the checkpoint.
        prompt_key, reference_key: columns of the run's data; a model without a run has "prompt" and None.
        context: most tokens of a sequence; None: no limit.
    """

    name: str
    prompt_key: str
    reference_key: str | None
    renderer: Renderer
    engine: TorchEngine
    sampling: Sampling
    seeds: Seeds
    context: int | None

    @property
    def is_chat(self) -> bool:
        """Whether prompts are conversations."""
        return self.renderer.template is not None

    @property
    def remembers(self) -> bool:
        """Whether a prompt may have earlier turns; not where the run puts one question in a form of its own
        (`render.question`)."""
        return self.is_chat and self.renderer.definition["question"] is None

    def answer(self, messages: Sequence[Message], turn: int) -> Iterator[Completion]:
        """The answer to a conversation, after each token (`TorchEngine.stream`).

        Args:
            turn: the address of its random numbers.
        """
        return self.engine.stream(
            Request(self.renderer.prompt(messages), self.sampling, self.seeds.key("chat", turn)), SLOT
        )


def load_speaker(target: str, manner: Manner) -> Speaker:
    """
    Args:
        target: a run directory; or a model: a directory, an adapter's directory, or a hub id.

    Raises:
        ConfigError: the run trained a reward model, or the target is a file.
        OatError: the checkpoint or the model cannot be loaded, or the template does not suit it.
    """
    path = Path(target)
    with warnings.catch_warnings():
        # here the template sees every conversation whole, as the model does in use
        warnings.filterwarnings("ignore", message="the chat template rewrites history", category=OatWarning)
        if (path / "config.yaml").exists():
            return _of_run(path, manner)
        if path.is_file():
            raise ConfigError(
                f"{target} is a file; give a run directory, the directory of a model, or a hub id"
            )
        return _of_model(target, manner)


def _of_run(run_dir: Path, manner: Manner) -> Speaker:
    config = run_config(run_dir)
    if manner.dtype is not None:
        raise ConfigError(
            f"--dtype is {manner.dtype}, and {run_dir} has a precision of its own; leave it out, or give "
            "an exported model"
        )
    here = config.compute.profile if torch.cuda.is_available() else "cpu"
    found = load_learned(run_dir, manner.step, device_of(manner.profile or here))
    if found.name == "reward":
        raise ConfigError(
            f"{run_dir}: trained a reward model, which answers nothing; give a run that trained a policy, "
            "or a model"
        )
    render = config.render
    if manner.template is not None or manner.system is not None:
        template = _named(manner.template) if manner.template is not None else render.template
        _refuse_system(run_dir, manner, template)
        is_other = template != render.template
        render = replace(
            render,
            template=template,
            system=manner.system or (render.system if template else None),
            date=None if is_other else render.date,
        )
    renderer = make_renderer(replace(config, render=render), found.lm, found.tokenizer)
    name = f"{run_dir} after {found.step} steps"
    return _made(name, found.lm, renderer, plain_sampling(config), manner, config)


def _of_model(target: str, manner: Manner) -> Speaker:
    if manner.step is not None:
        raise ConfigError(f"--step is {manner.step}, and {target} is no run; leave it out")
    model = ModelConfig(target, dtype=manner.dtype or "float32")
    if is_adapter_directory(target):
        lora, base = described_adapter(target)
        model = replace(model, path=base, lora=lora, adapter=target)
    lm, tokenizer = load_model(model, device=device_of(manner.profile or "cpu")), load_tokenizer(model.path)
    template = (
        _named(manner.template)
        if manner.template is not None
        else "tokenizer"
        if tokenizer.chat_template
        else None
    )
    _refuse_system(target, manner, template)
    renderer = Renderer(tokenizer, template=template, system=manner.system, eos_ids=lm.eos_ids)
    check_tokenizer(lm, model.path, renderer)
    return _made(target, lm, renderer, Sampling(SamplingConfig.max_new_tokens), manner, None)


def _made(
    name: str, lm: CausalLM, renderer: Renderer, sampling: Sampling, manner: Manner, config: Config | None
) -> Speaker:
    options, threads = TorchEngineConfig(), None
    if config is not None:
        options = settings_of(config, "engine")
        threads = config.compute.threads if config.compute.profile == "cpu" else None
    engine = make_engine({SLOT: lm}, renderer, options, options.threads or threads)
    given: dict[str, Any] = {
        name: getattr(manner, name) for name in ("temperature", "top_p", "max_new_tokens")
    }
    sampling = replace(sampling, **{name: value for name, value in given.items() if value is not None})
    keys = ("prompt", None) if config is None else (config.prompts.prompt_key, config.prompts.reference_key)
    return Speaker(name, *keys, renderer, engine, sampling, Seeds(manner.seed), lm.context_length)


def _refuse_system(target: str | Path, manner: Manner, template: str | None) -> None:
    if manner.system is not None and template is None:
        raise ConfigError(
            f"--system is given, and {target} continues plain text; give a --template too, or leave it out"
        )


def _named(template: str) -> str | None:
    return None if template == NO_TEMPLATE else template
