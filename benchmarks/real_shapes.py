"""One DPO step and one GRPO step with the shapes of real models. The table compares the estimate of `oat
check --memory` with the measured peak of memory.

    python benchmarks/real_shapes.py [--shapes qwen3-0.6b llama-3.2-1b] [--algorithms dpo grpo] [--threads 2]

Weights are random; shapes and vocabularies are those of the real models. All weights of Qwen3-0.6B are
trained; Llama-3.2-1B is trained through LoRA. Each run is `oat train` in a new process, with one step and one
checkpoint. It has 4 sequences of 256 tokens: 64 of the prompt and 192 of the response. The measured value is
the peak of the process's resident memory, minus that of a process that only imports the libraries. Units:
10^9 bytes; seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

from oat.config.load import load_config
from oat.forecast.estimate import Lengths, estimate
from oat.resolve.resolve import resolve

GB = 10**9
IMPORTS = (
    "import torch, transformers, peft, oat.cli, oat.assemble.run, oat.loop, oat.opening.open_run, "
    "oat.tracking.files"
)
REWARD = """import random


def reward(prompts, completions, **columns):
    return [random.random() for _ in completions]
"""


@dataclass(frozen=True)
class Shape:
    """The shape of a model, and the settings of its training.

    Attributes:
        tokens: number of ids of the tokenizer; the model may have more rows of embeddings.
        lora: rank of the adapter; None trains every weight.
        prompt, response: lengths in tokens.
    """

    config: PreTrainedConfig
    tokens: int
    lora: int | None = None
    prompt: int = 64
    response: int = 192


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
ALGORITHMS = {
    "dpo": {"name": "dpo", "prompts": 2, "samples": 2},
    "grpo": {"name": "grpo", "prompts": 1, "samples": 4},
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


def write_config(shape: Shape, algorithm: str, folder: Path, threads: int) -> Path:
    """Write the configuration of a run with one step into a folder that has the folder `model`, and return
    the file's path."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    prompts = [
        " ".join(f"w{1 + (place + number) % (shape.tokens - 1)}" for place in range(shape.prompt))
        for number in range(4)
    ]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8"
    )
    tree = {
        "run_dir": str(folder / algorithm),
        "model": {"path": str(folder / "model"), **({"lora": {"rank": shape.lora}} if shape.lora else {})},
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "sampling": {"max_new_tokens": shape.response},
        "oracle": {"name": f"{folder / 'reward.py'}:reward"},
        "algorithm": ALGORITHMS[algorithm],
        "learner": {"learning_rate": 1e-6},
        "compute": {"threads": threads},
        "engine": {"threads": threads},
        "stop": {"max_steps": 1},
    }
    file = folder / f"{algorithm}.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return file


def measure(command: Sequence[str]) -> int:
    """Run a process of this Python, and return the peak of its resident memory in bytes. The system's report
    is read every 0.01 s, until the process ends.

    Raises:
        RuntimeError: the exit code is not 0.
    """
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
            peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024)
        time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return peak


def compare(shape: Shape, algorithm: str, folder: Path, threads: int, imports: int) -> dict[str, Any]:
    """Make a run of one step, and return one row of the table: the estimated and the measured peak without
    imports, in 10^9 bytes, and the seconds of the step's parts.

    Args:
        folder: folder that has the folder `model`.
        imports: peak of a process that only imports the libraries, in bytes.
    """
    file = write_config(shape, algorithm, folder, threads)
    estimated = estimate(resolve(*load_config(file)), Lengths(shape.prompt))
    peak = measure(["-m", "oat", "train", str(file)])
    rows = (folder / algorithm / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = {name: json.loads(rows[-1])[f"time/{name}_s"] for name in ("sample", "learn", "step")}
    measured = peak - imports
    sizes = {"estimate_gb": estimated.peak / GB, "measured_gb": measured / GB, "imports_gb": imports / GB}
    return {"algorithm": algorithm, **sizes, "ratio": estimated.peak / measured, "seconds": seconds}


def rows(shapes: Sequence[str], algorithms: Sequence[str], threads: int) -> Iterator[dict[str, Any]]:
    """Yield one row of the table per shape and algorithm."""
    imports = measure(["-c", IMPORTS])
    versions = {
        "oat": {
            "oat": version("oat-align"),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }
    }
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            write_model(SHAPES[name], Path(folder) / "model")
            for algorithm in algorithms:
                settings = {"oat": {"lora": SHAPES[name].lora or "none", "micro_batch_size": 8}}
                yield {
                    "shape": name,
                    "settings": settings,
                    "versions": versions,
                    **compare(SHAPES[name], algorithm, Path(folder), threads, imports),
                }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for row in rows(options.shapes, options.algorithms, options.threads):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
