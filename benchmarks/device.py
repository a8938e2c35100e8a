"""Complete steps of GRPO, PPO, and DPO with an explorer (SEA) on one GPU: generation, rewards of a rule,
choice of pairs (SEA), values of a critic (PPO), log-probabilities of a reference, updates, and the new
weights in the engine.

    python benchmarks/device.py [--sizes 500M] [--rows grpo ppo] [--steps 4] [--profile gpu]

Load: 64 prompts of 16 to 64 tokens, 8 samples per prompt, at most 512 new tokens. The end-of-text has
probability 1 / 128, so lengths are geometric with mean about 128. The engine is in bfloat16, and the learner
computes under autocast, with weights of float32. GRPO has a reference (`kl_coef: 0.05`) and one pass; PPO has
a critic of the policy's size, a reference and four passes, with one optimiser step each. The two rows of SEA
have 25 prompts with 20 samples, and an ensemble of 20 members with hidden layers of 128 that reads the last
layer's states, of the policy (`sea`) or of the reference (`sea_reference`). The learning rate is so small
that lengths do not change.

The first step is left out. A row has the medians of the others: the seconds of a step and of its parts,
the tokens that are sampled and learned per second of their part, and the peak of the device's memory over the
run.
"""

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from paced_run import paced_run
from task import RATE, SIZES, make_model, prompts, text

LOADS = {"500M": (64, 8, 512, 128), "tiny": (4, 2, 16, 8)}
"""Prompts, samples per prompt, largest number of new tokens, and their mean number."""
CANDIDATES = {"500M": (25, 20), "tiny": (2, 4)}
"""Prompts and samples per prompt with an explorer."""
ROWS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "kl_coef": 0.05},
    "ppo": {"name": "ppo", "epochs": 4, "kl_reward_coef": 0.05},
    "sea": {"name": "dpo"},
    "sea_reference": {"name": "dpo"},
}
"""The section `algorithm` of each row."""
BACKBONES = {"sea": "policy", "sea_reference": "reference"}
GAPS = ("logps/recorded_gap", "logps/recorded_gap_max")
WARM = 1
"""First steps, which are not counted."""


def write_inputs(size: str, folder: Path) -> None:
    """Write a model of this size, prompts and a rule."""
    prompt_count, _, _, mean = LOADS[size]
    make_model(size, folder / "model", mean=mean)
    lines = [json.dumps({"prompt": text(ids)}) + "\n" for ids in prompts(prompt_count, SIZES[size][0])]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "rule.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [sum(len(word) % 2 == 0 for word in text.split()) / 100 for text in completions]\n",
        encoding="utf-8",
    )


def shape(size: str, row: str) -> tuple[int, int]:
    """Return the number of prompts of a step, and of samples per prompt."""
    return CANDIDATES[size] if row in BACKBONES else LOADS[size][:2]


def configuration(folder: Path, size: str, row: str, profile: str, micro_tokens: int) -> dict[str, Any]:
    """Return the configuration of a run on these inputs, as plain data."""
    prompt_count, samples = shape(size, row)
    cap = LOADS[size][2]
    half = profile == "gpu"
    explorer = {"name": "ensemble", "samples": samples, "features": {"backbone": BACKBONES.get(row)}}
    return {
        "run_dir": str(folder / row),
        "model": {"path": str(folder / "model")},
        "prompts": {"path": str(folder / "train.jsonl")},
        "sampling": {"max_new_tokens": cap},
        "engine": {"max_rows": prompt_count * samples, **({"dtype": "bfloat16"} if half else {})},
        "oracle": {"name": f"{folder / 'rule.py'}:even"},
        **({"explorer": explorer} if row in BACKBONES else {}),
        "algorithm": {
            "prompts": prompt_count,
            **({} if row in BACKBONES else {"samples": samples}),
            **ROWS[row],
        },
        "learner": {
            "learning_rate": RATE,
            "micro_batch_tokens": micro_tokens,
            **({"autocast": "bfloat16"} if half else {}),
        },
        "checkpoint": {"every": 1000},
        "compute": {"profile": profile},
        "stop": {"max_steps": 1000},
    }


def measured(folder: Path, size: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row. The metrics of every step go to the standard error as they come."""
    file = folder / f"{name}.yaml"
    tree = configuration(folder, size, name, options.profile, options.micro_tokens)
    file.write_text(json.dumps(tree), encoding="utf-8")
    metrics, paced = paced_run(file)
    rows = []
    for _ in range(WARM + options.steps):
        paced.step()
        rows.append(dict(metrics))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    prompt_count, samples = shape(size, name)
    sequences = prompt_count * samples
    learned = prompt_count * (2 if name in BACKBONES else samples)
    each = [
        {
            "step_s": row["time/step_s"],
            "sample_s": row["time/sample_s"],
            "learn_s": row["time/learn_s"],
            "sampled_tokens_per_s": sequences * row["response/length"] / row["time/sample_s"],
            "learned_tokens_per_s": learned * row["response/length"] / row["time/learn_s"],
            "length": row["response/length"],
            **({"explore_s": row["time/explore_s"]} if "time/explore_s" in row else {}),
            **{name: value for name, value in row.items() if name.startswith("roofline/")},
        }
        for row in rows[WARM:]
    ]
    on_gpu = options.profile == "gpu"
    return {
        "size": size,
        "row": name,
        **{name: median(row[name] for row in each) for name in each[0]},
        **{gap: max(row[gap] for row in rows) for gap in GAPS if gap in rows[0]},
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {name: version(name) for name in ("oat-align", "torch", "transformers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["500M"], choices=list(LOADS))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--profile", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--micro-tokens", type=int, default=16_384)
    options = parser.parse_args()
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory:
            write_inputs(size, Path(directory))
            for name in options.rows:
                if options.profile == "gpu":
                    torch.cuda.reset_peak_memory_stats()
                print(json.dumps(measured(Path(directory), size, name, options)), flush=True)


if __name__ == "__main__":
    main()
