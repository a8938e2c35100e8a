"""What the explorer `ensemble` costs in a step, beside the generation of the step.

    python benchmarks/explore_cost.py [--sizes 0.3M 20M] [--model DIR] [--repetitions 10]

Load: as in configs/sea_dpo.yaml, with 20 samples of 48 new tokens, an ensemble of 20 members with hidden
layers of 128, the rule `bai_ts`, labels of the ensemble, and the hidden states of all layers as features. The
model 0.3M is a Llama of about the story model's size, with 32 prompts of 16 to 64 tokens; 20M is a larger one
with 8 prompts. Both have random weights. With `--model` the model is one of a directory, and the prompts are
32 openings of stories.

The parts are those of runs: one without an explorer, one with features of the policy, and one with features
of the reference. They take turns. Seconds are medians over repetitions. A share is the median over
repetitions of a part's seconds, divided by those of the generation without an explorer.

* keep: the seconds that generation takes longer if the engine keeps hidden states. The tokens are the same.
* ensemble: the rewards that all members give all candidates.
* rule: the candidates of each prompt, the choice of pairs, and the notes of the questions.
* pass: the reference's pass over all candidates.
* learn: the ensemble's optimiser steps in a step, on `PAIRS` pairs of its buffer, and its new weights in the
  actor.

The rate of the ensemble is measured with more work (`RATE`): the operations of its forward pass per second,
divided by those of a product of two square matrices, the faster one of `WIDTHS`. They take turns.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from peers import THREADS
from provenance import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import END, prompts, text, write_tokenizer

from oat.assemble.run import build
from oat.config.load import load_config
from oat.explore.base import Round, candidates_of
from oat.functional.products import product
from oat.loop import Run
from oat.models.ensemble import Ensemble
from oat.resolve.resolve import resolve
from oat.types import ENSEMBLE, Feedback, Group, Key, Prompt


@dataclass(frozen=True)
class Size:
    """A model and the work of a step."""

    vocabulary: int
    width: int
    layers: int
    prompts: int
    samples: int = 20
    new_tokens: int = 48
    hidden: int = 128


SIZES = {"0.3M": Size(512, 64, 5, 32), "20M": Size(4096, 384, 10, 8), "tiny": Size(64, 32, 2, 4, 4, 8, 16)}
STORIES = ROOT / "configs" / "stories" / "train_said.jsonl"
PAIRS = 1000
STEP = 10
"""Number of the timed step. The burn-in of the ensemble's labels is over."""
RATE = {"candidates": 2560, "features": 2048, "members": 20, "hidden": 128}
WIDTHS = (1024, 2048)
SHARES = {
    "ensemble and rule": ("ensemble", "rule"),
    "policy": ("keep", "ensemble", "rule"),
    "reference": ("pass", "ensemble", "rule"),
    "learn": ("learn",),
}
"""The parts of each share of the generation."""


def compare(name: str, repetitions: int, model: str | None = None) -> dict[str, Any]:
    """Return the seconds of the parts of a step, and shares of the generation.

    Args:
        name: one of `SIZES`.
        model: directory of a model in place of one with random weights.
    """
    size = SIZES[name]
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        _write_inputs(size, folder, model)
        runs = {each: _build(size, folder, model, each) for each in ("none", "policy", "reference")}
        asked = runs["none"].collector.prompts.take(size.prompts)
        _fill_buffer(runs["policy"])
        _seconds(runs, size, asked, 0)  # warms up
        each = [_seconds(runs, size, asked, number) for number in range(1, repetitions + 1)]
    shares = {
        share: [sum(seconds[part] for part in parts) / seconds["generate"] for seconds in each]
        for share, parts in SHARES.items()
    }
    return {
        "model": model or name,
        "features": runs["policy"].collector.actor.features.width,
        "seconds": {part: median(seconds[part] for seconds in each) for part in each[0]},
        "shares": {share: median(values) for share, values in shares.items()},
        "spread": {share: (min(values), max(values)) for share, values in shares.items()},
        "settings": {
            "oat": {"prompts": size.prompts, "samples": size.samples, "new_tokens": size.new_tokens}
        },
        "versions": _versions(),
    }


def rate(repetitions: int, load: Mapping[str, int] = RATE, widths: Sequence[int] = WIDTHS) -> dict[str, Any]:
    """Return the operations of the ensemble's forward pass, and the operations per second of the ensemble and
    of the machine."""
    torch.set_num_threads(THREADS)
    ensemble = Ensemble(
        features=load["features"],
        members=load["members"],
        hidden=load["hidden"],
        activation="relu",
        generator=np.random.default_rng(0),
    ).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    features_ND = torch.randn(load["candidates"], load["features"], generator=generator)
    squares = [torch.randn(width, width, generator=generator) for width in widths]
    inputs, hidden = load["features"], load["hidden"]
    each = load["candidates"] * load["members"] * (inputs * hidden + hidden * hidden + hidden)
    work: dict[str, tuple[float, Callable[[], object]]] = {
        "ensemble": (2 * each, partial(ensemble.rewards, features_ND)),
        **{
            f"product of {len(square)}": (2 * len(square) ** 3, partial(product, square, square))
            for square in squares
        },
    }
    rates: dict[str, list[float]] = {name: [] for name in work}
    with torch.no_grad():
        for repetition in range(repetitions + 1):
            for name, (operations, run) in work.items():
                took = _timed(run)[1]
                rates[name] += [operations / took] if repetition else []
    machine = max((name for name in work if name != "ensemble"), key=lambda name: median(rates[name]))
    ratios = [ours / its for ours, its in zip(rates["ensemble"], rates[machine], strict=True)]
    return {
        "operations": work["ensemble"][0],
        "rate": median(rates["ensemble"]),
        "machine": median(rates[machine]),
        "ratio": median(rates["ensemble"]) / median(rates[machine]),
        "spread": (min(ratios), max(ratios)),
        "settings": {"oat": {**load, "machine": machine}},
        "versions": _versions(),
    }


def _versions() -> dict[str, dict[str, str]]:
    return {"oat": {"oat": version("oat-align"), "torch": torch.__version__}}


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of some work, and its seconds."""
    begin = time.perf_counter()
    found = work()
    return found, time.perf_counter() - begin


def _seconds(runs: Mapping[str, Run], size: Size, asked: Sequence[Prompt], number: int) -> dict[str, float]:
    """Time each part of a step once. `number` decides the tokens, and which generation comes first."""
    groups: dict[str, list[Group]] = {}
    took: dict[str, float] = {}
    for name in ("none", "policy") if number % 2 else ("policy", "none"):
        sample = runs[name].collector.actor.sample
        groups[name], took[name] = _timed(
            partial(sample, asked, {"sampler": size.samples}, ("train", number, 0))
        )
    assert _ids(groups["none"]) == _ids(groups["policy"]), "keeping hidden states changed the tokens"
    collector = runs["policy"].collector
    scores, ensemble_s = _timed(partial(collector.actor.score, groups["policy"], [ENSEMBLE]))
    _, rule_s = _timed(partial(_choose, collector, groups["policy"], scores, number))
    _, pass_s = _timed(partial(runs["reference"].collector.actor.features.of, groups["none"]))
    _, learn_s = _timed(partial(_learn, runs["policy"], number))
    return {
        "generate": took["none"],
        "keep": took["policy"] - took["none"],
        "ensemble": ensemble_s,
        "rule": rule_s,
        "pass": pass_s,
        "learn": learn_s,
    }


def _ids(groups: Sequence[Group]) -> list[bytes]:
    return [row.ids.tobytes() for group in groups for row in group.trajectories]


def _choose(collector: Any, groups: Sequence[Group], scores: Any, number: int) -> None:
    keys = [Key("train", STEP, 0, group.prompt.occurrence) for group in groups]
    candidates = [candidates_of(group, reads_text=True) for group in groups]
    generator = collector.seeds.at("explore", number, 0)
    asked = collector.explorer.choose(Round(groups, keys, scores, candidates, PAIRS, generator))
    assert len(asked) == len(groups)


def _fill_buffer(run: Run) -> None:
    width = run.collector.actor.features.width
    run.objectives[1].buffer.add(torch.randn(PAIRS, 2, width, generator=torch.Generator().manual_seed(0)))


def _learn(run: Run, number: int) -> None:
    objective, learner = run.objectives[1], run.learner
    generator = run.seeds.at("ensemble", number)
    learner.update(objective, objective.prepare(Feedback(STEP, (), 0), learner.forward, generator))
    run.weights.push(ENSEMBLE, number, learner)


def _write_inputs(size: Size, folder: Path, model: str | None) -> None:
    """Write a rule and, if no model is given, prompts and a Llama with random weights."""
    (folder / "rule.py").write_text(
        "def even(prompts, completions, **columns):\n    return [len(text) % 2 for text in completions]\n",
        encoding="utf-8",
    )
    if model is not None:
        return
    lines = [json.dumps({"prompt": text(ids)}) for ids in prompts(size.prompts, size.vocabulary)]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=8 * size.width // 3,
            num_hidden_layers=size.layers,
            num_attention_heads=max(2, size.width // 32),
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=END,
        )
    ).save_pretrained(folder / "model")
    write_tokenizer(folder / "model", size.vocabulary)


def _build(size: Size, folder: Path, model: str | None, backbone: str) -> Run:
    """Make a run.

    Args:
        backbone: that of the explorer's features, or "none" for a run without an explorer.
    """
    explorer = {
        "name": "ensemble",
        "samples": size.samples,
        "features": {"backbone": backbone, "layer": "all"},
        "model_labels": {"share": 0.3, "burn_in": 5},
        "ensemble": {"hidden": size.hidden},
    }
    tree = {
        "run_dir": str(folder / backbone),
        "model": {"path": model or str(folder / "model")},
        "prompts": {"path": str(STORIES if model else folder / "train.jsonl")},
        "oracle": {"name": f"{folder / 'rule.py'}:even", "labels": "bernoulli"},
        "sampling": {"max_new_tokens": size.new_tokens},
        "engine": {"max_rows": 256},
        **({} if backbone == "none" else {"explorer": explorer}),
        "algorithm": {"name": "dpo", "prompts": size.prompts, "beta": 0.1},
        "learner": {"learning_rate": 3e-4, "micro_batch_size": 32},
        "compute": {"threads": THREADS},
        "stop": {"max_steps": 1000},
    }
    file = folder / f"{backbone}.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    return build(resolve(*load_config(file)), directory=folder / backbone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", default=["0.3M", "20M"], choices=list(SIZES))
    parser.add_argument("--model", help="directory of a model, in place of the sizes")
    parser.add_argument("--repetitions", type=int, default=10)
    options = parser.parse_args()
    for name in ["0.3M"] if options.model else options.sizes:
        print(json.dumps(compare(name, options.repetitions, options.model)), flush=True)
    print(json.dumps(rate(options.repetitions)), flush=True)


if __name__ == "__main__":
    main()
