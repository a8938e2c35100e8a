"""Helpers for tests of whole runs: a tiny model with its data, configurations, and child processes."""

import fcntl
import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from points import named  # noqa: F401 (tests take it from here)

from oat.config.settings import ComputeConfig
from oat.learner.learner import Learner
from oat.ledger.intents import Intent
from oat.ledger.store import Store
from oat.types import Group, Key, Kind, Message, Prompt, Question, Segment, Trajectory

ALPHABET = "0123456789+=ab"
NO_TRL = "TRL is not here"
NO_BITSANDBYTES = "bitsandbytes is not here"
NO_WANDB = "wandb is not here"
NO_MLFLOW = "mlflow is not here"
"""Reasons why tests are skipped that need an optional package. The end of the output counts them."""

REWARD = '''
import asyncio
import random

chance = random.Random()


def reward(prompts, completions, **columns):
    """How many letters a, and a little for b, so that ties are rare."""
    return [text.count("a") + 0.1 * text.count("b") for text in completions]


async def late(prompts, completions, **columns):
    """The same, after a while that is another one in every life."""
    await asyncio.sleep(chance.uniform(0.0, 0.03))
    return reward(prompts, completions)


def first_is_longer(prompts, first, second, **columns):
    return [0.9 if len(a) > len(b) else 0.2 for a, b in zip(first, second)]


def forbidden(prompts, completions, **columns):
    raise AssertionError("this run must not ask")
'''


@dataclass(frozen=True)
class World:
    """A folder with prompts, reward functions, and a model with one token per character.

    Attributes:
        oracle: the reward function's name for the setting `oracle.name`.
    """

    folder: Path

    @property
    def oracle(self) -> str:
        return f"{self.folder / 'reward.py'}:reward"

    @property
    def late(self) -> str:
        """The name of the same reward function, as an async function with random delays."""
        return f"{self.folder / 'reward.py'}:late"

    def tree(self, algorithm: str, run_dir: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a configuration as plain data: four steps of four prompts, with a checkpoint and an
        evaluation at every second step.

        Args:
            changes: values by dotted name; None for a section removes the section.
        """
        tree: dict[str, Any] = {
            "run_dir": str(run_dir),
            "model": {"path": str(self.folder / "model")},
            "prompts": {"path": str(self.folder / "train.jsonl"), "reference_key": "answer"},
            # the random model often writes its padding token, whose name has an "a" that rewards would count
            "render": {"special_tokens": "drop"},
            "sampling": {"max_new_tokens": 4},
            "oracle": {"name": self.oracle},
            "algorithm": {"name": algorithm, "prompts": 4, "samples": 2 if algorithm == "dpo" else 3},
            "learner": {"learning_rate": 0.003, "micro_batch_size": 64},
            "evaluation": {"path": str(self.folder / "held_out.jsonl"), "every": 2, "samples": 2},
            "checkpoint": {"every": 2},
            "compute": {"threads": 1},
            "stop": {"max_steps": 4},
        }
        for name, value in (changes or {}).items():
            *sections, last = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            if value is None and not sections:
                place.pop(last, None)
            else:
                place[last] = value
        return tree

    def config(self, algorithm: str, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
        """Write the configuration to `folder/<algorithm>.yaml`, and return this path. Its run directory is
        `folder/<algorithm>`."""
        file = folder / f"{algorithm}.yaml"
        file.write_text(
            yaml.safe_dump(self.tree(algorithm, folder / algorithm, changes), sort_keys=False),
            encoding="utf-8",
        )
        return file


def make_model(
    folder: Path, *, hidden: int = 16, layers: int = 1, seed: int = 0, tokens: Sequence[str] = ALPHABET
) -> None:
    """Write a Llama and a tokenizer that reads one token per character. A longer token can only be
    sampled."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: id for id, token in enumerate(["<pad>", "<eos>", *tokens])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(seed)
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=len(vocabulary) + 2, max_position_embeddings=64, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def recorded(store: Store, purpose: str, step: int, round: int = 0) -> list[Intent]:
    """Return the questions of a round as the ledger records them."""
    sql = "SELECT id FROM questions WHERE (purpose, step, round) = (?, ?, ?) ORDER BY position"
    return [store.by_id(id) for (id,) in store.db.execute(sql, (purpose, step, round))]


def make_group(
    occurrence: int, *texts: str, reference: str | None = None, columns: dict[str, Any] | None = None
) -> Group:
    """Return a group: the prompt `p<occurrence>`, and for each text a response with one made-up token per
    character."""
    context = Segment("context", np.arange(3, dtype=np.int32))
    trajectories = []
    for number, text in enumerate(texts):
        size = len(text)
        logps = -np.arange(1, size + 1, dtype=np.float32) / (number + 2)
        ids = np.arange(size, dtype=np.int32)
        mask = np.ones(size, dtype=bool)
        versions = np.full(size, occurrence, dtype=np.int32)
        response = Segment("model", ids, mask=mask, versions=versions, raw_logps=logps, sampled_logps=logps)
        trajectories.append(Trajectory("sampler", (context, response), "stop", text))
    prompt = Prompt(
        occurrence + 1, occurrence, (Message("user", f"p{occurrence}"),), reference, columns or {}
    )
    return Group(prompt, tuple(trajectories))


def make_questions(
    groups: list[Group], kind: Kind, step: int, round: int = 0, *, oracle: str, purpose: str = "train"
) -> list[Question]:
    """Return one question per group, about all of its responses."""
    questions = []
    for group in groups:
        picks = tuple(range(len(group.trajectories)))
        questions.append(
            Question.about(group, Key(purpose, step, round, group.prompt.occurrence), kind, picks, oracle)
        )
    return questions


def made(folder: Path) -> Path:
    """Make and return a run directory for a run that `build` makes without `open_run`."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def damage_metrics(run_dir: Path, lines: Mapping[int, bytes | None]) -> None:
    """Replace the given lines of metrics.jsonl by others. None removes the line."""
    rows = dict(enumerate((run_dir / "metrics.jsonl").read_bytes().splitlines())) | dict(lines)
    (run_dir / "metrics.jsonl").write_bytes(
        b"".join(row + b"\n" for _, row in sorted(rows.items()) if row is not None)
    )


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that all processes of one call of pytest share. The first process makes it. Tests must
    not change it."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = Path(tempfile.mkdtemp(dir=shared))
            make(making)
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from oat.hardware.roofline import cost_of, rates_of
    from oat.models.loading import load_lm

    folder = made_once(tmp_path_factory, "world", _make_world)
    # measured here, and not by every child
    rates_of(torch.device("cpu"), 1, cost_of(load_lm(str(folder / "model"))))
    return World(folder)


def _make_world(folder: Path) -> None:
    make_model(folder / "model")
    write_jsonl(
        folder / "train.jsonl", [{"prompt": f"{a}+{b}=", "answer": "a"} for a in range(10) for b in range(3)]
    )
    write_jsonl(folder / "held_out.jsonl", [{"prompt": f"{a}+9=", "answer": "ab"} for a in range(4)])
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


@pytest.fixture
def several_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process see four CPUs, so that runs with several processes are not refused on a machine with
    one."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)


class Finished:
    """Finished runs. Each is trained once per call of pytest, and tests get copies of it."""

    def __init__(self, world: World, factory: pytest.TempPathFactory):
        self.world = world
        self.factory = factory

    def copy(self, algorithm: str, folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
        """Return a copy of the run of `world.config(algorithm, folder, changes)`, in `folder/<algorithm>`."""
        self.world.config(algorithm, folder, changes)
        shutil.copytree(self.only_read(algorithm, changes), folder / algorithm)
        return folder / algorithm

    def only_read(self, algorithm: str, changes: Mapping[str, Any] | None = None) -> Path:
        """Return the directory of the run itself. Tests must not change it."""
        tree = self.world.tree(algorithm, Path("run"), changes)
        content = json.dumps([tree, ComputeConfig().serialise], sort_keys=True)
        name = f"{algorithm}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

        def train(folder: Path) -> None:
            config = self.world.config(algorithm, folder, changes)
            run = ("train", config, "--run_dir", folder / "run")
            assert logged(folder / "log", *run) == 0, (folder / "log").read_text()

        return made_once(self.factory, name, train) / "run"


@pytest.fixture(scope="session")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(world, tmp_path_factory)


def serialise_by_default(is_on: bool) -> bool:
    """Set the default of `compute.serialise` for this process and its later forks, and return the previous
    default."""
    place = [field.name for field in fields(ComputeConfig)].index("serialise")
    was = list(ComputeConfig.__init__.__defaults__ or ())
    ComputeConfig.__init__.__defaults__ = (*was[:place], is_on, *was[place + 1 :])
    assert ComputeConfig().serialise == is_on
    return was[place]


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="wire"), pytest.param(False, id="plain", marks=pytest.mark.slow)],
)
def over_the_wire(request: pytest.FixtureRequest) -> Iterator[bool]:
    """A test module that uses this fixture sends the values of every run through the wire encoding. The slow
    suite also runs its tests without the wire encoding."""
    was = serialise_by_default(request.param)
    yield request.param
    serialise_by_default(was)


def oat(*arguments: object) -> int:
    """Run a command line in this process, and return its exit code."""
    from oat.cli import main

    return main([str(argument) for argument in arguments])


def checked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], list[str]]:
    """Check a configuration with `oat check --json`. Return its numbers, by the names of their rows, and its
    notes."""
    capsys.readouterr()
    assert oat("check", *arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    return {row["name"]: row["number"] for row in found["rows"]}, found["notes"]


def logged(log: Path, *arguments: object) -> int:
    """Run a command line in this process, with its output in a file, and return its exit code. A forked child
    takes a third more processor time, since it copies what it changes of this process. As after a child, the
    global random generators are where they were."""
    states = random.getstate(), np.random.get_state()
    try:
        with (
            log.open("a", encoding="utf-8") as output,
            redirect_stdout(output),
            redirect_stderr(output),
            warnings.catch_warnings(),
            torch.random.fork_rng(devices=[]),
        ):
            return oat(*arguments)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def tried(log: Path, *arguments: object, before: Callable[[], object] | None = None) -> int:
    """Run a command line as `logged` does. With `before`, which may arm a kill, run it in a forked child that
    calls `before` first."""
    if before is None:
        return logged(log, *arguments)

    def action() -> int:
        before()
        return oat(*arguments)

    return forked(action, log)


def forked(action: Callable[[], int], log: Path, *, kill_after_s: float | None = None) -> int:
    """Run `action` in a forked child. Return the child's exit code, or minus the signal that ended it.

    Args:
        log: the file that gets the child's output.
        kill_after_s: seconds after which the child gets SIGKILL.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = sys.stderr = os.fdopen(output, "w", encoding="utf-8")
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
            finally:  # also where there is no room for it, or the child would go on with the tests
                os._exit(code)
    if kill_after_s is not None:
        ended = os.pidfd_open(child)
        if not select.select([ended], [], [], kill_after_s)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def cold(place: str, *arguments: object, log: Path, environment: Mapping[str, object] | None = None) -> int:
    """Call `module:function` of the tests in a new interpreter and a new session. Return the exit code, or
    minus the signal that ended the process. The function gets its arguments as texts.

    The file `log` gets the output, and `log.session` the id of the session.
    """
    script = (
        "import sys; sys.path[:0] = sys.argv[2].split(':'); import fixtures; "
        "sys.exit(getattr(*fixtures.named(sys.argv[1]))(*sys.argv[3:]))"
    )
    folders = ":".join(str(Path(__file__).parent / folder) for folder in (".", "../faults"))
    chosen = {name: str(value) for name, value in (environment or {}).items()}
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", script, place, folders, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**kept, "OMP_NUM_THREADS": "1", **chosen},
            start_new_session=True,
        )
    log.with_suffix(".session").write_text(str(process.pid))
    return process.wait(600)


def in_session(session: int) -> list[str]:
    """Return the processes of a session, zombies included, as the kernel lists them."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = place.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(after_name[3]) == session:
            found.append(f"{place.parent.name} {after_name[0]}")
    return found


def kill_at(
    owner: Any, name: str, call: int, *, after: bool = False, signals: Sequence[int] = (signal.SIGKILL,)
) -> None:
    """Send SIGKILL, or other signals, to this process at call number `call` (from 1) of `owner.name`: before
    the call runs, or after it has returned.

    For a forked child only.
    """
    original, calls = getattr(owner, name), 0

    def strike() -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            strike()
        result = original(*args, **kwargs)
        if calls == call and after:
            strike()
        return result

    setattr(owner, name, counted)


def gradient_of(
    learner: Learner, update: Callable[[], dict[str, float]], model: str = "policy"
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the report of an update of one optimiser step, and the gradients of a model by parameter. They
    are read before the step, since the learner frees them."""
    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        found.update(
            (name, p.grad) for name, p in learner.models[model].trainable().items() if p.grad is not None
        )

    hook = learner.trained[model].optimiser.register_step_pre_hook(keep)
    report = update()
    hook.remove()
    return report, found


def counting(owner: Any, name: str) -> Callable[[], int]:
    """Count the calls of `owner.name` from now on, and return a function that gives the count. For a forked
    child only."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return lambda: calls


def show_warnings() -> None:
    """Print warnings as Python does, although pytest collects them. For a forked child only."""
    warnings.showwarning = lambda *args, **_: print(warnings.formatwarning(*args[:4]), end="")


def told(*arguments: object) -> int:
    """Run a command line, print its warnings, which pytest would hide, and return the exit code."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        code = oat(*arguments)
    print("".join(f"warning: {warning.message}\n" for warning in said))
    return code
