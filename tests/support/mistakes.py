"""Common mistakes: changes to a valid configuration, by kind, and the words that the message must contain."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUN = """\
model:
  path: model
prompts:
  path: train.jsonl
  reference_key: answer
sampling:
  max_new_tokens: 4
oracle:
  name: reward.py:reward
algorithm:
  name: grpo
  prompts: 4
  samples: 2
learner:
  learning_rate: 1e-3
evaluation:
  path: held_out.jsonl
compute:
  threads: 1
stop:
  max_steps: 2
"""


CODE = """
def reward(prompts, completions, **columns):
    return [float(len(set(text))) for text in completions]


def needs_more(prompts, completions, anwser):
    return [0.0 for _ in completions]


def compares(prompts, first, second, judge):
    return [0.5 for _ in first]


class Oracle:
    answers, durable = "score", False

    def __init__(self, threshold=0.5):
        self.threshold = threshold

    def submit(self, questions):
        raise AssertionError("nothing is asked")

    collect = submit


class Broken(Oracle):
    def __init__(self, *kind):
        raise KeyError("key")


class Steps:
    def __init__(self, turns):
        if turns < 1:
            raise ValueError(turns)

    def reset(self, prompt, generator):
        return {}

    def step_all(self, states, responses):
        raise AssertionError("nothing is played")


class Game:
    def reset(self, prompt, generator):
        return {}

    def step(self, state, response):
        raise AssertionError("nothing is played")
"""


DPO = ("name: grpo\n  prompts: 4\n  samples: 2", "name: dpo\n  prompts: 4")


PLAYED = (
    ("name: reward.py:reward", "name: environment"),
    ("max_new_tokens: 4", "max_new_tokens: 4\n  environment: mine.py:Game"),
)


RECORDED = (
    ("answer\n", "answer\n  responses: [good, bad]\n"),
    ("name: reward.py:reward", "name: recorded"),
    ("evaluation:\n  path: held_out.jsonl\n", ""),
)


@dataclass(frozen=True)
class Mistake:
    """A configuration with a mistake.

    Attributes:
        changes: replacements in the text of the valid configuration above.
        said: words that the message must contain; "@text" stands for the file and the line that begins with
            the text, "@" for the file.
        prepare: makes further files beside the configuration.
    """

    changes: tuple[tuple[str, str], ...]
    said: tuple[str, ...]
    prepare: Callable[[], None] | None = None


def wrong(
    *changes: tuple[str, str], said: tuple[str, ...], prepare: Callable[[], None] | None = None
) -> Mistake:
    return Mistake(changes, said, prepare)


def write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def rewrite(name: str, **changes: object) -> None:
    """Change fields of a JSON file."""
    write(name, json.dumps({**json.loads(Path(name).read_text(encoding="utf-8")), **changes}))


def without(name: str) -> Callable[[], None]:
    """Return a function that removes one of the model's files."""
    return lambda: Path("model", name).unlink()


def records(name: str, **record: object) -> Callable[[], None]:
    """Return a function that writes a data file whose second record is `record`."""
    return lambda: write(
        name,
        "".join(
            json.dumps(line) + "\n"
            for line in ({"prompt": "1+1=", "answer": "2", "good": "2", "bad": "3"}, record)
        ),
    )


TIED = ("samples: 2", "samples: 2\n  kl_coef: 0.1")


TYPOS = {
    "a section": wrong(
        ("sampling:", "samplng:"), said=("@samplng:", "`samplng`", "did you mean `sampling`?")
    ),
    "a field of a section": wrong(
        ("learning_rate:", "learning_rat:"),
        said=("@learning_rat:", "`learner.learning_rat`", "did you mean `learning_rate`?"),
    ),
    "a field of the algorithm": wrong(
        ("samples: 2", "samples: 2\n  kl_cof: 1"),
        said=("@kl_cof:", "`algorithm.kl_cof` of grpo", "`kl_coef`"),
    ),
    "a field of the engine": wrong(
        ("stop:", "engine:\n  max_row: 3\nstop:"),
        said=("@max_row:", "`engine.max_row` of torch", "`max_rows`"),
    ),
    "a field of an oracle": wrong(
        ("name: reward.py:reward", "name: mine.py:Oracle\n  treshold: 1"),
        said=("@treshold:", "`oracle.treshold` of mine.py:Oracle", "`threshold`"),
    ),
    "a field of a part of a section": wrong(
        ("path: model", "path: model\n  lora: {rnk: 4}"), said=("@lora:", "`model.lora.rnk`", "`rank`")
    ),
    "a field of an evaluation": wrong(
        ("held_out.jsonl", "held_out.jsonl\n  evry: 4"), said=("@evry:", "`evaluation.evry`", "`every`")
    ),
    "a field of another section": wrong(
        ("1e-3", "1e-3\n  max_steps: 5"),
        said=("@max_steps: 5", "`learner.max_steps`", "did you mean `stop.max_steps`?"),
    ),
    "a field without its section": wrong(
        ("stop:", "templat: chatml\nstop:"),
        said=("@templat:", "`templat`", "did you mean `render.template`?"),
    ),
    "a part without its section": wrong(
        ("stop:", "lora: {rank: 4}\nstop:"), said=("@lora:", "`lora`", "did you mean `model.lora`?")
    ),
    "an option without its section": wrong(
        ("stop:", "beta: 0.1\nstop:"), said=("@beta:", "`beta`", "`algorithm.kl_coef: 0.1`")
    ),
    "an algorithm": wrong(
        ("name: grpo", "name: gpro"), said=("@name: gpro", "'gpro'", "did you mean `grpo`?")
    ),
    "an oracle": wrong(
        ("reward.py:reward", "exact_mach"),
        said=("@name: exact_mach", "oracle.name is 'exact_mach'", "did you mean `exact_match`?"),
    ),
    "a function": wrong(
        ("reward.py:reward", "mine.py:rewrd"),
        said=("@name: mine.py:rewrd", "oracle.name", "has no rewrd", "did you mean `reward`?"),
    ),
    "an action of an alarm": wrong(
        ("stop:", "alarms:\n  length: {acton: stop}\nstop:"),
        said=("@length:", "`alarms.length.acton`", "did you mean `action`?"),
    ),
}


UNREAD = {
    "a field of another algorithm": wrong(
        ("samples: 2", "samples: 2\n  beta: 0.1"),
        said=("@beta:", "`algorithm.beta` of grpo", "read by", "dpo"),
    ),
    "clipping without ratios": wrong(
        DPO, ("prompts: 4", "prompts: 4\n  clip_low: 0.1"), said=("@clip_low:", "of dpo", "grpo")
    ),
    "labels with scores": wrong(
        ("reward.py:reward", "reward.py:reward\n  labels: bernoulli"),
        said=("@labels:", "oracle.labels", "grpo", "remove it"),
    ),
    "a scale with scores": wrong(
        ("reward.py:reward", "reward.py:reward\n  scale: 2"),
        said=("@scale:", "oracle.scale", "grpo", "remove it"),
    ),
    "a reference that follows and that nobody reads": wrong(
        ("path: model", "path: model\n  reference_update: {every: 2}"),
        said=("@reference_update:", "model.reference_update", "grpo", "remove it"),
    ),
    "a horizon without a target": wrong(
        ("samples: 2", "samples: 2\n  kl_coef: 0.1\n  kl_horizon: 99"),
        said=("@kl_horizon:", "kl_horizon is 99", "without algorithm.kl_target"),
    ),
    "a device of a reference that has no weights": wrong(
        TIED,
        ("path: model", "path: model\n  lora: {rank: 2}\n  reference_device: cpu"),
        said=("@reference_device:", "beside the policy's frozen weights", "remove it"),
    ),
    "a reference without a KL": wrong(
        ("path: model", "path: model\n  reference: model"),
        said=("@reference:", "model.reference", "grpo", "remove it"),
    ),
    "a critic's rate": wrong(
        ("1e-3", "1e-3\n  critic_learning_rate: 1"), said=("@critic_learning_rate:", "grpo", "remove it")
    ),
    "scores of sampled responses": wrong(
        ("answer\n", "answer\n  score_key: answer\n"), said=("@score_key:", "prompts.score_key", "remove it")
    ),
    "a temperature of recorded responses": wrong(
        *RECORDED, DPO, ("4\noracle", "4\n  temperature: 0.5\noracle"), said=("@temperature:", "remove it")
    ),
    "an alarm of a KL that nobody measures": wrong(
        ("stop:", "alarms:\n  kl: {above: 1, action: stop}\nstop:"),
        said=("@kl:", "alarms.kl", "set algorithm.kl_coef above 0"),
    ),
}


ARITHMETIC = {
    "more mini-batches than responses": wrong(
        ("samples: 2", "samples: 2\n  minibatches: 9"),
        said=("@minibatches:", "is 9", "at most 8 rows", "lower it"),
    ),
    "more mini-batches than pairs": wrong(
        DPO,
        ("prompts: 4", "prompts: 4\n  minibatches: 5"),
        said=("@minibatches:", "is 5", "at most 4 pairs", "raise algorithm.prompts"),
    ),
    "a target of nothing": wrong(
        ("samples: 2", "samples: 2\n  kl_target: 0.1"),
        said=("@kl_target:", "kl_coef is 0", "set kl_coef to where it starts"),
    ),
    "a horizon shorter than a step": wrong(
        ("samples: 2", "samples: 2\n  kl_coef: 0.1\n  kl_target: 0.1\n  kl_horizon: 7"),
        said=("@kl_horizon:", "less than the 8 responses of a step", "raise it"),
    ),
    "a KL that no optimiser step can reach": wrong(
        ("samples: 2", "samples: 2\n  target_kl: 0.1"),
        said=("@target_kl:", "algorithm.target_kl is set", "one optimiser step", "set algorithm.epochs or"),
    ),
    "a KL that the first of many optimiser steps cannot reach": wrong(
        ("samples: 2", "samples: 2\n  epochs: 2\n  target_kl: 0.1"),
        ("1e-3", "1e-3\n  max_updates: 1"),
        said=("@max_updates:", "learner.max_updates is 1", "algorithm.target_kl can end none", "raise it"),
    ),
    "a step in all of its rounds": wrong(
        ("max_new_tokens: 4", "max_new_tokens: 4\n  refill_rounds: 2"),
        ("max_steps: 2", "max_steps: 2\n  max_queries: 23"),
        said=(
            "@max_queries:",
            "is 23",
            "one step can cost 24",
            "in 3 rounds",
            "lower sampling.refill_rounds",
        ),
    ),
    "further rounds beside questions ahead": wrong(
        DPO,
        ("max_new_tokens: 4", "max_new_tokens: 4\n  refill_rounds: 2"),
        ("reward.py:reward", "reward.py:reward\n  max_outstanding: 4"),
        said=(
            "@refill_rounds:",
            "is 2",
            "all answers to the earlier ones",
            "set oracle.max_outstanding to 0",
        ),
    ),
    "a group of one": wrong(
        ("samples: 2", "samples: 1"), said=("@samples: 1", "algorithm.samples is 1", "at least 2")
    ),
    "whitening over a group of one": wrong(
        ("grpo\n  prompts: 4\n  samples: 2", "reinforce_pp\n  prompts: 4\n  whiten_over: group"),
        said=(
            "@whiten_over:",
            "algorithm.whiten_over is 'group'",
            "set it to step, or raise algorithm.samples",
        ),
    ),
    "a weight of flat groups of one": wrong(
        (
            "grpo\n  prompts: 4\n  samples: 2",
            "reinforce_pp\n  prompts: 4\n  rewards:\n    flat_group_weight: 0.5",
        ),
        said=(
            "@    flat_group_weight:",
            "algorithm.rewards.flat_group_weight is 0.5",
            "raise algorithm.samples, or remove it",
        ),
    ),
    "one recorded response to compare": wrong(
        ("answer\n", "answer\n  responses: [good]\n  score_key: reward\n"),
        *RECORDED[1:],
        ("prompts: 4\n  samples: 2", "prompts: 4"),
        said=("@responses:", "prompts.responses is ('good',)", "at least 2", "name further columns"),
    ),
    "three to compare": wrong(
        DPO, ("prompts: 4", "prompts: 4\n  samples: 3"), said=("@samples: 3", "is 3", "give 2")
    ),
    "no prompts": wrong(
        ("prompts: 4", "prompts: 0"), said=("@prompts: 0", "algorithm.prompts is 0", "at least 1")
    ),
    "more successes than samples": wrong(
        ("held_out.jsonl", "held_out.jsonl\n  pass_at: [8]"),
        said=("@pass_at:", "evaluation.samples is 1", "lower it"),
    ),
    "another number of samples than is recorded": wrong(
        *RECORDED,
        DPO,
        ("prompts: 4", "prompts: 4\n  samples: 4"),
        said=("@samples: 4", "is 4", "prompts.responses", "2"),
    ),
    "a response longer than the context": wrong(
        ("max_new_tokens: 4", "max_new_tokens: 99"),
        said=("train.jsonl:1: ", "room for 0", "@path: train.jsonl"),
    ),
    "a maximum below a response": wrong(
        ("name: grpo", "name: dr_grpo\n  max_length: 3"),
        said=("@max_length:", "is 3", "sampling.max_new_tokens 4"),
    ),
}


COLUMNS = {
    "the prompt's": wrong(
        ("path: train.jsonl", "path: train.jsonl\n  prompt_key: promt"),
        said=("train.jsonl:1: ", "'promt'", "did you mean `prompt`?"),
    ),
    "the prompt's, of one record": wrong(
        said=("train.jsonl:2: ", "'prompt'", "expected in every record"),
        prepare=records("train.jsonl", answer="1"),
    ),
    "the reference's": wrong(
        ("key: answer", "key: anser"),
        said=("train.jsonl:1: ", "'anser' (prompts.reference_key)", "@path: train.jsonl"),
    ),
    "the held-out reference's": wrong(
        said=("held_out.jsonl:2: ", "'answer'", "evaluation.path"),
        prepare=records("held_out.jsonl", prompt="1"),
    ),
    "a response's": wrong(
        *RECORDED,
        DPO,
        ("good, bad", "god, bad"),
        said=("train.jsonl:1: ", "'god'", "did you mean `good`?", "prompts.responses"),
        prepare=records("train.jsonl", prompt="1", answer="1", good="1", bad="2"),
    ),
    "a response's, of one record": wrong(
        *RECORDED,
        DPO,
        said=("train.jsonl:2: ", "'bad'", "got none", "prompts.responses"),
        prepare=records("train.jsonl", prompt="1", answer="1", good="1"),
    ),
    "the scores'": wrong(
        *RECORDED,
        DPO,
        ("responses:", "score_key: scre\n  responses:"),
        said=("train.jsonl:1: ", "'scre'", "prompts.score_key"),
        prepare=records("train.jsonl", prompt="1", answer="1", score=[1, 2]),
    ),
    "a parameter's": wrong(
        ("reward.py:reward", "mine.py:needs_more"),
        said=("@name: mine", "oracle.name", "`anwser`", "did you mean `answer`?"),
    ),
    "a comparison's parameter": wrong(
        DPO, ("reward.py:reward", "mine.py:compares"), said=("@name: mine", "`judge`", "valid: answer")
    ),
    "a parameter's of an evaluation": wrong(
        ("held_out.jsonl", "held_out.jsonl\n  oracle: mine.py:needs_more"),
        said=("@oracle: mine", "evaluation.oracle", "`anwser`", "`answer`"),
    ),
}


CODE_OF_USERS = {
    "an oracle that cannot be made": wrong(
        ("reward.py:reward", "mine.py:Broken"),
        said=("@name: mine", "oracle.name is 'mine.py:Broken'", "KeyError: 'key'", "repair its constructor"),
    ),
    "a class that is no oracle": wrong(
        ("reward.py:reward", "mine.py:Game"),
        said=("@name: mine", "lacks submit and collect", "oracles/base.py"),
    ),
    "a file that fails": wrong(
        ("reward.py:reward", "broken.py:reward"),
        said=("@name: broken", "broken.py fails when imported", "ZeroDivisionError", "line 2"),
        prepare=lambda: write("broken.py", "\n1 / 0\n"),
    ),
    "a class that is no environment": wrong(
        PLAYED[0],
        (PLAYED[1][0], PLAYED[1][1].replace("Game", "Oracle")),
        said=("@environment:", "lacks reset and step"),
    ),
    "an environment that cannot be made": wrong(
        PLAYED[0],
        (PLAYED[1][0], PLAYED[1][1].replace("Game", "Broken")),
        said=("@environment:", "sampling.environment is", "KeyError", "repair its constructor"),
    ),
    "an option that the environment does not take": wrong(
        PLAYED[0],
        ("max_new_tokens: 4", "max_new_tokens: 4\n  environment: {name: mine.py:Steps, turn: 3}"),
        said=("@environment:", "sampling.environment.turn", "of mine.py:Steps", "did you mean `turns`?"),
    ),
    "an option that the environment refuses": wrong(
        PLAYED[0],
        ("max_new_tokens: 4", "max_new_tokens: 4\n  environment: {name: mine.py:Steps, turns: 0}"),
        said=("@environment:", "sampling.environment.name is", "options turns", "ValueError", "its options"),
    ),
    "an option that the environment lacks": wrong(
        PLAYED[0],
        (PLAYED[1][0], PLAYED[1][1].replace("Game", "Steps")),
        said=("@environment:", "sampling.environment is", "'turns'", "needs, as in"),
    ),
    "an environment without a name": wrong(
        PLAYED[0],
        ("max_new_tokens: 4", "max_new_tokens: 4\n  environment: {turns: 3}"),
        said=("@environment:", "`sampling.environment.name` is missing"),
    ),
    "a deadline that nothing reads": wrong(
        PLAYED[0],
        (PLAYED[1][0], PLAYED[1][1] + "\n  environment_deadline_s: 3"),
        said=("@environment_deadline_s:", "nothing reads sampling.environment_deadline_s", "remove it"),
    ),
    "an explorer that cannot be made": wrong(
        DPO,
        ("stop:", "explorer:\n  name: mine.py:Broken\nstop:"),
        said=("@name: mine", "explorer.name is 'mine.py:Broken'", "repair its constructor"),
    ),
}


SHAPES = {
    "an oracle that is no section": wrong(
        ("oracle:\n  name: reward.py:reward", "oracle: [reward.py:reward]"),
        said=("@oracle:", "expected fields of oracle, got ["),
    ),
    "an algorithm that is no section": wrong(
        ("algorithm:\n  name: grpo\n  prompts: 4\n  samples: 2", "algorithm: 3"),
        said=("@algorithm:", "expected fields of algorithm, got 3; write `field: value`"),
    ),
    "a stop that is a number": wrong(
        ("stop:\n  max_steps: 2", "stop: 2"),
        said=("@stop:", "expected fields of stop, got 2; write `field: value`"),
    ),
    "no end": wrong(
        ("stop:\n  max_steps: 2\n", ""),
        said=("@: ", "stop.max_steps is not set", "stop.max_queries", "prompts.epochs"),
    ),
    "no oracle": wrong(
        ("oracle:\n  name: reward.py:reward\n", ""),
        said=("@: ", "`oracle.name` is missing; add it, or pass --oracle.name"),
    ),
    "no YAML": wrong(
        ("max_new_tokens: 4", "max_new_tokens: [4"), said=("@oracle:", "this is not YAML", "(from line 7)")
    ),
}
