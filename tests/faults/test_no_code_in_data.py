"""R11: data cannot run code. The sources have no call that executes what it reads, and a pickle in a run or a
model is never opened."""

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import yaml
from fixtures import Finished, World, oat

import oat as package
from oat.config.yaml_text import Loader
from oat.runtime.worker import Worker

pytestmark = pytest.mark.fault("R11")

ROOT = Path(package.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
REVIEWED = {("config/flags.py", "yaml.load")}
"""Reviewed calls. `yaml.load` gets a SafeLoader, which a test below checks."""


def dotted(node: ast.expr) -> str:
    return (
        f"{dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else "?"
    )


def runs_data(source: str) -> set[str]:
    """Return the names in a source that could execute what they read."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} if node.module.split(".")[0] in MODULES else names & CALLS
        elif isinstance(node, ast.Call):
            found |= {dotted(node.func)} & CALLS
            asked = {
                word.arg
                for word in node.keywords
                if not (isinstance(word.value, ast.Constant) and word.value.value is False)
            }
            found |= asked & {"shell", "allow_pickle", "trust_remote_code"}
    return found


def test_the_reader_of_sources_sees_them() -> None:
    bad = (
        "import pickle\nfrom torch import load\nimport os, torch\neval(a)\ntorch.load(f)\nrun(c, "
        "shell=True)\nnp.load(f, allow_pickle=x)\n"
    )
    assert runs_data(bad) == {"pickle", "torch.load", "eval", "shell", "allow_pickle"}
    assert (
        runs_data("model.eval()\nre.compile(a)\nload(p, trust_remote_code=False)\nfrom json import load\n")
        == set()
    )


SENT = {
    ("processes/ray_broker.py", "self._ray.remote", ""),
    ("processes/ray_broker.py", "worker.remote", "log"),
    ("processes/ray_broker.py", "?.call.remote", "sent"),
    ("processes/ray_broker.py", "self._ray.put", "data"),
    ("processes/gpus.py", "self._ray.remote", ""),
    ("processes/gpus.py", "?.remote", ""),
    ("processes/gpus.py", "self._holder.visible.remote", ""),
}
"""What is handed to Ray, which pickles it: classes of ours without a state, the path of a log (text), and
calls (bytes, some as an array). A reply is bytes, too. Whoever could send a pickle to these processes has the
token of the cluster, with which one may start any process there (SECURITY.md)."""


def handed_to_ray(source: str) -> set[tuple[str, str]]:
    """Return the calls of Ray in a source that send values, each with the names of its arguments."""
    return {
        (dotted(node.func), " ".join(dotted(each) for each in node.args))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "remote" or dotted(node.func).endswith("ray.put"))
    }


def test_ray_pickles_nothing_of_models_data_or_users() -> None:
    assert handed_to_ray("a.remote(x, y)\nself._ray.put(z)\nbox.put(z)\n") == {
        ("a.remote", "x y"),
        ("self._ray.put", "z"),
    }
    found = {
        (str(file.relative_to(ROOT)), *call)
        for file in ROOT.rglob("*.py")
        for call in handed_to_ray(file.read_text(encoding="utf-8"))
    }
    assert found == SENT
    assert get_type_hints(Worker.call) == {
        "data": np.ndarray,
        "return": bytes,
    }
    assert get_type_hints(Worker.__init__) == {"log": str}


def test_the_source_runs_nothing_that_it_reads(figure: Callable[[str], None]) -> None:
    found = {
        (str(file.relative_to(ROOT)), what)
        for file in ROOT.rglob("*.py")
        for what in runs_data(file.read_text(encoding="utf-8"))
    }
    figure(
        f"{len(found - REVIEWED)} of {sum(1 for _ in ROOT.rglob('*.py'))} source files with an unreviewed "
        "call that could run data"
    )
    assert found == REVIEWED
    assert issubclass(Loader, yaml.constructor.SafeConstructor)


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("command", ["train", "eval", "export", "digest"])
def test_a_pickle_in_a_run_is_never_opened(
    finished: Finished,
    tmp_path: Path,
    name: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    """Pickles stand beside the files of a run, and one replaces a file of a checkpoint, with a manifest that
    matches it. No command opens a pickle."""
    run_dir, canary = tmp_path / "run", tmp_path / "canary"
    shutil.copytree(finished.only_read("dpo", {"stop.max_steps": 2}), run_dir)
    bomb = pickle.dumps(Bomb(canary))
    (checkpoint,) = (run_dir / "checkpoints").glob("step_*")
    for place in (
        checkpoint / name,
        *(
            folder / other
            for folder in (run_dir, checkpoint)
            for other in ("optimizer.pt", "pytorch_model.bin", "rng.pkl")
        ),
    ):
        place.write_bytes(bomb)
    if name != "manifest.json":
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest[name] = {"sha256": hashlib.sha256(bomb).hexdigest(), "bytes": len(bomb)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    arguments = {
        "train": [run_dir / "config.yaml", "--run_dir", run_dir],
        "export": [run_dir, tmp_path / "out"],
    }.get(command, [run_dir])
    assert oat(command, *arguments) in (1, 2)
    assert "step_00000002" in capsys.readouterr().err
    figure(f"{int(canary.exists())} of 1 planted pickles opened")
    assert not canary.exists()
    pickle.loads(bomb)
    assert canary.exists()


def test_a_pickle_in_a_model_is_never_opened(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(world.folder / "model", model)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))
    assert oat("train", world.config("dpo", tmp_path), "--model.path", model) == 2
    assert "safetensors" in capsys.readouterr().err
    assert not canary.exists()
