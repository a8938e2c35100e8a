"""The sides of `benchmarks/same_digests.py`, each with the `oat` that comes first in its PYTHONPATH.

    python same_digests_side.py inputs FOLDER TREE    makes models, data and configurations for both sides
    python same_digests_side.py runs FILE ANSWERS     makes the runs that are listed in FILE

Inputs are made with the helpers of the tests in TREE (`tests/support`, `tests/protocol`), so TREE's `oat`
must be that in the path. The command `runs` makes each run of FILE, a line of JSON, with the command line of
`oat`, and appends what it found to the file ANSWERS.
"""

import inspect
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 6) for b in range(4)]
REWARD = """
def reward(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 97) for text in completions]
"""
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKS = ("<think>", "</think>", "<answer>", "</answer>", "happy", r"\boxed{")
WORDS = tuple(
    f" {word}{end}"
    for word in ("happy", "love", "good", "great", "nice", "sad", "bad", "awful", "hate", "hurt")
    for end in ("", ".", "!", ",", "?")
)
"""What the oracles of `configs/` look for, as single tokens, so that a random model writes some of it."""
SAID = 600
"""Characters of a failed command's last output that are kept."""


def make_inputs(folder: Path, tree: Path) -> list[dict[str, Any]]:
    """Write models and data into a folder, and the configurations of the protocol tests.

    Returns:
        The runs of the protocol tests, as `same_digests.py` lists them.
    """
    sys.path[:0] = [str(tree / "tests" / name) for name in ("support", "protocol", "oracles")]
    import string

    from fixtures import make_model
    from tiny_models import build_config, save_model, save_reward_model

    for writer, width in (("writer", 16), ("long_writer", 128)):
        make_model(folder / writer, hidden=width, tokens=[*string.printable, *MARKS, *WORDS])
        for name, changes in {
            "config.json": {"max_position_embeddings": 4096},
            "tokenizer_config.json": {"chat_template": TEMPLATE},
        }.items():
            file = folder / writer / name
            stored = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps({**stored, **changes}), encoding="utf-8")
    misalign(folder / "long_writer" / "model.safetensors")
    save_model(folder / "stories", build_config("llama", layers=1, context=4096))
    save_reward_model(folder / "judge", build_config("llama", layers=1, context=4096))
    pairrm = import_module("test_oracle_pairrm")
    saved = _function(pairrm.path)(SimpleNamespace(mktemp=lambda _: _new(folder / "pairrm")))
    lines = "".join(json.dumps(record) + "\n" for record in SUMS)
    (folder / "sums.jsonl").write_text(lines, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    assert Path(saved) == folder / "pairrm"
    return list(_protocol(folder / "protocol", tree))


def misalign(file: Path) -> None:
    """Lengthen the header of a safetensors file with spaces until its tensors begin 24 bytes behind a
    multiple of 64. A product of one row then rounds differently in the file's pages and in memory of the
    allocator."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    longer = size + (24 - 8 - size) % 64
    header = data[8 : 8 + size].ljust(longer)
    file.write_bytes(longer.to_bytes(8, "little") + header + data[8 + size :])


def _protocol(folder: Path, tree: Path) -> Iterator[dict[str, Any]]:
    """Write the configuration of each protocol test, by its fixture `config`, and yield the runs.

    The answers of the test of late answers come in another order each time. Its run is made here, and both
    sides get its ledger, in which every answer is."""
    from bench import make_bench

    bench = make_bench(_new(folder / "bench"))
    numbers = count()
    factory = SimpleNamespace(mktemp=lambda name: _new(folder / f"{next(numbers)}_{name}"))
    for file in sorted((tree / "tests" / "protocol").glob("test_*.py")):
        module = import_module(file.stem)
        name = file.stem.removeprefix("test_")
        if not hasattr(module, "config"):
            continue
        module.oat = lambda *_: 0  # type: ignore[attr-defined]  # a fixture may also train
        for parameter in _parameters(module):
            given = {
                "bench": bench,
                "tmp_path_factory": factory,
                "folder": folder,
                "request": SimpleNamespace(param=parameter),
            }
            function = _function(module.config)
            config = function(**{each: given[each] for each in inspect.signature(function).parameters})
            yield _run(f"protocol/{name}" + (f"/{parameter}" if parameter else ""), config)
    late = import_module("test_late")
    home = _new(folder / "late")
    with late.server() as port:
        oracle = f"{tree / 'tests' / 'protocol' / 'late_oracle.py'}:LateOracle"
        config = late.config_of(bench, home, oracle, port=port, max_wait_s=60.0)
        assert late.oat("train", config) == 0
    late.keep(config.with_suffix(""), home / "kept")
    yield {**_run("protocol/late", config), "copies": [[str(home / "kept"), _run_dir("protocol/late")]]}


def _run(name: str, config: Path) -> dict[str, Any]:
    run_dir = _run_dir(name)
    return {"name": name, "words": [str(config), "--run_dir", run_dir], "run_dir": run_dir, "copies": []}


def _run_dir(name: str) -> str:
    return f"runs/{name.replace('/', '_')}"


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _function(fixture: Any) -> Any:
    """Return the function of a fixture of pytest."""
    return fixture._get_wrapped_function()


def _parameters(module: ModuleType) -> list[Any]:
    return list(module.config._fixture_function_marker.params or [None])


def make_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Make a run in its folder.

    Returns:
        "settings": what `--print-config` prints; "code": the exit code of `oat train`; "said": the end of its
        output, if it failed; "digest": by name; "learned": whether a step had a gradient.
    """
    Path(run["folder"]).mkdir(parents=True, exist_ok=True)
    os.chdir(run["folder"])
    shutil.rmtree(run["run_dir"], ignore_errors=True)
    for source, target in run["copies"]:
        if Path(source).is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    code, settings = _oat("train", *run["words"], "--print-config")
    settings = settings if code == 0 else ""
    code, said = _oat("train", *run["words"])
    found: dict[str, Any] = {
        "settings": settings,
        "code": code,
        "said": said[-SAID:] if code else "",
        "digest": {},
    }
    if code == 0:
        code, printed = _oat("digest", run["run_dir"])
        lines = [line.split() for line in printed.splitlines()]
        metrics = Path(run["run_dir"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        norms = [json.loads(row).get("optim/grad_norm", 0.0) for row in metrics]
        found |= {
            "code": code,
            "digest": dict(line for line in lines if len(line) == 2),
            "learned": any(norms),
        }
    return found


def _oat(*words: str) -> tuple[int, str]:
    """Return the exit code of a command line in this process, and what it printed."""
    from oat.cli import main

    printed, told = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(told):
            code = main(list(words))
    except (Exception, SystemExit):
        return 1, traceback.format_exc()
    return code, printed.getvalue() if code == 0 else printed.getvalue() + told.getvalue()


def main() -> None:
    verb, first, other = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if verb == "inputs":
        runs = make_inputs(first, other)
        (first / "protocol.json").write_text(json.dumps(runs), encoding="utf-8")
        return
    for run in map(json.loads, first.read_text(encoding="utf-8").splitlines()):
        answer = {"name": run["name"], "key": run["key"], **make_run(run)}
        with other.open("a", encoding="utf-8") as answers:
            answers.write(json.dumps(answer) + "\n")
        print(".", end="", file=sys.__stderr__, flush=True)


if __name__ == "__main__":
    main()
