"""Checks that a run of the stories recipes has closed half of the gap between its start model and the best of
64 stories of this model, and that the stories have not degraded.

    python benchmarks/stories.py RUN [RUN ...]

Stories are sampled with the run's sampling settings, for the held-out openings of its configuration. Start
and end are the models before and after the run. For each run, the program prints:

    reward      mean reward of the stories of start and end, which are sampled with equal random numbers
    ceiling     reward of the best of `--best` stories of the start per opening, as a mean over the openings
    gap closed  (reward of the end - reward of the start) / (ceiling - reward of the start)
    stopped     share of the stories that end with an end-of-text within sampling.max_new_tokens
    distinct-2  number of different pairs of neighbouring words / number of all pairs, over all stories, in
                lower case
    nats        mean of -log p(token) over all tokens of the stories, with the end-of-text. p is the raw
                probability under the start model. For the start's stories, this estimates its entropy per
                token.

Each model has `--samples` stories per opening. Those of the start are the first of its `--best` stories.

Exit code 0: at least half of the gap is closed, `stopped` is not lower than for the start, distinct-2 is at
least 0.8 times that of the start, and nats has risen by at most 0.3. Exit code 1: otherwise.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from oat.answering.learned import policy_weights, run_config
from oat.config.settings import Config
from oat.data.prompts import Source, read_prompts
from oat.engines.torch import TorchEngine
from oat.errors import OatError
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_tokenizer
from oat.models.lora import load_model
from oat.oracles.rules.sentiment import cheerful
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Prompt, Request, Sampling

SEED = 64
LEAST_CLOSED = 0.5
LEAST_DISTINCT = 0.8
MOST_NATS = 0.3


@dataclass(frozen=True)
class Stories:
    """The measurements of one model's stories. The head of this file explains the names.

    Attributes:
        rewards_BG: rewards of G stories for each of B openings, shape (B, G).
        stopped_frac, distinct_2, nats: measured on the first `samples` stories of each opening.
        shown: (opening, story, reward) of the first story of the first three openings.
    """

    rewards_BG: np.ndarray
    stopped_frac: float
    distinct_2: float
    nats: float
    shown: tuple[tuple[str, str, float], ...]


class Models:
    """The models at the start and at the end of a run, with an engine to sample from them."""

    def __init__(self, config: Config, run_dir: Path):
        start, end = load_model(config.model), load_model(config.model)
        _, weights, *_ = policy_weights(run_dir)
        with torch.no_grad():
            for name, parameter in end.trainable().items():
                parameter.copy_(weights[name])
        s = config.sampling
        self.sampling = Sampling(s.max_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p, s.stop)
        self.renderer = _renderer(config, start)
        self.engine = TorchEngine(
            {"start": start, "end": end},
            num_tokens=self.renderer.num_tokens,
            stop_ids=self.renderer.stop_ids,
            decode=self.renderer.decode,
            max_rows=config.engine.options["max_rows"],
        )

    def stories(self, prompts: Sequence[Prompt], slot: str, count: int, samples: int) -> Stories:
        """Sample `count` stories per opening and compute their rewards. The other measurements use only the
        first `samples` stories of each opening."""
        contexts = [self.renderer.prompt(prompt.messages) for prompt in prompts]
        seeds = Seeds(SEED)
        requests = [
            Request(ids, self.sampling, seeds.key("stories", b, g))
            for b, ids in enumerate(contexts)
            for g in range(count)
        ]
        found = sorted(self.engine.generate(requests, slot), key=lambda completion: completion.index)
        texts = [self.renderer.text(completion.ids) for completion in found]
        openings = [prompt.messages[-1].content for prompt in prompts for _ in range(count)]
        rewards_N = np.array(cheerful(openings, texts), dtype=float)
        measured = [index for index in range(len(found)) if index % count < samples]
        if slot == "start":
            logps = [found[index].raw_logps for index in measured]
        else:
            whole = [np.concatenate([requests[index].ids, found[index].ids]) for index in measured]
            scored = self.engine.logps(whole, "start")
            logps = [
                values[len(requests[index].ids) - 1 :] for index, values in zip(measured, scored, strict=True)
            ]
        return Stories(
            rewards_N.reshape(len(prompts), count),
            float(np.mean([found[index].finish_reason == "stop" for index in measured])),
            distinct_2([texts[index] for index in measured]),
            float(-np.concatenate(logps).mean()),
            tuple(
                (openings[index], texts[index], float(rewards_N[index]))
                for index in range(0, len(texts), count)
            )[:3],
        )


def distinct_2(texts: Sequence[str]) -> float:
    """Return the number of different pairs of neighbouring words, divided by the number of all pairs; 0 if
    there are no pairs."""
    words = [text.lower().split() for text in texts]
    pairs = [pair for story in words for pair in pairwise(story)]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


def report(name: str, start: Stories, end: Stories, samples: int) -> bool:
    """Print the figures of a run. Return True if the run is within the bounds."""
    before = start.rewards_BG[:, :samples].mean()
    ceiling = start.rewards_BG.max(axis=1).mean()
    after = end.rewards_BG.mean()
    closed = (after - before) / (ceiling - before) if ceiling > before else 0.0
    distinct = end.distinct_2 / start.distinct_2 if start.distinct_2 else 0.0
    rise = end.nats - start.nats
    holds = {
        f"gap closed   {closed:.2f}, at least {LEAST_CLOSED}": closed >= LEAST_CLOSED,
        f"stopped      {start.stopped_frac:.4f} -> {end.stopped_frac:.4f}, not lower": end.stopped_frac
        >= start.stopped_frac,
        f"distinct-2   {start.distinct_2:.4f} -> {end.distinct_2:.4f}, {distinct:.2f} of the start's, at "
        f"least {LEAST_DISTINCT}": distinct >= LEAST_DISTINCT,
        f"nats         {start.nats:.4f} -> {end.nats:.4f}, a rise of {rise:.4f}, at most {MOST_NATS}": rise
        <= MOST_NATS,
    }
    print(
        f"{name}: {end.rewards_BG.size} stories\nreward       {before:.4f} -> {after:.4f}, ceiling "
        f"{ceiling:.4f}"
    )
    for line, passes in holds.items():
        print(f"{line}: {'yes' if passes else 'NO'}")
    for when, stories in (("before", start), ("after", end)):
        for opening, text, reward in stories.shown:
            print(f"{when} {reward:+.3f}  {opening} || {' '.join(text.split())}")
    print(flush=True)
    return all(holds.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="directory of a run; the start is sampled once for runs that share it",
    )
    parser.add_argument(
        "--openings", type=int, metavar="N", help="use only the first so many held-out openings"
    )
    parser.add_argument(
        "--samples", type=int, default=8, metavar="N", help="stories an opening, before and after (8)"
    )
    parser.add_argument(
        "--best",
        type=int,
        default=64,
        metavar="N",
        help="stories an opening, of which the ceiling takes the best (64)",
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.samples <= arguments.best or (arguments.openings or 1) < 1:
        parser.error("--samples must be at least 1 and at most --best, and --openings at least 1")
    torch.set_num_threads(1)
    starts: dict[object, Stories] = {}
    passed = True
    try:
        for run_dir in arguments.runs:
            config = run_config(run_dir)
            if config.evaluation is None:
                parser.error(f"{run_dir} has no evaluation, and so no held-out openings")
            source = Source(config.evaluation.path, split=config.evaluation.split)
            prompts = read_prompts(
                source, prompt_key=config.prompts.prompt_key, max_prompts=arguments.openings
            )
            models = Models(config, run_dir)
            shared = (config.model, config.sampling, config.render, config.evaluation.path)
            if shared not in starts:
                starts[shared] = models.stories(prompts, "start", arguments.best, arguments.samples)
            end = models.stories(prompts, "end", arguments.samples, arguments.samples)
            passed &= report(run_dir.name, starts[shared], end, arguments.samples)
    except OatError as error:
        print(f"stories: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if passed else 1


def _renderer(config: Config, lm: CausalLM) -> Renderer:
    tokenizer = load_tokenizer(config.model.path)
    return Renderer(
        tokenizer,
        template=config.render.template,
        system=config.render.system,
        date=config.render.date,
        stop=config.sampling.stop,
        eos_ids=lm.eos_ids,
    )


if __name__ == "__main__":
    sys.exit(main())
