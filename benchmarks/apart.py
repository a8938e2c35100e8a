"""What it costs that actors work in processes of their own: of this machine (`compute.runtime: processes`),
or of a Ray cluster (`ray`).

    python benchmarks/apart.py [--size 50M] [--repetitions 5]

The cluster is one of this machine, which begins and ends with its run. Models have random weights, and
`engine.deterministic` is set. Each kind of run is made by a process of its own, and they take turns; so the
local run too is measured beside the processes of the others, which then wait.

* `steps`: the seconds of a step of GRPO with one actor, and of the local run. A turn is one step or several.
  All runs make equally many steps, and must have equal digests.
* `starts`: the seconds in which one actor starts, from the call that starts it to its first reply.
* `transfer`: the seconds in which all actors get new weights, with both proofs that read them back
  (`learner.weights_proof`), and those of a broadcast: as many bytes, in as many calls, through the same
  processes. Nothing encodes, checks or loads these bytes. And by how much the resident memory of the
  learner's process rises while weights leave, and how many bytes it keeps in memory that it shares.
* `kills`: by how many seconds steps take longer in which an actor is killed, with a standby and without. All
  processes are ready before the first of these steps. They take so long that the process which replaces the
  standby is ready within them, so its start is part of the cost.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from peers import THREADS, Side

FREED_S = 1.5
"""Seconds in which the cluster frees the memory of what was sent before. A step takes longer."""
LAST = 100_000
"""Steps of a run that is not brought to its end."""
WARM_UP = 2
OF_TRANSFERS = 20
"""Transfers of a row. One takes a tenth of a second, and what else the machine does changes it much."""
OF_KILL = 30
"""Steps in which an actor is killed."""


RUNTIMES = ("processes", "ray")


def steps(size: str, repetitions: int, count: int) -> dict[str, Any]:
    """Return the seconds of a step of each runtime, and the ratios to the local one.

    Args:
        size: of the model; see `sides/apart_side.py`.
        count: steps of a turn.
    """
    clusters = {**{runtime: {"runtime": runtime} for runtime in RUNTIMES}, "local": {}}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sides = {name: stack.enter_context(Side(sys.executable, "apart_side.py")) for name in clusters}
        sides["local"].ask("make", folder=folder, size=size)
        last = WARM_UP + repetitions * count
        for name, side in sides.items():
            versions = _begin(side, folder, size, name, clusters[name], last)
            side.ask("steps", count=WARM_UP)
        took: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repetitions):
            for name, side in sides.items():
                took[name].append(side.ask("steps", count=count)["seconds"] / count)
        digests = [side.ask("digest") for side in sides.values()]
    return {
        "seconds": {name: median(values) for name, values in took.items()},
        "ratios": {runtime: _ratio(took[runtime], took["local"]) for runtime in RUNTIMES},
        "same_digests": all(digest == digests[-1] for digest in digests),
        "settings": {"oat": {"steps": count}},
        "versions": versions,
    }


def starts(repetitions: int) -> dict[str, Any]:
    """Return the seconds in which an actor starts in each runtime, and the ratio of ours to Ray's."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sides = {name: stack.enter_context(Side(sys.executable, "apart_side.py")) for name in RUNTIMES}
        sides["ray"].ask("make", folder=folder, size="tiny")
        for name, side in sides.items():
            versions = _begin(side, folder, "tiny", name, {"runtime": name, "actors": 1}, LAST)
        took: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repetitions):
            for name, side in sides.items():
                took[name].append(side.ask("started")["seconds"])
    return {
        "seconds": {name: median(values) for name, values in took.items()},
        **_ratio(took["processes"], took["ray"]),
        "settings": {"oat": {}},
        "versions": versions,
    }


def transfer(size: str, repetitions: int, actors: int, runtime: str) -> dict[str, Any]:
    """Return the seconds of a broadcast and of a transfer with each proof, and the ratios of the transfers to
    the broadcast."""
    ways: dict[str, dict[str, Any]] = {
        "broadcast": {"verb": "broadcast"},
        **{proof: {"verb": "transfer", "proof": proof} for proof in ("sample", "all")},
    }
    with tempfile.TemporaryDirectory() as folder, Side(sys.executable, "apart_side.py") as side:
        side.ask("make", folder=folder, size=size)
        versions = _begin(side, folder, size, runtime, {"runtime": runtime, "actors": actors}, LAST)
        answers: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for repetition in range(repetitions + 1):
            for way, command in ways.items():
                time.sleep(FREED_S)
                answers[way] += [side.ask(**command)][:repetition]
    took = {way: [answer["seconds"] for answer in each] for way, each in answers.items()}
    return {
        "bytes": answers["all"][0]["bytes"],
        "bucket": answers["all"][0]["bucket"],
        "memory": max(answer["memory"] for proof in ("sample", "all") for answer in answers[proof]),
        "kept": max(answer["kept"] for answer in answers["sample"]),
        "seconds": {way: median(values) for way, values in took.items()},
        "ratios": {proof: _ratio(took[proof], took["broadcast"]) for proof in ("sample", "all")},
        "settings": {"oat": {"runtime": runtime, "actors": actors}},
        "versions": versions,
    }


def kills(size: str, repetitions: int, standby: int, count: int, runtime: str) -> dict[str, Any]:
    """Return by how many seconds `count` steps take longer if an actor is killed in them: the median, and the
    least and the greatest difference."""
    with tempfile.TemporaryDirectory() as folder, Side(sys.executable, "apart_side.py") as side:
        side.ask("make", folder=folder, size=size)
        versions = _begin(side, folder, size, runtime, {"runtime": runtime, "standby": standby}, LAST)
        side.ask("steps", count=WARM_UP)
        pairs = []
        for _ in range(repetitions):
            without = side.ask("killed", count=count, after=None)["seconds"]
            pairs.append((side.ask("killed", count=count, after=0.3 * without / count)["seconds"], without))
    costs = [killed - without for killed, without in pairs]
    return {
        "cost": median(costs),
        "spread": (min(costs), max(costs)),
        "seconds": median(without for _, without in pairs),
        "settings": {"oat": {"runtime": runtime, "standby": standby, "steps": count}},
        "versions": versions,
    }


def rows(repetitions: int) -> Iterator[list[str]]:
    """Yield the rows of the table, and its head before them."""
    yield ["what", "seconds: apart, compared with", "apart / compared with", "target", "digests", "with"]
    for size, count, targets in (("50M", 1, ("1.05", "1.10")), ("quickstart", 10, ("1.25", "1.25"))):
        row = steps(size, repetitions, count)
        seconds, same = row["seconds"], "equal" if row["same_digests"] else "differ"
        for (runtime, ratio), target in zip(row["ratios"].items(), targets, strict=True):
            both = f"{seconds[runtime]:.2f}, {seconds['local']:.2f}"
            what = f"a step, {size}: `{runtime}`, `local`"
            yield [what, both, _shown(ratio), f"at most {target}", same, _with(row)]
    row = starts(repetitions)
    both = f"{row['seconds']['processes']:.2f}, {row['seconds']['ray']:.2f}"
    yield ["an actor starts: `processes`, `ray`", both, _shown(row), "at most 0.5", "", _with(row)]
    for runtime, actors in (("processes", 1), ("processes", 2), ("ray", 2)):
        row = transfer("50M", OF_TRANSFERS, actors, runtime)
        for proof, ratio in row["ratios"].items():
            both = f"{row['seconds'][proof]:.3f}, {row['seconds']['broadcast']:.3f}"
            what = f"new weights ({row['bytes'] / 1e6:.0f} MB), proof `{proof}`: transfer, broadcast"
            target = "at most 1.3" if proof == "sample" else ""
            yield [what, both, _shown(ratio), target, "", _with(row)]
        what = "memory of the learner's process while weights leave, above the rest: MB, largest bucket"
        both = f"{row['memory'] / 1e6:.0f}, {row['bucket'] / 1e6:.0f}"
        yield [what, both, f"{row['memory'] / row['bucket']:.2f}x", "", "", _with(row)]
        if row["kept"]:
            what = "weights in shared memory, for actors that come later: MB, the model"
            both = f"{row['kept'] / 1e6:.0f}, {row['bytes'] / 1e6:.0f}"
            yield [what, both, f"{row['kept'] / row['bytes']:.2f}x", "", "", _with(row)]
    for runtime, standby in (("processes", 1), ("processes", 0), ("ray", 1)):
        row = kills("quickstart", repetitions, standby, OF_KILL, runtime)
        least, greatest = row["spread"]
        what = f"{OF_KILL} steps, quickstart, {standby} standby: an actor is killed, none is"
        both = f"{row['seconds'] + row['cost']:.1f}, {row['seconds']:.1f}"
        shown, target = f"{row['cost']:.1f} s more ({least:.1f}-{greatest:.1f})", "at most 2 s more"
        yield [what, both, shown, target if standby else "", "", _with(row)]


def _shown(row: Mapping[str, Any]) -> str:
    least, greatest = row["spread"]
    return f"{row['ratio']:.2f}x ({least:.2f}-{greatest:.2f})"


def _with(row: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name} {value}" for name, value in row["settings"]["oat"].items())
    return f"oat: {given}; " + ", ".join(
        f"{name} {number}" for name, number in row["versions"]["oat"].items()
    )


def _begin(
    side: Side, folder: str, size: str, name: str, cluster: Mapping[str, Any], last: int
) -> dict[str, dict[str, str]]:
    """Begin a run, and return the versions."""
    return {
        "oat": side.ask(
            "train", folder=folder, size=size, name=name, threads=THREADS, steps=last, cluster=cluster
        )
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of two medians, and the least and the greatest ratio of a repetition."""
    each = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"ratio": median(ours) / median(theirs), "spread": (min(each), max(each))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="50M", choices=("50M", "quickstart", "tiny"))
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    size, repetitions = options.size, options.repetitions
    print(json.dumps(steps(size, repetitions, 1 if size == "50M" else 10)), flush=True)
    print(json.dumps(starts(repetitions)), flush=True)
    for runtime in RUNTIMES:
        for actors in (1, 2):
            print(json.dumps(transfer(size, OF_TRANSFERS, actors, runtime)), flush=True)
        for standby in (1, 0):
            print(json.dumps(kills("quickstart", repetitions, standby, OF_KILL, runtime)), flush=True)


if __name__ == "__main__":
    main()
