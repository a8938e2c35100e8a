"""An episode of several turns, compared with one turn of as many tokens.

    python benchmarks/turns.py [--sizes tiny quickstart] [--turns 4] [--tokens 16] [--prompt 16] [...]

Load: 16 prompts of `--prompt` tokens, and 8 samples per prompt. In an episode, the model responds in
`--turns` turns with `--tokens` tokens each. Between two turns it reads a message of 4 tokens. Each side is
the actor of a run: renderer, engine and environment. The sides take turns. A ratio is the median of the
seconds of a side, divided by that of the side `one`.

* one: one turn, with as many tokens as the episode has behind its prompt.
* kept: several turns; the engine keeps keys and values over the turns.
* again: several turns; the engine keeps nothing, and computes the conversation again in every turn.
* own: one turn, with as many tokens as the model writes in the episode. Its messages are left out.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from peers import THREADS
from transformers import LlamaConfig, LlamaForCausalLM

from oat.engines.torch import TorchEngine
from oat.environments.base import Turn
from oat.environments.batched import BatchedEnvironment
from oat.models.loading import load_lm, load_tokenizer
from oat.quickstart.task import CHARACTERS, build_tokenizer
from oat.rollout.actor import Actor
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Message, Prompt, Sampling

SIZES = {"tiny": (32, 2), "quickstart": (128, 4)}
"""Width and number of layers of a Llama with the quickstart's tokenizer."""
LOAD = {"prompt_count": 16, "samples": 8, "said": 4}


class Echo:
    """An environment that says `said` characters after each response, and ends after `turns` responses."""

    def __init__(self, turns: int, said: int):
        self.turns, self.said = turns, said

    def reset(self, prompt: Prompt, generator: np.random.Generator) -> Mapping[str, Any]:
        return {"left": self.turns - 1}

    def step(self, state: Mapping[str, Any], response: str) -> Turn:
        message = Message("user", "+" * self.said) if state["left"] else None
        return Turn({"left": state["left"] - 1}, message, 0.0)


class Forgetful(TorchEngine):
    """An engine that keeps nothing between turns."""

    def _generate(self, *arguments: Any) -> Any:
        yield from super()._generate(*arguments)
        self._kept.clear()


def compare(
    size: str,
    turns: int,
    tokens: int,
    prompt_tokens: int,
    repetitions: int,
    load: Mapping[str, int] = LOAD,
) -> dict[str, Any]:
    """Return one row of the table: the seconds of each side, and the ratios to one turn.

    Args:
        tokens: number of the model's tokens in a turn.
    """
    torch.set_num_threads(THREADS)
    written = turns * tokens
    lengths = {"one": written + (turns - 1) * load["said"], "kept": tokens, "again": tokens, "own": written}
    with tempfile.TemporaryDirectory() as folder:
        _save(size, Path(folder))
        sides = {
            "one": _actor(folder, TorchEngine, None),
            "kept": _actor(folder, TorchEngine, Echo(turns, load["said"])),
            "again": _actor(folder, Forgetful, Echo(turns, load["said"])),
            "own": _actor(folder, TorchEngine, None),
        }
    generator = np.random.default_rng(0)
    prompts = [
        Prompt(row, row, (Message("user", "".join(generator.choice(list(CHARACTERS), prompt_tokens - 1))),))
        for row in range(load["prompt_count"])
    ]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions + 1):
        for name, actor in sides.items():
            begin = time.perf_counter()
            groups = actor.sample(
                prompts, {"sampler": load["samples"]}, ["bench", repetition], Sampling(lengths[name])
            )
            took = time.perf_counter() - begin
            made = {int(row.trained.sum()) for group in groups for row in group.trajectories}
            assert made == {lengths["one"] if name == "one" else written}, f"{name} made {made} tokens"
            seconds[name] += [took] if repetition else []  # the first repetition warms up
    medians = {name: median(each) for name, each in seconds.items()}
    ratios = {
        name: [each / one for each, one in zip(seconds[name], seconds["one"], strict=True)]
        for name in sides
        if name != "one"
    }
    return {
        "size": size,
        "turns": turns,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "seconds": medians,
        "ratios": {name: medians[name] / medians["one"] for name in ratios},
        "spread": {name: (min(each), max(each)) for name, each in ratios.items()},
        "settings": {"oat": dict(load)},
        "versions": {"oat": {"oat": version("oat-align"), "torch": torch.__version__}},
    }


def _save(size: str, folder: Path) -> None:
    tokenizer, (width, layers) = build_tokenizer(), SIZES[size]
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=max(2, width // 32),
            max_position_embeddings=1024,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(folder)


def _actor(folder: str, engine: type[TorchEngine], environment: Echo | None) -> Actor:
    renderer = Renderer(load_tokenizer(folder), template=None)
    made = engine(
        {"sampler": load_lm(folder)},
        num_tokens=renderer.num_tokens,
        stop_ids=[],  # every response has its full length
        decode=renderer.decode,
        threads=THREADS,
    )
    batched = None if environment is None else BatchedEnvironment(environment, 60.0)
    return Actor(renderer, made, Sampling(1), Seeds(0), environment=batched)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args(arguments)
    for size in options.sizes:
        print(
            json.dumps(compare(size, options.turns, options.tokens, options.prompt, options.repetitions)),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
