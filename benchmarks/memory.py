"""The memory that `oat check --memory` tells, beside the peak that a run takes.

    python benchmarks/memory.py [--shapes qwen3-0.6b llama-3.2-1b smollm2-full smollm2-lora]
        [--algorithms dpo grpo ppo] [--smollm2 FOLDER] [--threads 2]

Two kinds of shapes:
* `qwen3-0.6b`, all of whose weights learn, and `llama-3.2-1b`, of which an adapter learns: shapes and
  vocabularies of real models, and random weights. One step of DPO and one of GRPO.
* `smollm2-full` and `smollm2-lora`: SmolLM2-135M-Instruct from a folder, with its own weights. Two steps of
  DPO, GRPO and PPO: in the second one the optimiser has its moments from the beginning.

Each run is `oat train` in a process of its own. The measured value is the peak of the process's anonymous
memory (`RssAnon`, read each 0.01 s): what was allocated, without pages of files, which the system may drop.
Unit: 10^9 bytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from oat.assemble.run_inputs import gather_inputs
from oat.config.load import load_config
from oat.forecast.estimate import estimate, lengths_of
from oat.resolve.resolve import resolve

GB = 10**9
REWARD = """import random


def reward(prompts, completions, **columns):
    return [random.random() for _ in completions]
"""


@dataclass(frozen=True)
class Shape:
    """The shape of a model, and the settings of its training.

    Attributes:
        config: configuration of a model with random weights; None: the model is that of a folder.
        tokens: number of ids of the tokenizer; the model may have more rows of embeddings.
        lora: rank of the adapter; None trains every weight.
        prompt, response: lengths in tokens.
        steps: number of steps of a run.
        algorithms: the block `algorithm` of each run.
    """

    config: PreTrainedConfig | None = None
    tokens: int = 0
    lora: int | None = None
    prompt: int = 64
    response: int = 192
    steps: int = 1
    algorithms: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {
            "dpo": {"name": "dpo", "prompts": 2, "samples": 2},
            "grpo": {"name": "grpo", "prompts": 1, "samples": 4},
        }
    )


SHAPES = {
    "qwen3-0.6b": Shape(
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            tie_word_embeddings=True,
        ),
        tokens=151_669,
    ),
    "llama-3.2-1b": Shape(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=True,
        ),
        tokens=128_256,
        lora=8,
    ),
}
ALGORITHMS = ["dpo", "grpo", "ppo"]
SMOLLM2 = {"dpo": {"name": "dpo", "prompts": 4, "samples": 2}}
SMOLLM2 |= {"grpo": {"name": "grpo", "prompts": 2, "samples": 4}, "ppo": {"name": "ppo", "prompts": 8}}
SHAPES |= {
    "smollm2-full": Shape(response=64, steps=2, algorithms=SMOLLM2),
    "smollm2-lora": Shape(lora=8, response=64, steps=2, algorithms=SMOLLM2),
}


def write_model(shape: Shape, folder: Path) -> None:
    """Write a model of the shape with random weights, and a tokenizer with one id per word."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape.config)
    module.to_empty(device="cpu")
    module.tie_weights()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)
    module.save_pretrained(folder)
    built = Tokenizer(
        models.WordLevel(
            {"<eos>": 0, **{f"w{number}": number for number in range(1, shape.tokens)}}, unk_token="<eos>"
        )
    )
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>", unk_token="<eos>").save_pretrained(
        folder
    )


def write_config(shape: Shape, algorithm: str, folder: Path, threads: int, model: str | None = None) -> Path:
    """Write the configuration of a run into a folder, and return the file's path.

    Args:
        model: folder of the model; None: the folder `model` in `folder`, with random weights.
    """
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    if model is None:
        prompts = [
            " ".join(f"w{1 + (place + number) % (shape.tokens - 1)}" for place in range(shape.prompt))
            for number in range(4)
        ]
    else:
        prompts = [f"Write a long story, of many pages, about {number} ships." for number in range(40)]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8"
    )
    lora = {"lora": {"rank": shape.lora}} if shape.lora else {}
    tree = {
        "run_dir": str(folder / algorithm),
        "model": {"path": model or str(folder / "model"), **lora},
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "sampling": {"max_new_tokens": shape.response},
        "oracle": {"name": f"{folder / 'reward.py'}:reward"},
        "algorithm": dict(shape.algorithms[algorithm]),
        "learner": {"learning_rate": 1e-6},
        "compute": {"threads": threads},
        "engine": {"threads": threads},
        "stop": {"max_steps": shape.steps},
    }
    file = folder / f"{algorithm}.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return file


def measure(command: Sequence[str]) -> int:
    """Run a process of this Python, and return the peak of its anonymous memory in bytes. The system's report
    is read every 0.01 s, until the process ends.

    Raises:
        RuntimeError: the exit code is not 0.
    """
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
            peak = max(
                peak, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
            )
        time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return peak


def compare(
    shape: Shape, algorithm: str, folder: Path, threads: int, model: str | None = None
) -> dict[str, Any]:
    """Make a run, and return one row of the table: the told and the measured peak in 10^9 bytes.

    Args:
        folder: folder that has the folder `model`, if `model` is None.
        model: see `write_config`.
    """
    file = write_config(shape, algorithm, folder, threads, model)
    resolved = resolve(*load_config(file))
    lengths = lengths_of(gather_inputs(resolved, known=None))
    found = estimate(resolved, lengths)
    measured = measure(["-m", "oat", "train", str(file)])
    told = found.in_all
    sizes = {
        "told_gb": told / GB,
        "freed_gb": found.freed / GB,
        "measured_gb": measured / GB,
        "part": found.part,
    }
    return {"algorithm": algorithm, **sizes, "ratio": told / measured}


def rows(
    shapes: Sequence[str], algorithms: Sequence[str], threads: int, smollm2: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one row of the table per shape and algorithm. Shapes whose model is that of a folder are left out
    if the folder is not given."""
    libraries = {"torch": torch.__version__, "transformers": version("transformers")}
    versions = {"oat": {"oat": version("oat-align"), **libraries}}
    for name in shapes:
        shape = SHAPES[name]
        if shape.config is None and smollm2 is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if shape.config is not None:
                write_model(shape, Path(folder) / "model")
            for algorithm in shape.algorithms:
                if algorithm in algorithms:
                    settings = {"oat": {"lora": shape.lora or "none"}}
                    model = smollm2 if shape.config is None else None
                    compared = compare(shape, algorithm, Path(folder), threads, model)
                    yield {"shape": name, "settings": settings, "versions": versions, **compared}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(f"{'shape':<14}{'step':<6}{'GB told':>9}{'GB measured':>13}{'ratio':>7}  largest part")
    for row in rows(options.shapes, options.algorithms, options.threads, options.smollm2):
        sizes = f"{row['told_gb']:>9.2f}{row['measured_gb']:>13.2f}{row['ratio']:>7.2f}"
        print(f"{row['shape']:<14}{row['algorithm']:<6}{sizes}  {row['part']}", flush=True)


if __name__ == "__main__":
    main()
