"""What people do wrong, by kind: `oat check` and `oat train` end with exit code 2 and the same one message:
where, what, and what to do."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import ALPHABET, World, make_model, oat
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

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
TURN = "{{ m.role }}:{{ m.content }}{{ eos_token }}"
LOOP = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@dataclass(frozen=True)
class Mistake:
    """A configuration with a mistake.

    Attributes:
        changes: replacements in the text above.
        said: what the message must have; "@text" is the file and line that begins with the text, "@" the file
        alone.
        prepare: makes files beside it.
    """

    changes: tuple[tuple[str, str], ...]
    said: tuple[str, ...]
    prepare: Callable[[], None] | None = None


def wrong(
    *changes: tuple[str, str], said: tuple[str, ...], prepare: Callable[[], None] | None = None
) -> Mistake:
    return Mistake(changes, said, prepare)


def template(body: str, *said: str) -> Mistake:
    """A template that an episode of several turns cannot use."""
    loop = LOOP.replace("BODY", body)
    render = ("compute:", "render:\n  template: chat.jinja\ncompute:")
    return wrong(
        *PLAYED,
        render,
        said=("@template:", "render.template is 'chat.jinja'", *said),
        prepare=lambda: write("chat.jinja", loop),
    )


def write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def rewrite(name: str, **changes: object) -> None:
    """Change fields of a JSON file."""
    write(name, json.dumps({**json.loads(Path(name).read_text(encoding="utf-8")), **changes}))


def without(name: str) -> Callable[[], None]:
    """The model without one of its files."""
    return lambda: Path("model", name).unlink()


def more_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens(["<|one|>", "<|two|>", "<|three|>"])
    tokenizer.save_pretrained("model")


def more_rows(name: str, rows: int) -> Callable[[], None]:
    """A model with more rows than it had."""

    def resize() -> None:
        model = AutoModelForCausalLM.from_pretrained(name)
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.save_pretrained(name)

    return resize


def fewer_tensors() -> None:
    weights = load_file("model/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, "model/model.safetensors", {"format": "pt"})


def records(name: str, **record: object) -> Callable[[], None]:
    """A data file whose second record is this one."""
    return lambda: write(
        name,
        "".join(
            json.dumps(line) + "\n"
            for line in ({"prompt": "1+1=", "answer": "2", "good": "2", "bad": "3"}, record)
        ),
    )


def reference(*tokens: str, hidden: int = 16) -> Callable[[], None]:
    return lambda: make_model(Path("reference"), tokens=tokens, hidden=hidden)


def adapter(**told: object) -> Callable[[], None]:
    """An adapter's directory without its weights."""
    says = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "model",
        **told,
    }

    def make() -> None:
        Path("adapter").mkdir()
        write("adapter/adapter_config.json", json.dumps(says))

    return make


def make_large() -> None:
    """A model that is small, with room for long responses."""
    make_model(Path("large"))
    rewrite("large/config.json", max_position_embeddings=1024)


def make_huge() -> None:
    """A model of 14 billion parameters, with files of zeros that take no room on the disk."""
    shutil.copytree("model", "huge")
    config = LlamaConfig(
        vocab_size=18,
        hidden_size=16384,
        intermediate_size=131072,
        num_hidden_layers=2,
        num_attention_heads=128,
        eos_token_id=1,
    )
    config.save_pretrained("huge")
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    head, end = {}, 0
    for name, tensor in tensors.items():
        size = 2 * tensor.numel()
        head[name], end = (
            {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]},
            end + size,
        )
    text = json.dumps(head).encode()
    with Path("huge/model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


TIED = ("samples: 2", "samples: 2\n  kl_coef: 0.1")
LARGE = ("threads: 1", "threads: 1\n  memory_gb: ")

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
        ("stop:", "beta: 0.1\nstop:"), said=("@beta:", "`beta`", "did you mean `algorithm.beta`?")
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
    "a group of one": wrong(
        ("samples: 2", "samples: 1"), said=("@samples: 1", "algorithm.samples is 1", "at least 2")
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
        said=("train.jsonl:1: ", "'anser'", "set `reference_key`", "@path: train.jsonl"),
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

MODELS = {
    "a directory that is not there": wrong(
        ("path: model", "path: modl"),
        said=("@path: modl", "model.path is 'modl'", "there is no directory modl", "give"),
    ),
    "a hub id that cannot be had": wrong(
        ("path: model", "path: nobody/nothing"),
        said=("@path: nobody", "'nobody/nothing'", "from the hub", "hf download"),
    ),
    "a file": wrong(
        ("path: model", "path: train.jsonl\n"),
        said=("run.yaml:2: ", "model.path is 'train.jsonl'", "is a file", "give the directory"),
    ),
    "a directory without a model": wrong(
        said=("@path: model", "has no config.json", "save_pretrained"), prepare=without("config.json")
    ),
    "a model without weights": wrong(
        said=("@path: model", "model.safetensors", "save_pretrained"), prepare=without("model.safetensors")
    ),
    "a model without a tokenizer": wrong(
        said=("@path: model", "no tokenizer", "tokenizer.json"), prepare=without("tokenizer.json")
    ),
    "a model that lacks tensors": wrong(
        said=("@path: model", "lack 1 tensors", "`model.norm.weight`"), prepare=fewer_tensors
    ),
    "a model that is no language model": wrong(
        said=("@path: model", "is a `vit`", "no causal language model"),
        prepare=lambda: write("model/config.json", '{"model_type": "vit"}'),
    ),
    "a reference that is not there": wrong(
        TIED,
        ("path: model", "path: model\n  reference: nobody/nothing"),
        said=("@reference:", "model.reference is 'nobody/nothing'", "from the hub"),
    ),
    "four bits without an adapter": wrong(
        ("path: model", "path: model\n  quantize: nf4"),
        said=("@quantize:", "model.quantize is 'nf4'", "set model.lora"),
    ),
    "an adapter instead of a model": wrong(
        ("path: model", "path: adapter"),
        said=("@path: adapter", "adapter is an adapter; set model.adapter to it", "(model)"),
        prepare=adapter(),
    ),
    "an adapter that is not there": wrong(
        ("path: model", "path: model\n  adapter: adaptr"),
        said=("@adapter: adaptr", "adaptr holds no adapter", "oat export --adapter"),
    ),
    "an adapter of another kind": wrong(
        ("path: model", "path: model\n  adapter: adapter"),
        said=("@adapter: adapter", "use_dora True", "merge it"),
        prepare=adapter(use_dora=True),
    ),
    "an adapter without weights": wrong(
        ("path: model", "path: model\n  adapter: adapter"),
        said=(
            "@adapter: adapter",
            "model.adapter is 'adapter'",
            "adapter_model.safetensors",
            "as PEFT writes them",
        ),
        prepare=adapter(),
    ),
    "a reference that cannot follow": wrong(
        TIED,
        ("path: model", "path: model\n  reference: reference\n  reference_update: {mix: 0.5}"),
        said=("@reference_update:", "12 of their tensors do not correspond", "leave it out"),
        prepare=reference(*ALPHABET, hidden=32),
    ),
    "an adapter for layers that are not there": wrong(
        ("path: model", "path: model\n  lora: {targets: [q_prj]}"),
        said=("@lora:", "model.lora.targets", "'q_prj'", "q_proj"),
    ),
}

RENDER = ("compute:", "render:\n  template: {}\ncompute:")
TEMPLATES = {
    "no template of the tokenizer": wrong(
        (RENDER[0], RENDER[1].format("tokenizer")),
        said=(
            "@template:",
            "render.template is 'tokenizer'",
            "has no chat template",
            "set `render.template` to a .jinja file that",
        ),
    ),
    "no such template": wrong(
        (RENDER[0], RENDER[1].format("chatlm")), said=("@template:", "'chatlm'", "did you mean `chatml`?")
    ),
    "no such file": wrong(
        (RENDER[0], RENDER[1].format("no.jinja")),
        said=("@template:", "no.jinja", "No such file", "give the path"),
    ),
    "tokens that the tokenizer lacks": wrong(
        (RENDER[0], RENDER[1].format("chatml")),
        said=("@template:", "<|im_start|>", "add it to the tokenizer"),
    ),
    "a template that is no program": wrong(
        (RENDER[0], RENDER[1].format("chat.jinja")),
        said=("@template:", "cannot render", "choose another"),
        prepare=lambda: write("chat.jinja", "{% for"),
    ),
    "a template that leaves the response out": wrong(
        (RENDER[0], RENDER[1].format("chat.jinja")),
        said=("@template:", "leaves out an assistant's message", "choose one that keeps it"),
        prepare=lambda: write("chat.jinja", "{{ messages[0].content }}"),
    ),
    "a system message without a template": wrong(
        ("compute:", "render:\n  system: Be brief.\ncompute:"),
        said=("@render:", "needs a chat template", "set `render.template`"),
    ),
    "messages without a template": wrong(
        said=("train.jsonl:2: ", "needs a chat template", "set `render.template`"),
        prepare=records(
            "train.jsonl",
            prompt=[{"role": "system", "content": "1"}, {"role": "user", "content": "1"}],
            answer="1",
        ),
    ),
    "turns that are counted": template(
        "{{ loop.length }}" + TURN, "rewrites history", "changes an earlier message", "such as chatml"
    ),
    "the last turn alone": template(
        "{% if loop.revindex < 3 %}" + TURN + "{% endif %}", "rewrites history", "such as chatml"
    ),
    "turns from the last to the first": template(
        TURN.replace("m.", "messages[-loop.index]."), "rewrites history", "such as chatml"
    ),
    "the last turn in another form": template(
        "{% if loop.last %}>{% endif %}" + TURN, "rewrites history", "such as chatml"
    ),
    "reasoning of the last turn alone": template(
        TURN.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])"),
        "rewrites history",
        "drops the reasoning",
    ),
}

VOCABULARIES = {
    "tokens without rows": wrong(
        said=("@path: model", "19 tokens", "18 rows", "resize"), prepare=more_tokens
    ),
    "a tokenizer of another model": wrong(
        said=(
            "@path: model",
            "16 tokens",
            "512 rows",
            "cannot be the tokenizer of this model",
            "resize_token_embeddings(16)",
        ),
        prepare=more_rows("model", 512),
    ),
    "a reference that another tokenizer belongs to": wrong(
        TIED,
        ("path: model", "path: model\n  reference: reference"),
        said=(
            "@reference:",
            "model.reference is 'reference'",
            "16 tokens",
            "512 rows",
            "cannot be the tokenizer of this model",
        ),
        prepare=lambda: (
            make_model(Path("reference")),
            more_rows("reference", 512)(),
            Path("reference/tokenizer.json").unlink(),
        )[0],
    ),
    "rows without weights": wrong(
        said=("@path: model", "(18, 16)", "(99, 16)", "config.json"),
        prepare=lambda: rewrite("model/config.json", vocab_size=99),
    ),
    "an end that is no token": wrong(
        said=("@path: model", "id 17", "below 16", "give the tokenizer"),
        prepare=lambda: rewrite("model/generation_config.json", eos_token_id=17),
    ),
    "a smaller reference": wrong(
        TIED,
        ("path: model", "path: model\n  reference: reference"),
        said=("@reference:", "model.reference is 'reference'", "14 rows", "16 tokens", "same family"),
        prepare=reference(*ALPHABET[:10]),
    ),
    "a reference of other ids": wrong(
        TIED,
        ("path: model", "path: model\n  reference: reference"),
        said=("@reference:", "model.reference is 'reference'", "other ids", "same family"),
        prepare=reference(*reversed(ALPHABET)),
    ),
    "a reference of other ids, for pairs": wrong(
        DPO,
        ("path: model", "path: model\n  reference: reference"),
        said=("@reference:", "'+' 5 instead of 12", "same family"),
        prepare=reference(*reversed(ALPHABET)),
    ),
}

TOO_LARGE = {
    "weights and moments": wrong(
        (LARGE[0], f"{LARGE[1]}1e-5"),
        said=("@memory_gb:", "compute.memory_gb is 1e-05", "to go on all the same"),
    ),
    "long responses": wrong(
        ("path: model", "path: large"),
        ("max_new_tokens: 4", "max_new_tokens: 400"),
        (LARGE[0], f"{LARGE[1]}0.003"),
        said=("@memory_gb:", "forward and backward", "it would fit with learner.micro_batch_tokens: 404"),
        prepare=make_large,
    ),
    "many responses": wrong(
        ("path: model", "path: large"),
        ("samples: 2", "samples: 16"),
        ("4\noracle", "40\noracle"),
        (LARGE[0], f"{LARGE[1]}0.0005"),
        said=("@memory_gb:", "it would fit with", "learner.micro_batch_tokens: 44"),
        prepare=make_large,
    ),
    "a copy beside a checkpoint": wrong(
        DPO,
        ("compute:", "checkpoint:\n  every: 1\ncompute:"),
        (LARGE[0], f"{LARGE[1]}1.2e-4"),
        said=("@memory_gb:", "beside a checkpoint", "it would fit with"),
    ),
    "a cache that cannot hold a response": wrong(
        ("stop:", "engine:\n  cache_gb: 1e-6\nstop:"),
        said=(
            "@cache_gb:",
            "engine.cache_gb: keys and values of 8 tokens take",
            "the cache holds 0;",
            "raise engine.cache_gb",
        ),
    ),
    "a cache that cannot hold every row": wrong(
        ("stop:", "engine:\n  cache_gb: 1e-4\n  deterministic: true\nstop:"),
        said=("@cache_gb:", "keys and values of 8 tokens take", "GB in every row", "or engine.max_rows"),
    ),
    "more than is free": wrong(
        ("path: model", "path: huge"),
        prepare=make_huge,
        said=(
            "@: ",
            "# GB of memory are free",
            "GB for tensors",
            "take a smaller model",
            "set compute.memory_gb to",
        ),
    ),
}

LONG_SEARCHES = {"more than is free", "long responses", "many responses", "a copy beside a checkpoint"}
"""Those that work out what would fit from many estimates."""

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
        said=("@environment:", "sampling.environment is", "KeyError", "needs none"),
    ),
    "an explorer that cannot be made": wrong(
        DPO,
        ("stop:", "explorer:\n  name: mine.py:Broken\nstop:"),
        said=("@name: mine", "explorer.name is 'mine.py:Broken'", "repair its constructor"),
    ),
}

SHAPES = {
    "an oracle that is no section": wrong(
        ("oracle:\n  name: reward.py:reward", "oracle: reward.py:reward"),
        said=("@oracle:", 'write `oracle: {name: "reward.py:reward"}`'),
    ),
    "an algorithm that is no section": wrong(
        ("algorithm:\n  name: grpo\n  prompts: 4\n  samples: 2", "algorithm: grpo"),
        said=("@algorithm:", 'write `algorithm: {name: "grpo"}`'),
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

KINDS = {
    "typo": TYPOS,
    "shape": SHAPES,
    "unread": UNREAD,
    "arithmetic": ARITHMETIC,
    "column": COLUMNS,
    "model": MODELS,
    "template": TEMPLATES,
    "vocabulary": VOCABULARIES,
    "memory": TOO_LARGE,
    "code": CODE_OF_USERS,
}


def test_there_are_enough_of_each_kind() -> None:
    assert {kind: len(table) for kind, table in KINDS.items() if len(table) < 5} == {}


def cases() -> Iterator[Any]:
    for kind, table in KINDS.items():
        for name, mistake in table.items():
            yield pytest.param(
                mistake, id=f"{kind}: {name}", marks=[pytest.mark.slow] if name in LONG_SEARCHES else []
            )


@pytest.mark.sample(
    slow=("memory: weights and moments",),
    instead="tests/learner/test_precision.py refuses what does not fit where tokens are measured",
    seconds=8.6,
)
@pytest.mark.parametrize("mistake", [*cases()])
def test_a_mistake_is_one_message(
    mistake: Mistake,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(world.folder / "model", "model")
    for name in ("train.jsonl", "held_out.jsonl", "reward.py"):
        shutil.copy(world.folder / name, name)
    write("mine.py", (world.folder / "reward.py").read_text(encoding="utf-8") + CODE)
    text = RUN
    for old, new in mistake.changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    write("run.yaml", text)
    if mistake.prepare is not None:
        mistake.prepare()
    before = sorted(tmp_path.rglob("*"))
    messages = []
    for command in ("check", "train"):
        capsys.readouterr()
        assert oat(command, "run.yaml") == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"oat {command}: ")
        assert printed.err.count("\n") == 1
        messages.append(
            re.sub(
                r"\S+ GB of memory are free",
                "# GB of memory are free",
                printed.err.removeprefix(f"oat {command}: "),
            )
        )
    assert messages[0] == messages[1]
    said = [part if part[0] != "@" else place(text, part[1:]) for part in mistake.said]
    assert [part for part in said if part not in messages[0]] == [], messages[0]
    assert sorted(file for file in tmp_path.rglob("*") if "__pycache__" not in file.parts) == before, (
        "it leaves nothing behind"
    )


def test_what_lies_beside_the_configuration_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths are taken from the working directory; where the one beside the configuration was meant, the
    message says so."""
    shutil.copytree(world.folder / "model", tmp_path / "model")
    for name in ("train.jsonl", "held_out.jsonl", "reward.py"):
        shutil.copy(world.folder / name, tmp_path)
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    flags: list[str] = []
    for field, value in {
        "model.path": "model",
        "prompts.path": "train.jsonl",
        "evaluation.path": "held_out.jsonl",
        "oracle.name": "reward.py:reward",
    }.items():
        for command in ("check", "train"):
            assert oat(command, "../run.yaml", *flags) == 2
            error = capsys.readouterr().err
            assert field in error
            assert (
                f"; there is ../{value.split(':')[0]}, and paths are taken from the working directory"
                in error
            )
        flags += [f"--{field}", f"../{value}"]
    assert oat("check", "../run.yaml", *flags) == 0
    assert oat("check", "../run.yaml", *flags, "--model.path", "modl") == 2
    assert (
        f"there is no directory modl in {tmp_path / 'elsewhere'}, from where relative paths are taken, and it"
    ) in capsys.readouterr().err


AFTER_A_RUN = (
    ("oracle.name", "mine.py:rewrd", "has no rewrd"),
    ("model.path", "modl", "there is no directory"),
    ("prompts.prompt_key", "promt", "did you mean `prompt`?"),
    ("engine.cache_gb", "1e-6", "keys and values of"),
    ("learner.learning_rate", "0.1", "holds a run of another configuration"),
)


@pytest.mark.slow(instead="test_a_mistake_is_one_message", seconds=2.0)
def test_a_mistake_comes_before_what_differs_from_the_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1})
    write("mine.py", CODE)
    assert oat("train", config) == 0
    for field, value, said in AFTER_A_RUN:
        for command in ("check", "train"):
            capsys.readouterr()
            assert oat(command, config, f"--{field}", value) == 2
            assert said in capsys.readouterr().err, (command, field)


def place(text: str, start: str) -> str:
    """File and line of the one line that begins with a text; the file alone for none."""
    lines = [
        number for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith(start.strip())
    ]
    if start.startswith(": "):
        return "run.yaml:"
    assert len(lines) == 1, start
    return f"run.yaml:{lines[0]}"
