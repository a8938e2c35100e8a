"""Common mistakes with models, templates, vocabularies and memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from fixtures import ALPHABET, make_model
from mistakes import (
    DPO,
    PLAYED,
    TIED,
    Mistake,
    records,
    rewrite,
    without,
    write,
    wrong,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

TURN = "{{ m.role }}:{{ m.content }}{{ eos_token }}"


LOOP = "{% for m in messages %}BODY{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def template(body: str, *said: str) -> Mistake:
    """Return a mistake: a template that an episode of several turns cannot use."""
    loop = LOOP.replace("BODY", body)
    render = ("compute:", "render:\n  template: chat.jinja\ncompute:")
    return wrong(
        *PLAYED,
        render,
        said=("@template:", "render.template is 'chat.jinja'", *said),
        prepare=lambda: write("chat.jinja", loop),
    )


def more_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens(["<|one|>", "<|two|>", "<|three|>"])
    tokenizer.save_pretrained("model")


def more_rows(name: str, rows: int) -> Callable[[], None]:
    """Return a function that saves the model with `rows` rows in its embedding."""

    def resize() -> None:
        model = AutoModelForCausalLM.from_pretrained(name)
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.save_pretrained(name)

    return resize


def fewer_tensors() -> None:
    weights = load_file("model/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, "model/model.safetensors", {"format": "pt"})


def reference(*tokens: str, hidden: int = 16) -> Callable[[], None]:
    return lambda: make_model(Path("reference"), tokens=tokens, hidden=hidden)


def adapter(**told: object) -> Callable[[], None]:
    """Return a function that makes an adapter's directory without weights."""
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
    """Make a small model with a long context."""
    make_model(Path("large"))
    rewrite("large/config.json", max_position_embeddings=1024)


def make_huge() -> None:
    """Make a model of 14 billion parameters, with sparse files of zeros that take no room on the disk."""
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


LARGE = ("threads: 1", "threads: 1\n  memory_gb: ")


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
"""Mistakes whose message needs a search: many estimates of memory show what would fit."""
