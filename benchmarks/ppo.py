"""Complete steps of PPO, compared with those of TRL's last release that has a PPO trainer (1.12.0, in
`trl.experimental.ppo`): generation, rewards of a reward model, values of a critic, log-probabilities of a
reference, four passes of updates of policy and critic, and the new weights in the engine.

    python benchmarks/ppo.py [--shapes quickstart singles 5M] [--repetitions 3] [--peers PYTHON]

Loads:

    | | model | prompts x responses | new tokens |
    | --- | --- | --- | --- |
    | quickstart | Llama of 0.66M weights, the quickstart's start | 64 of 7 tokens x 8 | at most 4 |
    | singles | the same | 512 of 7 tokens x 1 | at most 4 |
    | 5M | Phi of 5M random weights | 64 of 16 to 64 tokens x 1 | at most 128, geometric with mean 32 |

Both sides learn as TRL counts (`end: final_state`, `reduction: token`), in float32, with one step of AdamW in
each of the four passes. TRL asks for a reward model; so both sides score with the same sequence classifier,
and the critic begins with its weights. The learning rate is so small that lengths do not change. Each side
samples its own responses. In the first load, many responses of a step are equal, and `oat` computes equal
rows of a pass once; in the second, few are equal and none is padded, so that `oat` has nothing to leave out.
The row has the mean length and the mean score of responses, and the value loss and the KL of each side: if
these agree, both sides do the same work.

TRL's best settings are searched first, in two stages: the micro-batch of the update, with a quarter of the
prompts; then the number of rows that are generated and scored together (`local_rollout_forward_batch_size`),
with all prompts. The measurement is in a new process.

TRL makes an optimiser step whenever `gradient_accumulation_steps` micro-batches are computed, however many
mini-batches there are, and after every micro-batch of the last batch of its data. So there is one mini-batch
here, and TRL's data do not end.

Memory is the peak of a step minus the level after imports. The sides take turns. Figures are medians.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from peers import THREADS, Side, best_of, in_turns, medians, rate, spread

sys.path.insert(0, str(Path(__file__).parent / "sides"))
from task import SIZES, make_judge, make_model

LOADS = {
    "quickstart": {"prompt_count": 64, "samples": 8, "cap": 4},
    "singles": {"prompt_count": 512, "samples": 1, "cap": 4},
    "5M": {"prompt_count": 64, "samples": 1, "cap": 128},
    "tiny": {"prompt_count": 4, "samples": 2, "cap": 8},
}
STEPS = {"quickstart": 3, "singles": 3, "5M": 1, "tiny": 1}
"""Steps of a turn."""
MICRO = {"quickstart": (16, 32, 64, 128), "singles": (16, 32, 64, 128), "5M": (1, 4, 16), "tiny": (2, 4)}
"""Micro-batches, in rows, that are tried for TRL."""
MADE = {"quickstart": (64, 256, 512), "singles": (64, 256, 512), "5M": (16, 32, 64), "tiny": (4, 8)}
"""Numbers of rows generated and scored together that are tried for TRL."""
OURS: dict[str, dict[str, int]] = {
    "quickstart": {"micro_batch_size": 128},
    "singles": {"micro_batch_size": 64},
    "5M": {"micro_batch_tokens": 1024},
    "tiny": {"micro_batch_tokens": 64},
}
"""The micro-batch of `oat`. Larger ones would be faster, and need more memory than TRL."""


def compare(shape: str, repetitions: int, peers: str | None) -> dict[str, Any]:
    """Return one row of the table: the steps per second and the memory of each side, with settings, versions,
    and the values that show that the sides do the same."""
    load = LOADS[shape]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _make_start(shape, Path(folder))
        ours = stack.enter_context(Side(sys.executable, "ppo_oat_side.py"))
        versions = {"oat": ours.ask("open", folder=folder, threads=THREADS)}
        settings: dict[str, Any] = {"oat": OURS[shape]}
        _begin(ours, micro=OURS[shape], **load)
        sides = {"oat": (ours, {"verb": "steps", "count": STEPS[shape]})}
        if peers is not None:
            best, settings["trl"] = _tuned(peers, folder, shape)
            theirs = stack.enter_context(Side(peers, "ppo_trl_side.py"))
            versions["trl"] = theirs.ask("open", folder=folder, threads=THREADS)
            _begin(theirs, **best, **load)
            sides["trl"] = (theirs, {"verb": "steps", "count": STEPS[shape]})
        answers = in_turns(sides, repetitions)
    measured = medians(answers, "steps", "peak_gb", "length", "score", "value_loss", "kl")
    return {
        "shape": shape,
        **load,
        **measured,
        "cpu_s": {side: median(a["cpu_s"] / a["steps"] for a in each) for side, each in answers.items()},
        "spread": spread(answers, "steps"),
        "parts": {
            name: median(answer["parts"][name] / answer["steps"] for answer in answers["oat"])
            for name in ("sample", "learn")
        },
        "settings": settings,
        "versions": versions,
    }


def _make_start(shape: str, folder: Path) -> None:
    """Write model, prompts and judge into a folder. The process that does it is none that is measured."""
    with Side(sys.executable, "ppo_oat_side.py") as maker:
        if shape in SIZES:
            make_model(shape, folder / "start")
            maker.ask("prompts", folder=str(folder), count=LOADS[shape]["prompt_count"])
        else:
            maker.ask("start", folder=str(folder))
    make_judge(folder)


def _begin(side: Side, **arguments: Any) -> None:
    """Begin to train, and make the first step, which is not measured."""
    side.ask("train", **arguments)
    side.ask("steps", count=1)


def _tuned(peers: str, folder: str, shape: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Return TRL's best micro-batch and number of rows generated together, and the settings with the steps
    per second of each number that was tried."""
    load = LOADS[shape]
    rows = load["prompt_count"] * load["samples"]
    fewer = {**load, "prompt_count": load["prompt_count"] // 4}
    with Side(peers, "ppo_trl_side.py") as side:
        side.ask("open", folder=folder, threads=THREADS)

        def attempt(load: dict[str, int], micro: int, made: int) -> float:
            side.ask("train", micro=micro, made=made, **load)
            return rate([side.ask("steps", count=1)], "steps")

        attempt({**load, "prompt_count": 1}, 1, 1)  # the first step of a process is slower
        micro, tried = best_of(
            [micro for micro in MICRO[shape] if micro <= rows // 4],
            lambda micro: attempt(fewer, micro, min(MADE[shape][0], rows // 4)),
        )
        made, tried_made = best_of(MADE[shape], lambda made: attempt(load, micro, made))
    settings = {
        "per_device_train_batch_size": micro,
        "tried": tried,
        "local_rollout_forward_batch_size": made,
        "tried_generation": tried_made,
    }
    return {"micro": micro, "made": made}, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["quickstart", "singles", "5M"], choices=list(LOADS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", help="python of an environment with a trl that has a PPO trainer")
    options = parser.parse_args()
    for shape in options.shapes:
        print(json.dumps(compare(shape, options.repetitions, options.peers)), flush=True)


if __name__ == "__main__":
    main()
