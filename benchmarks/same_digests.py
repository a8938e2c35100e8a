"""Runs the same configurations with two checkouts of oat, and compares what the runs computed.

    python benchmarks/same_digests.py OLD NEW [--out DIR] [--inputs TREE] [--only TEXT ...] [--accept ...]

OLD and NEW are folders of checkouts. The Python of a side is its `.venv/bin/python`, or the one that runs
this script. Both sides get the same inputs, which are made once, of OLD or the checkout `--inputs`: its
`configs/` and `examples/`, the runs of `tests/golden` and `tests/begun`, and the configurations of
`tests/protocol`, with the users' code that these name. Models are tiny and random, a run has few steps, and
torch has one thread. Some of `configs/` are also run with a wider model and long responses. The sides work at
the same time. For each run the script compares the digests that `oat digest` prints, and the settings that
`oat train --print-config` prints. A run that has not learned had no gradient, so its digest is that of the
start, of what was sampled and of the answers.

Exit code 0: every run was made by both sides, all digests are equal, and no setting has another value. A
setting that only one side has is listed, and is no difference; nor is another value of a setting that
`--accept` names.

What is finished stays in DIR (default: a folder for temporary files, named by the checkouts), and is not made
again while a side's `src/` and the inputs are the same.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import yaml

SIDE = Path(__file__).resolve().parent / "sides" / "same_digests_side.py"
PORT = 18_231
"""The port of the substitute for servers. Its number is in the ledger, so it is always the same."""
SERVER = f"http://127.0.0.1:{PORT}"

WRITER = "inputs/writer"
"""In place of models of the hub: a Llama of one layer with random weights, one token for each character."""
LONG_WRITER = "inputs/long_writer"
"""A wider one, whose files put the weights at addresses at which rounding depends on where weights lie."""
LONG = ("cpu/dpo_online", "cpu/grpo_online", "cpu/ppo_online", "cpu/reinforce_pp_online", "xpo")
"""Configurations of `configs/` that are also run with few long responses. They end one after the other, so
that the last tokens are computed one row at a time."""
SUBSTITUTES: dict[str, dict[str, Any]] = {
    "grpo": {
        "prompts.path": "inputs/sums.jsonl",
        "oracle": {"name": "inputs/reward.py:reward"},
        "evaluation.path": "inputs/sums.jsonl",
    },
    "dpo": {
        "prompts.path": "inputs/sums.jsonl",
        "oracle": {"name": "inputs/reward.py:reward", "scale": 1.0, "labels": "threshold"},
        "evaluation.path": "inputs/sums.jsonl",
    },
    "grpo_ray": {
        "prompts.path": "inputs/sums.jsonl",
        "oracle": {"name": "inputs/reward.py:reward"},
        "evaluation.path": "inputs/sums.jsonl",
        "compute": {"threads": 1},
    },
    "grpo_processes": {
        "prompts.path": "inputs/sums.jsonl",
        "oracle": {"name": "inputs/reward.py:reward"},
        "evaluation.path": "inputs/sums.jsonl",
        "compute": {"threads": 1},
    },
    "dpo_ray": {
        "prompts.path": "inputs/sums.jsonl",
        "oracle": {"name": "inputs/reward.py:reward"},
        "evaluation.path": "inputs/sums.jsonl",
        "compute": {"threads": 1},
    },
    "dpo_remote": {"oracle.url": SERVER},
    "dpo_judge": {
        "oracle.url": f"{SERVER}/v1",
        "evaluation.oracle": {
            "name": "judge",
            "mode": "score",
            "model": "judge",
            "url": f"{SERVER}/v1",
            "rubric": "How cheerful the story is.",
        },
    },
    "reward_models/dpo": {"oracle.path": "inputs/judge", "model": "inputs/stories"},
    "reward_models/grpo": {"oracle.path": "inputs/judge", "model": "inputs/stories"},
    "reward_models/dpo_pairrm": {"oracle.path": "inputs/pairrm", "model": "inputs/stories"},
}
"""What a configuration of `configs/` gets in place of what a machine lacks: data of the user or of a
quickstart (sums, with a rule that ties seldom), a cluster of Ray (one process), a server (the one of this
script), and a trained reward model or PairRM (random ones of the same architecture). Every configuration gets
`WRITER` in place of its model, but for those whose reward model knows few characters: they get a model with
the same ones."""


class Answers(BaseHTTPRequestHandler):
    """A reward server and a judge whose answers depend on the text alone."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        reply = _completion(json.loads(body)) if "completions" in self.path else _feedback(body)
        self.send_response(200)
        kind = "json" if "completions" in self.path else "msgpack"
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


def _value(text: str) -> float:
    return sum(map(ord, text)) % 97 / 97


def _feedback(body: bytes) -> bytes:
    """Answer as `oat serve reward` does."""
    asked = msgspec.msgpack.decode(body)
    pairs = [0.25 + 0.5 * (_value(a) > _value(b)) for a, b in asked["batch_candidates"]]
    scores = list(map(_value, asked["batch_response"]))
    return msgspec.msgpack.encode({"batch_first_win_prob": pairs, "batch_score": scores})


def _completion(asked: Mapping[str, Any]) -> bytes:
    """Answer as a server of OpenAI's chat completions does, without log-probabilities."""
    text = asked["messages"][-1]["content"]
    found, _ = json.JSONDecoder().raw_decode(text, text.index('{"conversation"'))
    if "response" in found:
        said = str(round(9 * _value(found["response"])))
    else:
        said = str(int(_value(found["responses"]["0"]) < _value(found["responses"]["1"])))
    message = {"role": "assistant", "content": said}
    usage = {
        "prompt_tokens": len(text.split()),
        "completion_tokens": 1,
        "total_tokens": len(text.split()) + 1,
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": asked["model"]}
    return json.dumps({**head, "choices": [choice], "usage": usage}).encode()


def runs_of_configs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a run of each file below `configs/`: two steps, with few prompts and short responses."""
    for file in sorted(folder.rglob("*.yaml")):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "model" not in tree:  # no configuration of a run
            continue
        name = file.relative_to(folder).with_suffix("").as_posix()
        run_dir = f"runs/{name.replace('/', '_')}"
        flags = {"model": WRITER, **_small(tree), **SUBSTITUTES.get(name, {}), "run_dir": run_dir}
        if name.startswith("oracles/"):  # a random model is rewarded seldom, and shall learn all the same
            flags["algorithm.entropy"] = {"coef": 0.01}
        yield _run_of(name, f"configs/{name}", flags)


def runs_of_long(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield runs of the configurations `LONG`: six steps of two prompts."""
    for name in LONG:
        tree = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        long = {"sampling.max_new_tokens": 40, "algorithm.prompts": 2, "stop.max_steps": 6}
        run_dir = f"runs/long_{name.replace('/', '_')}"
        yield _run_of(
            name, f"long/{name}", {"model": LONG_WRITER, **_small(tree), **long, "run_dir": run_dir}
        )


def _run_of(file: str, name: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run of a file of `configs/` with these flags."""
    words = [f"configs/{file}.yaml"]
    for flag, value in flags.items():
        words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return {"name": name, "words": words, "run_dir": flags["run_dir"], "copies": []}


def _small(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that make a configuration small."""
    algorithm, explorer = tree["algorithm"], tree.get("explorer", {})
    flags: dict[str, Any] = {"stop.max_steps": 2, "algorithm.prompts": 4, "prompts.max_prompts": 12}
    if tree.get("sampling", {}).get("max_new_tokens", 0) > 8:
        flags["sampling.max_new_tokens"] = 8
    if "threshold" in algorithm:
        flags["algorithm.threshold"] = -9
    if "samples" in explorer:
        flags["explorer.samples"] = 4
    if "model_labels" in explorer:
        flags["explorer.model_labels.burn_in"] = 1
    if "evaluation" in tree:
        flags |= {"evaluation.max_prompts": 3, "evaluation.every": 1}
    if "best_of" in tree.get("evaluation", {}):
        flags["evaluation.best_of"] = 3
    return flags


def runs_of_stored(tests: Path) -> Iterator[dict[str, Any]]:
    """Yield the golden runs, which are replayed from their ledgers, and the run that an earlier program
    began, which is continued."""
    for name in ("dpo", "grpo"):
        given = ("model", "prompts.jsonl", "oracle.py", name)
        yield _stored(f"golden/{name}", tests / "golden", given, name, f"{name}/config.yaml")
    given = ("parts.py", "sums.jsonl", "words.jsonl", "held_out.jsonl", "model", "run")
    yield _stored("begun", tests / "begun", given, "run", "run/config.yaml")


def _stored(name: str, source: Path, given: Sequence[str], run_dir: str, config: str) -> dict[str, Any]:
    """Return a run in a folder of its own, since the paths in its configuration begin there."""
    return {
        "name": name,
        "folder": f"stored/{name.replace('/', '_')}",
        "words": [config],
        "run_dir": run_dir,
        "copies": [[str(source / each), each] for each in given],
    }


class Checkout:
    """One side.

    Attributes:
        folder: where it makes its runs.
        answers: the file with what it found.
    """

    def __init__(self, tree: Path, folder: Path):
        self.tree, self.folder = tree, folder
        self.answers = folder / "answers.jsonl"
        own = tree / ".venv" / "bin" / "python"
        self.python = str(own) if own.exists() else sys.executable
        self.hash = _hash_of(tree / "src")

    def call(self, words: Sequence[str], cwd: Path, *, check: bool) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree / "src"),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
            "TQDM_DISABLE": "1",
            "OPENAI_API_KEY": "none",
        }
        command = [self.python, str(SIDE), *words]
        subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=check
        )

    def make(
        self, runs: Sequence[Mapping[str, Any]], inputs: Path, of_inputs: str
    ) -> dict[str, dict[str, Any]]:
        """Make the runs that are not made yet, and return what was found of each, by name."""
        if not (self.folder / "inputs").exists():
            shutil.copytree(inputs, self.folder, dirs_exist_ok=True)
        missing = []
        found = self.read()
        keys = {}
        for run in runs:
            key = hashlib.sha256(json.dumps([self.hash, of_inputs, run]).encode()).hexdigest()
            keys[run["name"]] = key
            if found.get(run["name"], {}).get("key") != key:
                place = str(self.folder / run.get("folder", ""))
                missing.append(json.dumps({**run, "key": key, "folder": place}) + "\n")
        if missing:
            listed = self.folder / "runs.jsonl"
            listed.write_text("".join(missing), encoding="utf-8")
            self.call(["runs", str(listed), str(self.answers)], self.folder, check=False)
            found = self.read()
        return {name: found[name] for name, key in keys.items() if found.get(name, {}).get("key") == key}

    def read(self) -> dict[str, dict[str, Any]]:
        lines = self.answers.read_text(encoding="utf-8").splitlines() if self.answers.exists() else []
        return {answer["name"]: answer for answer in map(json.loads, lines)}


def _hash_of(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and "egg-info" not in str(file):
            found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def make_inputs(source: Checkout, out: Path) -> tuple[Path, list[dict[str, Any]], str]:
    """Make the inputs of both sides, if they are not there.

    Returns:
        A folder that each side copies, the runs, and a hash of what they were made of.
    """
    made = [
        source.tree / name
        for name in ("configs", "examples", "tests/golden", "tests/begun", "tests/protocol")
    ]
    told = [*map(_hash_of, made), SIDE.read_text(encoding="utf-8")]
    of_inputs = hashlib.sha256("".join(told).encode()).hexdigest()
    base, mark = out / "base", out / "inputs.json"
    if not mark.exists() or json.loads(mark.read_text(encoding="utf-8")) != of_inputs:
        for name in ("base", "old", "new"):
            shutil.rmtree(out / name, ignore_errors=True)
        (base / "inputs").mkdir(parents=True)
        for name in ("configs", "examples"):
            shutil.copytree(source.tree / name, base / name)
        source.call(["inputs", str(base / "inputs"), str(source.tree)], base, check=True)
        mark.write_text(json.dumps(of_inputs), encoding="utf-8")
    protocol = json.loads((base / "inputs" / "protocol.json").read_text(encoding="utf-8"))
    configs = base / "configs"
    runs = [
        *runs_of_stored(source.tree / "tests"),
        *protocol,
        *runs_of_configs(configs),
        *runs_of_long(configs),
    ]
    return base, runs, of_inputs


def leaves(text: str) -> dict[str, Any]:
    """Return the settings of a configuration in YAML by dotted name; nothing if there is no text."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict) and node:
            for name, value in node.items():
                yield from walk(value, f"{path}.{name}" if path else str(name))
        else:
            yield path, node

    return dict(walk(yaml.safe_load(text), "")) if text else {}


def compare(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, accepted: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the outcome of one run, which is "equal" if all is well, and lines about its settings."""
    if old is None or new is None:
        return "not made", []
    before, after = (leaves(one["settings"]) for one in (old, new))
    both = before.keys() & after.keys()
    changed = [name for name in sorted(both) if before[name] != after[name]]
    lines = [f"{name}: {before[name]!r} -> {after[name]!r}" for name in changed]
    for side, own in (("OLD", before), ("NEW", after)):
        if before and after:
            lines += [f"{name}: only {side} has it" for name in sorted(own.keys() - both)]
        elif not own:
            changed.append("all")
            lines.append(f"{side} prints no settings")
    failed = [(side, one) for side, one in (("OLD", old), ("NEW", new)) if one["code"]]
    if failed:
        said = [f"{side} ended with {one['code']}: {' '.join(one['said'].split())}" for side, one in failed]
        return f"failed: {', '.join(side for side, _ in failed)}", [*said, *lines]
    mine, theirs = old["digest"], new["digest"]
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if names or not mine:
        return f"differs: {', '.join(names)}", lines
    return ("equal" if set(changed) <= set(accepted) else "settings differ"), lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="runs with this text in their name"
    )
    parser.add_argument("--inputs", type=Path, metavar="TREE", help="make the inputs of this checkout")
    parser.add_argument("--accept", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    trees = [options.old.resolve(), options.new.resolve()]
    named = hashlib.sha256("\0".join(map(str, trees)).encode()).hexdigest()[:12]
    out: Path = (options.out or Path(tempfile.gettempdir()) / f"oat_same_digests_{named}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    old, new = (Checkout(tree, out / name) for tree, name in zip(trees, ("old", "new"), strict=True))
    source = Checkout(options.inputs.resolve(), out) if options.inputs else old
    base, runs, of_inputs = make_inputs(source, out)
    runs = [run for run in runs if any(text in run["name"] for text in options.only)]
    server = ThreadingHTTPServer(("127.0.0.1", PORT), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda side: side.make(runs, base, of_inputs), (old, new)))
    print(file=sys.stderr)
    server.shutdown()
    print("| run | outcome | has learned | weights in OLD | in NEW |\n" + "| --- " * 5 + "|")
    outcomes = {}
    told: dict[str, list[str]] = {}
    for name in (run["name"] for run in runs):
        one, other = (side.get(name) for side in found)
        outcomes[name], lines = compare(one, other, options.accept)
        weights = [(each or {}).get("digest", {}).get("weights", "")[:12] for each in (one, other)]
        has_learned = "yes" if (one or {}).get("learned") else "no"
        print(f"| {name} | {outcomes[name]} | {has_learned} | {' | '.join(weights)} |")
        for line in lines:
            told.setdefault(line, []).append(name)
    print()
    for line, names in told.items():
        print(f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {line}")
    different = sum(outcome != "equal" for outcome in outcomes.values())
    print(f"{len(outcomes)} runs, {different} of them not equal")
    return 1 if different or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
