"""A model that answers outside of training, with its tokenizer and template: the policy of a run's
checkpoint, or a model without a run.

A checkpoint is loaded as `oat export` loads it, and refused for the same reasons. The engine of training and
evaluations samples the answers.

In a chat, the whole conversation is rendered again at each turn, as other programs do with the exported
model. A template may then drop reasoning of earlier answers. (An episode of training is different: it keeps
the ids of earlier turns.) The engine drops the KV cache after each answer, so each answer begins with a pass
over the whole conversation.

With `best_of`, a speaker samples several responses, and an ensemble chooses one of them
(`answering/best_of.py`).
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from oat.answering.best_of import Chooser, exported_chooser, model_scorer, run_chooser, run_scorer
from oat.answering.learned import learned_policy, run_config
from oat.assemble.engine import pooling_of
from oat.assemble.models import check_tokenizer, device_of
from oat.assemble.run_inputs import make_renderer
from oat.config.parts import settings_of
from oat.config.settings import Config, ModelConfig, SamplingConfig
from oat.engines.embedded import Embedded
from oat.engines.split import SplitEngine
from oat.engines.torch import TorchEngine
from oat.engines.torch_config import TorchEngineConfig
from oat.errors import ConfigError, ModelError, OatWarning
from oat.evaluation.modes import best_of
from oat.hardware.memory import keep_few_kernels
from oat.models.adapter_files import described_adapter
from oat.models.beside import ADAPTER, is_adapter_directory
from oat.models.loading import load_config, load_tokenizer
from oat.models.outlines import Outlines
from oat.models.sources import ModelSource, lms_of
from oat.resolve.sampling import plain_sampling
from oat.rollout.actor import Actor
from oat.rollout.ensemble_scorer import EnsembleScorer
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import ENSEMBLE, FinishReason, Group, Message, Prompt, Request, Sampling

SLOT = "policy"
NO_TEMPLATE = "none"


@dataclass(frozen=True)
class GenerationOptions:
    """Options of generation outside of training. An option that is None has the run's own value. For a model
    without a run, it has the default of `SamplingConfig`. Exceptions are named below.

    Attributes:
        step: step of the checkpoint, or "best"; None: the newest.
        template: as `render.template`; "none": the model continues a prompt as plain text. None: for a model
            without a run, the tokenizer's template if it has one, else "none".
        system: system message that is put first in conversations without one. None: for a model without a
            run, no message.
        profile: device of the model, as `compute.profile`. None: a GPU if the run computed on one and this
            machine has one; otherwise the CPU.
        dtype: precision of a model without a run; None: float32. For a run it is refused, since the run has a
            precision of its own.
        best_of: number of responses that are sampled for each response that is returned; None: 1.
        ensemble: directory of an exported ensemble, which chooses among `best_of` responses. None: that of
            the run's explorer. It is refused without `best_of`.
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
    best_of: int | None = None
    ensemble: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges of the numbers.

        Raises:
            ConfigError: a number is out of range, or `ensemble` is given without `best_of`.
        """
        sound = {
            "--temperature": self.temperature is None or 0.0 <= self.temperature < math.inf,
            "--top-p": self.top_p is None or 0.0 < self.top_p <= 1.0,
            "--max-new-tokens": self.max_new_tokens is None or self.max_new_tokens > 0,
            "--seed": self.seed >= 0,
            "--best-of": self.best_of is None or self.best_of > 1,
        }
        for flag, is_sound in sound.items():
            if not is_sound:
                value = getattr(self, flag.removeprefix("--").replace("-", "_"))
                what = {
                    "--temperature": "0 (greedy) or more",
                    "--top-p": "more than 0, at most 1",
                    "--max-new-tokens": "at least 1",
                    "--best-of": "at least 2 responses, of which the ensemble chooses one, or leave it out",
                }.get(flag, "0 or more")
                raise ConfigError(f"{flag} is {value}; give {what}")
        if self.ensemble is not None and self.best_of is None:
            raise ConfigError(
                f"--ensemble is {self.ensemble}, and --best-of is not given; give both, or leave both out"
            )


class Response(NamedTuple):
    """A response, or its beginning.

    Attributes:
        ids: (T,) int32, its tokens so far.
        finish_reason: "aborted" if further tokens follow.
    """

    ids: np.ndarray
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class ResponseGenerator:
    """A model that answers.

    Attributes:
        name: the name that the user gave. For a run, the checkpoint's step is added: `runs/a after 10 steps`.
        prompt_key, reference_key: columns of prompts and references in the run's data; for a model without a
            run, "prompt" and None.
        actor: samples responses, and scores them if an ensemble chooses among them.
        best_of: number of sampled responses of which one is chosen; 0: no response is chosen.
        context: largest number of tokens in a sequence; None: no limit.
    """

    name: str
    prompt_key: str
    reference_key: str | None
    renderer: Renderer
    engine: TorchEngine | SplitEngine
    sampling: Sampling
    seeds: Seeds
    actor: Actor
    best_of: int
    context: int | None

    @property
    def is_chat(self) -> bool:
        """True if prompts are conversations."""
        return self.renderer.template is not None

    @property
    def remembers(self) -> bool:
        """True if a prompt may contain earlier turns. False if prompts are plain text, or if the
        setting `render.question` puts each prompt into a form."""
        return self.is_chat and self.renderer.definition["question"] is None

    def respond(self, prompts: Sequence[Prompt], samples: int, address: Sequence[str | int]) -> list[Group]:
        """Return `samples` responses to each prompt. With `best_of`, each is the one of `best_of` sampled
        responses that the ensemble's members give the highest mean reward.

        Args:
            address: that of the random numbers (`Actor.sample`).
        """
        groups = self.actor.sample(prompts, {SLOT: samples * (self.best_of or 1)}, address)
        if not self.best_of:
            return groups
        return best_of(groups, self.actor.score(groups, (ENSEMBLE,))[ENSEMBLE], samples)

    def answer(self, messages: Sequence[Message], turn: int) -> Iterator[Response]:
        """Yield the answer so far, after each of its tokens (`TorchEngine.stream`). With `best_of`, yield
        only the whole answer.

        Args:
            turn: number of the answer in the chat, which is the address of its random numbers.
        """
        if self.best_of:
            prompt = Prompt(turn, turn, tuple(messages))
            (chosen,) = self.respond([prompt], 1, ("chat",))[0].trajectories
            yield Response(chosen.completion, chosen.finish_reason)
            return
        key = self.seeds.key("chat", turn)
        request = Request(self.renderer.prompt(messages), self.sampling, key)
        for completion in self.engine.stream(request, SLOT):
            yield Response(completion.ids, completion.finish_reason)


def load_speaker(target: str, options: GenerationOptions) -> ResponseGenerator:
    """Load a model that is to respond to users' messages.

    Args:
        target: a run directory, a directory of a model or of an adapter, or a hub id.

    Raises:
        ConfigError: the run trained a reward model, the target is a file, or no ensemble can choose the best
            response.
        OatError: the checkpoint, the model or the ensemble cannot be loaded; or the template or the ensemble
            does not suit the model.
    """
    keep_few_kernels()
    path = Path(target)
    with warnings.catch_warnings():
        # this warning is about episodes of training; here each conversation is rendered as a whole
        warnings.filterwarnings("ignore", message="the chat template rewrites history", category=OatWarning)
        if (path / "config.yaml").exists():
            return _load_run(path, options)
        if path.is_file():
            raise ConfigError(
                f"{target} is a file; give a run directory, the directory of a model, or a hub id"
            )
        return _load_plain_model(target, options)


def _load_run(run_dir: Path, options: GenerationOptions) -> ResponseGenerator:
    config = run_config(run_dir)
    if options.dtype is not None:
        raise ConfigError(
            f"--dtype is {options.dtype}, and {run_dir} has a precision of its own; leave it out, or give "
            "an exported model"
        )
    chooser = None
    if options.ensemble is not None:
        chooser = exported_chooser(options.ensemble)
    elif options.best_of is not None:
        chooser = run_chooser(run_dir, config)
    profile = config.compute.profile if torch.cuda.is_available() else "cpu"
    found = learned_policy(run_dir, options.step, device_of(options.profile or profile))
    render = config.render
    if options.template is not None or options.system is not None:
        template = _template(options, default=render.template)
        _refuse_system(run_dir, options, template)
        is_other = template != render.template
        render = replace(
            render,
            template=template,
            system=options.system or (render.system if template else None),
            date=None if is_other else render.date,
        )
    renderer = make_renderer(replace(config, render=render), found.outline, found.renderer.tokenizer)
    name = f"{run_dir} after {found.step} steps"
    scorer = None if chooser is None else run_scorer(chooser, run_dir, config, found)
    return _speaker(
        name,
        found.source,
        renderer,
        plain_sampling(config),
        options,
        config=config,
        context=found.outline.context_length,
        chooser=chooser,
        scorer=scorer,
    )


def _load_plain_model(target: str, options: GenerationOptions) -> ResponseGenerator:
    if options.step is not None:
        raise ConfigError(f"--step is {options.step}, and {target} is no run; leave it out")
    if options.best_of is not None and options.ensemble is None:
        raise ConfigError(
            f"{target}: it is no run, so it has no ensemble that could choose the best response; give one by "
            "--ensemble, a directory that `oat export RUN OUT --ensemble` wrote, or leave --best-of out"
        )
    chooser = None if options.ensemble is None else exported_chooser(options.ensemble)
    model = ModelConfig(target, dtype=options.dtype or "float32")
    if is_adapter_directory(target):
        lora, base = described_adapter(target)
        _refuse_base(target, base)
        model = replace(model, path=base, lora=lora, adapter=target)
    source = ModelSource(model, device_of(options.profile or "cpu"))
    lm = Outlines().on_meta(model)
    if chooser is not None and chooser.features.backbone == "reference":
        lm = lms_of({SLOT: source})[SLOT]
        source = replace(source, lm=lm)
    tokenizer = load_tokenizer(model.path)
    template = _template(options, default="tokenizer" if tokenizer.chat_template else None)
    _refuse_system(target, options, template)
    renderer = Renderer(tokenizer, template=template, system=options.system, eos_ids=lm.eos_ids)
    check_tokenizer(lm, model.path, renderer)
    scorer = None if chooser is None else model_scorer(chooser, lm, source.device, target)
    sampling = Sampling(SamplingConfig.max_new_tokens)
    return _speaker(
        target,
        source,
        renderer,
        sampling,
        options,
        config=None,
        context=lm.context_length,
        chooser=chooser,
        scorer=scorer,
    )


def _refuse_base(adapter: str, base: str) -> None:
    """Refuse an adapter whose base model has no configuration that can be read.

    Args:
        base: the name of the base model in the adapter's files; empty: there is none.

    Raises:
        ModelError: it has none.
    """
    field = f"base_model_name_or_path in {adapter}/{ADAPTER}"
    if not base:
        raise ModelError(
            f"{adapter} is an adapter that names no base model; write its path or hub id as {field}"
        )
    try:
        load_config(base)
    except ModelError as error:
        raise ModelError(f"the base model of the adapter {adapter} ({field}): {error}") from error


def _speaker(
    name: str,
    source: ModelSource,
    renderer: Renderer,
    sampling: Sampling,
    options: GenerationOptions,
    *,
    config: Config | None,
    context: int | None,
    chooser: Chooser | None,
    scorer: EnsembleScorer | None,
) -> ResponseGenerator:
    engine_options = TorchEngineConfig()
    threads = None
    keys: tuple[str, str | None] = ("prompt", None)
    if config is not None:
        if config.engine.name == "torch":
            # the one slot computes in the precision of the model
            engine_options = replace(settings_of(config, "engine"), dtype="float32", own_reference=False)
        threads = config.compute.threads if config.compute.profile == "cpu" else None
        keys = (config.prompts.prompt_key, config.prompts.reference_key)
    engine = Embedded.make(
        engine_options,
        {SLOT: source},
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
        threads=Embedded.traits(engine_options).threads or threads,
        pooling=pooling_of(chooser.features if chooser else None),
    )
    given: dict[str, Any] = {
        name: getattr(options, name) for name in ("temperature", "top_p", "max_new_tokens")
    }
    sampling = replace(sampling, **{name: value for name, value in given.items() if value is not None})
    seeds = Seeds(options.seed)
    actor = Actor(renderer, engine, sampling, seeds, scorer=scorer)
    return ResponseGenerator(
        name, *keys, renderer, engine, sampling, seeds, actor, options.best_of or 0, context
    )


def _refuse_system(target: str | Path, options: GenerationOptions, template: str | None) -> None:
    if options.system is not None and template is None:
        raise ConfigError(
            f"--system is given, and {target} continues plain text; give a --template too, or leave it out"
        )


def _template(options: GenerationOptions, default: str | None) -> str | None:
    if options.template is None:
        return default
    return None if options.template == NO_TEMPLATE else options.template
