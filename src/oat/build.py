"""From a configuration to boxes. The only place that knows all of them, and where settings are held against each other."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oat.actor import Actor
from oat.algorithms.base import Objective
from oat.algorithms.direct import DPO
from oat.algorithms.group import GRPO
from oat.boxes import Stateful
from oat.checkpoint import Checkpoints, write_atomically
from oat.collector import Collector
from oat.config import Component, Config, Origins, convert, dump, load_config, to_yaml, unknown_field, where
from oat.engines.torch import TorchEngine
from oat.errors import ConfigError, did_you_mean
from oat.evaluate import Evaluation, Mode
from oat.explore.base import Explorer
from oat.explore.rules import NoExploration
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel, Model
from oat.learner.optim import OptimiserSettings
from oat.ledger import Ledger
from oat.lm import CausalLM, load_lm, load_tokenizer
from oat.loop import Run
from oat.oracles.base import Oracle
from oat.oracles.preferences import Preferences
from oat.oracles.registry import build_oracle
from oat.oracles.router import OneOracle
from oat.plugins import load_symbol
from oat.prompts import Prompts
from oat.render import Renderer
from oat.runtime.local import over_wire
from oat.seeds import Seeds
from oat.store import Store
from oat.tracking import Tracking
from oat.types import Plan, Requires, Sampling
from oat.weights import Weights

ALGORITHMS: dict[str, Any] = {"dpo": DPO, "grpo": GRPO}
FREE = ("stop", "tracking", "checkpoint", "run_dir", "oracle.deadline_s", "compute.serialise")
"""Fields, or whole sections, that may change when a run is continued."""


@dataclass(frozen=True)
class TorchEngineConfig:
    max_rows: int = 64
    """Rows decoded together."""
    deterministic: bool = False
    """The same tokens under any batching, for some speed."""


@dataclass(frozen=True)
class NoOptions:
    pass


def resolve(config: Config, origins: Origins) -> Config:
    """The configuration with every default of its parts filled in, and every rule between settings checked.

    Raises:
        ConfigError: names the place, the field, and what to do.
    """
    algorithm = algorithm_class(config.algorithm.name, origins)
    known: dict[str, type] = {"engine": TorchEngineConfig, "explorer": NoOptions, "router": NoOptions, "algorithm": algorithm.Config}
    names = {"engine": ["torch"], "explorer": ["none"], "router": ["one"]}
    parts: dict[str, Any] = {}
    for section, cls in known.items():
        component: Component = getattr(config, section)
        if section in names and component.name not in names[section] and not (section == "explorer" and ":" in component.name):
            place = where((section, "name"), origins)
            raise ConfigError(f"{place}: there is no {section} {component.name!r}; {did_you_mean(component.name, names[section])}")
        parts[section] = Component(component.name, _options(section, component, cls, origins))
    config = replace(config, **parts)
    _check(config, algorithm(algorithm.Config(**config.algorithm.options)).requires, origins)
    if config.learner.schedule != "constant" and config.learner.schedule_steps is None:
        updates = config.algorithm.options.get("epochs", 1) * config.algorithm.options.get("minibatches", 1)
        config = replace(config, learner=replace(config.learner, schedule_steps=config.stop.max_steps * updates))
    return config


def algorithm_class(name: str, origins: Origins) -> Any:
    """The class of an algorithm: ours by name, or a user's by path."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    place = where(("algorithm", "name"), origins)
    if ":" in name:
        found = load_symbol(name)
        if Objective not in getattr(found, "__mro__", ()) or not dataclasses.is_dataclass(getattr(found, "Config", None)):
            raise ConfigError(f"{place}: {name} is no algorithm; subclass Objective of oat/algorithms/base.py, with a dataclass `Config` in it")
        return found
    raise ConfigError(f"{place}: there is no algorithm {name!r}; {did_you_mean(name, ALGORITHMS)}, or path/to/file.py:Name")


def _options(section: str, component: Component, cls: type, origins: Origins) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(cls)}
    for option in component.options:
        if option not in fields:
            readers = [name for name, other in ALGORITHMS.items() if section == "algorithm" and option in other.Config.__dataclass_fields__]
            hint = f" of {component.name}" + (f" (it is read by {', '.join(readers)})" if readers else "")
            raise unknown_field((section, option), fields, origins, hint)
    try:
        return dataclasses.asdict(convert(cls, component.options, (section,), origins))
    except ConfigError as error:
        place = where((section,), origins)
        raise error if place in str(error) or ":" in str(error).split(" ")[0] else ConfigError(f"{place}: {error}") from None


def _check(config: Config, requires: Requires, origins: Origins) -> None:
    """Settings that contradict each other, or that nothing reads in this combination."""
    sampling, name = config.sampling, config.algorithm.name
    if requires.ratio_based and sampling.temperature == 0:
        raise ConfigError(f"{where(('sampling', 'temperature'), origins)}: {name} divides by the probability of sampling; set a temperature above 0")
    if requires.ratio_based and config.oracle.max_outstanding:
        place = where(("oracle", "max_outstanding"), origins)
        raise ConfigError(f"{place}: {name} needs answers about its newest samples; set oracle.max_outstanding to 0")
    for field in ("prompts", "epochs", "minibatches"):
        value = config.algorithm.options.get(field)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{where(('algorithm', field), origins)}: algorithm.{field} is {value}; it must be at least 1")
    if config.evaluation is not None and not config.evaluation.samples and not config.evaluation.greedy:
        place = where(("evaluation",), origins)
        raise ConfigError(f"{place}: the evaluation has no responses; set evaluation.samples, or evaluation.greedy to true, or leave the section out")
    unread = {
        ("oracle", "labels"): requires.feedback != "compare",
        ("oracle", "scale"): requires.feedback != "compare",
        ("model", "reference"): "reference" not in requires.models | requires.slots,
        ("learner", "critic_learning_rate"): "critic" not in requires.models,
        ("learner", "schedule_steps"): config.learner.schedule == "constant",
    }
    for (section, field), is_unread in unread.items():
        part = getattr(config, section)
        default = next(f.default for f in dataclasses.fields(part) if f.name == field)
        if is_unread and (section, field) in origins and getattr(part, field) != default:
            place = origins[section, field]
            raise ConfigError(f"{place}: nothing reads {section}.{field} with algorithm {name} and these settings; remove it")


def build(config: Config, *, directory: Path | None = None) -> Run:
    """The boxes of a resolved configuration.

    Args:
        directory: where the run lives, if not in `config.run_dir`.

    Raises:
        OatError: a part cannot be made as configured.
    """
    directory = directory or Path(config.run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    seeds = Seeds(config.seed)
    objective = _objective(config)
    lms = _language_models(config, objective.requires)
    tokenizer, render, eos_ids = load_tokenizer(config.model.path), config.render, lms["policy"].eos_ids
    renderer = Renderer(tokenizer, template=render.template, system=render.system, stop=config.sampling.stop, eos_ids=eos_ids)
    learner = _learner(config, objective, lms, renderer, seeds)
    engine = _engine(config, lms, renderer)
    actor = Actor(renderer, engine, _sampling(config, objective.requires), seeds)
    prompts = _prompts(config, config.prompts.path, renderer, seeds)
    explorer = _explorer(config, objective.requires)
    asked, scoring = _oracles(config, objective.requires)
    served, weighted = ({**asked, **scoring}, engine)
    if config.compute.serialise:
        actor, learner = over_wire(actor), over_wire(learner, local=(type(objective),))
        served, weighted = {name: over_wire(oracle) for name, oracle in served.items()}, over_wire(engine)
    ledger = Ledger(Store(directory / "ledger.sqlite"), served, seeds, labels=config.oracle.labels, deadline_s=config.oracle.deadline_s)

    def plans(step: int) -> Plan:
        return explorer.widen(objective.plan(step))

    last = _last_step(config, prompts, plans)
    weights = Weights([weighted], config.learner.sync_every)
    parts: dict[str, Stateful] = {"learner": learner, "weights": weights, "prompts": prompts, "objective": objective}
    total = sum(plans(step).questions for step in range(last))
    router = OneOracle(next(iter(asked)))
    return Run(
        objectives=[objective],
        plans=plans,
        last=last,
        seeds=seeds,
        collector=Collector(prompts, actor, explorer, router, ledger, seeds, total=total, max_outstanding=config.oracle.max_outstanding),
        ledger=ledger,
        learner=learner,
        weights=weights,
        evaluation=_evaluation(config, actor, ledger, renderer, seeds, scoring, last, directory),
        checkpoints=Checkpoints(directory / "checkpoints", every=config.checkpoint.every, keep_last=config.checkpoint.keep_last),
        tracking=Tracking(directory, samples=config.tracking.samples),
        parts=parts,
    )


def open_run(config: Config, origins: Origins) -> Run:
    """The run of a configuration: a new one, or the one that stands in its directory.

    Raises:
        ConfigError: the directory holds a run of another configuration; the message lists the differences.
    """
    directory = Path(config.run_dir)
    file = directory / "config.yaml"
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give another --run_dir")
    if file.exists():
        before = dump(load_config(file)[0])
        if config.compute.threads is None:
            config = replace(config, compute=replace(config.compute, threads=before["compute"]["threads"]))
        differences = [line for line in _differences(before, dump(config)) if not _is_free(line.split(": ")[0])]
        if differences:
            raise ConfigError(f"{directory} holds a run of another configuration; give another --run_dir, or undo:\n  " + "\n  ".join(differences))
    elif directory.exists() and not _is_unused(directory):
        raise ConfigError(f"{directory} is not empty and holds no run; give another --run_dir")
    if config.compute.threads is None:
        config = replace(config, compute=replace(config.compute, threads=torch.get_num_threads()))
    directory.mkdir(parents=True, exist_ok=True)
    run = build(config)
    write_atomically(file, to_yaml(config))
    return run


def _is_unused(directory: Path) -> bool:
    """Whether a directory is empty, or holds only what a start leaves behind that failed or was killed before its first question."""
    left = {file.name for file in directory.iterdir()}
    if not left <= {".new-config.yaml", *(f"ledger.sqlite{end}" for end in ("", "-wal", "-shm"))}:
        return False
    if "ledger.sqlite" not in left:
        return True
    store = Store(directory / "ledger.sqlite")
    try:
        return store.is_empty()
    finally:
        store.close()


def _is_free(field: str) -> bool:
    return any(f"{field}.".startswith(f"{free}.") for free in FREE)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {json.dumps(old)} in the run, {json.dumps(new)} now")
    return lines


def _objective(config: Config) -> Objective:
    cls = algorithm_class(config.algorithm.name, {})
    objective: Objective = cls(cls.Config(**config.algorithm.options))
    return objective


def _sampling(config: Config, requires: Requires) -> Sampling:
    sampling = Sampling(**dataclasses.asdict(config.sampling))
    return replace(sampling, keep_sets=requires.ratio_based and sampling.truncates)


def _language_models(config: Config, requires: Requires) -> dict[str, CausalLM]:
    """The policy; a frozen reference if anything needs it; the sampler's own copy when it may hold older weights; the critic's backbone."""
    paths = {"policy": config.model.path}
    if "reference" in requires.models | requires.slots:
        paths["reference"] = config.model.reference or config.model.path
    if config.learner.sync_every > 1:
        paths["sampler"] = config.model.path
    if "critic" in requires.models:
        paths["critic"] = config.model.path
    return {name: load_lm(path, dtype=config.model.dtype) for name, path in paths.items()}


def _learner(config: Config, objective: Objective, lms: Mapping[str, CausalLM], renderer: Renderer, seeds: Seeds) -> Learner:
    c = config.learner
    models: dict[str, Model] = {}
    for name in sorted(objective.requires.models):
        if name == "critic":
            models[name] = Critic(lms[name], seeds.at("init", name))
        else:
            models[name] = LanguageModel(lms[name], num_tokens=renderer.num_tokens, chunk=c.logits_chunk)
    rates = {"policy": c.learning_rate, "critic": c.critic_learning_rate or c.learning_rate}
    common: dict[str, Any] = {"schedule": c.schedule, "warmup_steps": c.warmup_steps, "schedule_steps": c.schedule_steps or config.stop.max_steps}
    optimisers = {name: OptimiserSettings(rates[name], c.betas, c.weight_decay, **common) for name in objective.wants}
    return Learner(models, optimisers, micro_batch_size=c.micro_batch_size, max_grad_norm=c.max_grad_norm, seeds=seeds)


def _engine(config: Config, lms: Mapping[str, CausalLM], renderer: Renderer) -> TorchEngine:
    """The torch engine; its slots share the learner's tensors wherever their versions cannot differ."""
    slots = {"sampler": lms.get("sampler", lms["policy"]), "policy": lms["policy"]}
    if "reference" in lms:
        slots["reference"] = lms["reference"]
    options = TorchEngineConfig(**config.engine.options)
    return TorchEngine(
        slots,
        num_tokens=renderer.num_tokens,
        stop_ids=renderer.stop_ids,
        decode=renderer.decode,
        max_rows=options.max_rows,
        deterministic=options.deterministic,
    )


def _explorer(config: Config, requires: Requires) -> Explorer:
    assert requires.feedback != "none", "an objective without feedback needs no explorer"
    if config.explorer.name != "none":
        found: Callable[..., Explorer] = load_symbol(config.explorer.name)
        return found(requires.feedback)
    return NoExploration(requires.feedback)


def _oracles(config: Config, requires: Requires) -> tuple[dict[str, Oracle], dict[str, Oracle]]:
    """The oracle that training asks and the one that evaluation asks, each by its address."""
    name = config.oracle.name
    oracle = build_oracle(name, config.oracle.options)
    if requires.feedback == oracle.answers:
        return {name: oracle}, {name: oracle}
    if requires.feedback == "compare":
        return {f"{name}/preferences": Preferences(oracle, config.oracle.scale)}, {name: oracle}
    raise ConfigError(f"oracle {name} compares pairs, and {config.algorithm.name} learns from scores; use a scoring oracle or a preference algorithm")


def _prompts(config: Config, path: str, renderer: Renderer, seeds: Seeds, *, held_out: bool = False) -> Prompts:
    p = config.prompts
    options: dict[str, Any] = {"epochs": 1, "shuffle": False} if held_out else {"epochs": p.epochs, "shuffle": p.shuffle}
    return Prompts(path, renderer, seeds, prompt_key=p.prompt_key, reference_key=p.reference_key, max_tokens=p.max_tokens, **options)


def _last_step(config: Config, prompts: Prompts, plans: Callable[[int], Plan]) -> int:
    """The run's number of steps: `stop.max_steps`, or fewer where the prompts are used up before."""
    if config.prompts.epochs is None:
        return config.stop.max_steps
    left, step = prompts.size * config.prompts.epochs, 0
    while left > 0 and step < config.stop.max_steps:
        left -= plans(step).prompts
        step += 1
    return step


def _evaluation(
    config: Config, actor: Actor, ledger: Ledger, renderer: Renderer, seeds: Seeds, oracles: Mapping[str, Oracle], last: int, directory: Path
) -> Evaluation | None:
    if config.evaluation is None:
        return None
    name, oracle = next(iter(oracles.items()))
    if oracle.answers == "compare" and config.prompts.reference_key is None:
        raise ConfigError("evaluation by a comparing oracle is a win rate against reference responses; set prompts.reference_key")
    prompts = _prompts(config, config.evaluation.path, renderer, seeds, held_out=True).all()[: config.evaluation.max_prompts]
    sampling = Sampling(**dataclasses.asdict(config.sampling))
    modes = []
    if config.evaluation.samples:
        modes.append(Mode("sampled", config.evaluation.samples, sampling))
    if config.evaluation.greedy:
        modes.append(Mode("greedy", 1, Sampling(sampling.max_new_tokens, temperature=0.0, stop=sampling.stop)))
    folder = directory / "evaluations"
    return Evaluation(prompts, actor, ledger, modes, kind=oracle.answers, oracle=name, every=config.evaluation.every, last=last, directory=folder)
