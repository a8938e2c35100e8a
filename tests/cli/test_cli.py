"""The command line as a user meets it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures import ALPHABET, World, forked, logged, oat, show_warnings

import oat as package
from oat.commands.digest import digest_run
from oat.config.load import dump, load_config
from oat.errors import ConfigError
from oat.learner.learner import Learner
from oat.metrics import NAMES, Metrics
from oat.rundir.mark import mark


def train(config: Path, *flags: object) -> int:
    return forked(lambda: oat("train", config, *flags), config.parent / "log")


def test_help_comes_at_once() -> None:
    """It is shown without the libraries whose import takes seconds."""
    code = (
        "import contextlib, sys\nfrom oat.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print('loaded:', *{'torch', 'transformers', 'numpy', 'rich', 'asyncio', 'ssl'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.endswith("\nloaded:\n"), shown.stdout[-100:]
    for command in ("train", "eval", "export", "digest", "bench", "quickstart"):
        assert re.search(rf"^    {command}\b", shown.stdout, re.MULTILINE)


REFUSALS = (
    "--nosuch.x 1",
    "--learner.betta 1",
    "--learner.learning_rate abc",
    "--learner.learning_rate -1",
    "--learner.critic_learning_rate 1e-5",
    "--sampling.stop [",
    "--sampling.temperature 0",
    "--algorithm.nosuch 1",
    "--algorithm.samples 1",
    "--algorithm.correction.form nosuch",
    "--algorithm.name nosuch",
    "--explorer.name apl",
    "--engine.max_rows 0",
    "--oracle.name nosuch",
    "--oracle.name nosuch.py:reward",
    "--oracle.nosuch 1",
    "--prompts.path nosuch.jsonl",
    "--model.path nosuch",
)
"""Flags with a mistake, which is refused before torch is imported."""
_REFUSE = """
import sys
from oat.cli import main

config, *flags = sys.argv[1:]
assert main(["check", "nosuch.yaml"]) == 2
for flag in flags:
    for command in ("train", "check", "eval"):
        if command == "eval" and "nosuch" in flag.partition(" ")[2]:
            continue  # an evaluation reads them otherwise
        assert main([command, config, *flag.split()]) == 2, flag
        assert not {"torch", "transformers"} & {*sys.modules}, (command, flag)
"""


def test_a_mistake_is_refused_before_what_is_slow_to_import(world: World, tmp_path: Path) -> None:
    """One process makes the mistakes one after another; none imports torch or transformers."""
    config = world.config("grpo", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", _REFUSE, str(config), *REFUSALS], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr


def test_light_modules_need_no_torch() -> None:
    code = (
        "import sys, oat, oat.types, oat.config.load, oat.cli, oat.errors, oat.metrics, "
        "oat.oracles.callables; print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        == "False\n"
    )


def test_commands_that_do_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        oat("trian", "x.yaml")
    assert stopped.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err
    assert oat("digest", tmp_path, "--seed", "1") == 2
    assert "'--seed' is not an argument" in capsys.readouterr().err


def test_a_finished_run_says_so(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("dpo", tmp_path, {"stop.max_steps": 2})
    assert train(config) == 0
    first = (tmp_path / "log").read_text()
    assert re.search(r"^step 0/2  eval/sampled \S+  eval/greedy \S+$", first, re.MULTILINE)
    assert re.search(r"^step 2/2  .*loss/total", first, re.MULTILINE)
    before = digest_run(tmp_path / "dpo")
    capsys.readouterr()
    assert oat("train", config) == 0
    printed = capsys.readouterr().out
    assert "step 1" not in printed
    assert (
        f"finished, all 2 steps are done; the run lies in {tmp_path / 'dpo'}; write its model with: oat "
        f"export {tmp_path / 'dpo'} OUT"
    ) in printed
    assert (
        "it had ended before, and nothing was left to do; to go on raise what ended it (stop.max_steps or "
        "another field of stop)"
    ) in printed
    assert digest_run(tmp_path / "dpo") == before


def test_a_warning_of_ours_is_one_line(world: World, tmp_path: Path) -> None:
    """A warning of `oat` is printed as one line, and a warning of other code is unchanged. The process shows
    warnings as Python does, since pytest would collect them."""
    (tmp_path / "reward.py").write_text(
        "import warnings\n\n\ndef reward(prompts, completions, **columns):\n    warnings.warn('theirs')\n "
        "   return [None] * len(prompts)\n"
    )
    config = world.config(
        "grpo",
        tmp_path,
        {"oracle.name": f"{tmp_path / 'reward.py'}:reward", "stop.max_steps": 1, "evaluation": None},
    )

    def shown() -> int:
        show_warnings()
        return oat("train", config)

    assert forked(shown, tmp_path / "log") == 0
    said = (tmp_path / "log").read_text()
    (ours,) = (line for line in said.splitlines() if line.startswith("oat: warning: step 1: oracle"))
    assert re.fullmatch(
        (
            r"oat: warning: step 1: oracle .* gave no usable answer to any of 4 questions, so it learns "
            r"nothing; it abstained: .*"
        ),
        ours,
    )
    assert f"{tmp_path / 'reward.py'}:5: UserWarning: theirs" in said


@pytest.mark.slow(instead="test_a_longer_run_is_the_unbroken_longer_run", seconds=2.4)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_the_configuration_that_a_run_wrote_continues_it(
    world: World, tmp_path: Path, algorithm: str
) -> None:
    config = world.config(algorithm, tmp_path)
    assert train(config, "--stop.max_steps", "2") == 0
    assert train(config) == 0
    own = tmp_path / algorithm / "config.yaml"
    before, written = digest_run(tmp_path / algorithm), own.read_text()
    assert logged(tmp_path / "log", "train", own) == 0, (tmp_path / "log").read_text()
    assert (digest_run(tmp_path / algorithm), own.read_text()) == (before, written)


def test_another_configuration_is_refused_with_the_differences(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("dpo", tmp_path, {"stop.max_steps": 1, "evaluation": None})
    assert train(config) == 0
    before = (tmp_path / "dpo" / "config.yaml").read_text()
    held_out = str(world.folder / "held_out.jsonl")
    flags = [
        "--seed",
        "7",
        "--algorithm.beta",
        "0.5",
        "--evaluation.path",
        held_out,
        "--tracking.samples",
        "9",
        "--checkpoint.every",
        "3",
    ]
    assert oat("train", config, *flags) == 2
    error = capsys.readouterr().err
    run_dir = tmp_path / "dpo"
    refusal = (
        f"oat train: {run_dir} holds a run of another configuration; give another run_dir (fork it with "
        f'--from {run_dir}@1, from Python source="{run_dir}@1"), or undo:'
    )
    assert refusal in error
    section = dump(load_config(config, ["--evaluation.path", held_out])[0])["evaluation"]
    of_section = [
        f"evaluation.{name}: null -> {json.dumps(value)}"
        for name, value in section.items()
        if value is not None
    ]
    assert [" ".join(line.split()) for line in error.splitlines() if line.startswith("  ")] == [
        "algorithm.beta: 0.1 -> 0.5",
        *sorted(of_section),
        "seed: 0 -> 7",
    ]
    assert (tmp_path / "dpo" / "config.yaml").read_text() == before


def test_what_may_change_is_taken_and_kept(world: World, tmp_path: Path) -> None:
    config = world.config("dpo", tmp_path, {"stop.max_steps": 1})
    assert train(config) == 0
    shutil.move(tmp_path / "dpo", tmp_path / "moved")
    flags = [
        "--run_dir",
        tmp_path / "moved",
        "--tracking.samples",
        "1",
        "--checkpoint.every",
        "7",
        "--oracle.deadline_s",
        "5",
    ]
    assert train(config, *flags) == 0
    text = (tmp_path / "moved" / "config.yaml").read_text()
    assert [
        line in text
        for line in (f"run_dir: {tmp_path / 'moved'}", "  every: 7", "  deadline_s: 5.0", "  threads: 1")
    ] == [True] * 4


@pytest.mark.sample("dpo", seconds=2.2)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_a_longer_run_is_the_unbroken_longer_run(world: World, tmp_path: Path, algorithm: str) -> None:
    """A run that is made longer equals a run of that length. The shorter run ends at a multiple of
    `evaluation.every`; otherwise it would have one more evaluation."""
    (tmp_path / "long").mkdir()
    assert train(world.config(algorithm, tmp_path / "long", {"stop.max_steps": 6})) == 0
    config = world.config(algorithm, tmp_path)
    assert train(config, "--stop.max_steps", 2) == 0
    assert train(config, "--stop.max_steps", 4) == 0
    assert train(config, "--stop.max_steps", 6) == 0
    assert digest_run(tmp_path / algorithm) == digest_run(tmp_path / "long" / algorithm)


@pytest.mark.slow(
    instead="tests/control/test_stop.py::test_a_schedule_that_ends_with_the_run_is_made_longer_by_name",
    seconds=1.5,
)
def test_a_schedule_keeps_the_end_it_was_given(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with a falling schedule cannot be made longer, unless `learner.schedule_steps` states the old end
    of the schedule."""
    config = world.config(
        "dpo", tmp_path, {"stop.max_steps": 1, "learner.schedule": "linear", "evaluation": None}
    )
    assert train(config) == 0
    assert oat("train", config, "--stop.max_steps", "3") == 2
    assert "learner.schedule_steps: 1 -> 3" in capsys.readouterr().err
    assert train(config, "--stop.max_steps", "3", "--learner.schedule_steps", "1") == 0


@pytest.mark.slow(instead="tests/learner/test_buffer.py::test_a_replay_of_its_ledger_is_the_run", seconds=1.8)
def test_without_checkpoints_a_run_replays_its_ledger(world: World, tmp_path: Path) -> None:
    """Without checkpoints, a run is replayed from its ledger, as the message about damaged checkpoints
    promises. If trajectories were dropped, an error says so."""
    config, log = world.config("dpo", tmp_path, {"tracking.keep_trajectories": True}), tmp_path / "log"
    assert train(config) == 0
    before = digest_run(tmp_path / "dpo")
    for state in (tmp_path / "dpo" / "checkpoints").glob("step_*/state.json"):
        state.write_text("{}")
    assert train(config) == 1
    assert (
        "tracking.keep_trajectories is replayed from its ledger once the folder `checkpoints` is removed"
        in log.read_text()
    )
    shutil.rmtree(tmp_path / "dpo" / "checkpoints")
    assert train(config) == 0
    assert digest_run(tmp_path / "dpo") == before

    other = tmp_path / "other"
    assert train(config, "--run_dir", other, "--tracking.keep_trajectories", "false") == 0
    shutil.rmtree(other / "checkpoints")
    assert train(config, "--run_dir", other) == 1
    assert "the trajectories of step 0 were dropped" in log.read_text()


def test_control_c_and_the_same_command(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("grpo", tmp_path)
    (tmp_path / "unbroken").mkdir()
    assert train(world.config("grpo", tmp_path / "unbroken")) == 0
    update, updates = Learner.update, []
    latest = tmp_path / "grpo" / "checkpoints" / "latest"

    def interrupted(self: Learner, *arguments: object) -> dict[str, float]:
        updates.append(1)
        if len(updates) == 4:
            raise KeyboardInterrupt
        return update(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "update", interrupted)
    assert oat("train", config) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    step = int(latest.read_text().removeprefix("step_"))
    assert last == f"oat train: stopped; saved after step {step}; the same command goes on there"
    monkeypatch.undo()
    assert train(config) == 0
    assert digest_run(tmp_path / "grpo") == digest_run(tmp_path / "unbroken" / "grpo")


def test_a_ledger_with_a_hole_is_one_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("dpo", tmp_path, {"stop.max_steps": 1, "evaluation": None})
    assert train(config) == 0
    ledger = tmp_path / "dpo" / "ledger.sqlite"
    content = ledger.read_bytes()
    ledger.write_bytes(content[:4096] + b"\x5a" * (len(content) - 4096))
    assert oat("train", config, "--stop.max_steps", "3") == 1
    error = capsys.readouterr().err
    assert "oat train: " in error
    assert "malformed" in error
    assert "Traceback" not in error


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {
        **{"algorithm.kl_coef": 0.1, "algorithm.kl_target": 0.1, "algorithm.epochs": 2},
        **{"algorithm.target_kl": 1e-9, "learner.learning_rate": 0.1, "learner.sync_every": 2},
        **{"sampling.refill_rounds": 1, "stop.max_steps": 2},
    },
    "dpo": {"oracle.labels": "bernoulli", "stop.max_steps": 2, "checkpoint.every": 1},
    "ppo": {
        "algorithm.rewards": {"missing_end_penalty": 0.1, "clip": [-1.0, 1.0]},
        "algorithm.correction": {"form": "truncate"},
        "algorithm.tokens": {"high_entropy_share": 0.5, "covariance_kl": 0.2},
        "algorithm.entropy": {"coef": 0.0, "target": 0.5},
        "algorithm.drift_coef": 0.1,
        "stop.max_steps": 1,
    },
}
VARIANTS["dpo"] |= {"learner.buffer": {"questions": 100}, "model.reference_update": {"mix": 0.5}}
"""Runs that together report nearly all metrics, by algorithm."""


def test_every_metric_is_in_the_list_and_every_name_is_used(world: World, tmp_path: Path) -> None:
    seen: set[str] = set()
    for algorithm, changes in VARIANTS.items():
        assert train(world.config(algorithm, tmp_path, changes)) == 0
        for line in (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines():
            seen |= json.loads(line).keys() - {"step"}
    assert seen <= NAMES.keys()
    proven_in_protocol = {
        name for name in NAMES if "ensemble" in name or name == "loss/prior" or "sft" in name
    }
    proven_in_protocol |= {name for name in NAMES if name.startswith("explorer/")} | {"loss/optimism"}
    proven_in_evaluations = {name for name in NAMES if name.startswith("eval/")} - seen
    proven_over_http = {
        "oracle/latency_s",
        "oracle/outages",
        "oracle/retries",
        "oracle/invalid_frac",
        "oracle/position_bias",
        "oracle/cost",
    }
    proven_by_algorithms = {
        name for name in NAMES if name.startswith(("kto/", "vine/", "episode/", "pairs/held_out"))
    } | {
        "pairs/brier",
        "pairs/confidence",
    }
    proven_by_algorithms |= {"loss/reward", "loss/centring"}
    proven_of_mixtures = {"oracle/source/label"}
    proven_elsewhere = {"answers/wasted_frac", "oracle/changes"}
    assert (
        NAMES.keys() - seen
        == proven_in_protocol
        | proven_in_evaluations
        | proven_over_http
        | proven_by_algorithms
        | proven_of_mixtures
        | proven_elsewhere
    )
    sources = [
        path.read_text(encoding="utf-8")
        for path in Path(package.__file__).parent.rglob("*.py")
        if path.parent.name != "metrics"
    ]
    assert any('f"optim/{name}_"' in source for source in sources), (
        "the critic's two are made from its name in the learner"
    )
    assert all(text and not text.endswith(".") for text in NAMES.values())
    with pytest.raises(ConfigError, match="user/loss/unheard_of"):
        Metrics().add({"loss/unheard_of": 1.0})


def test_two_processes_do_not_share_a_directory(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fcntl

    config = world.config("dpo", tmp_path)
    (tmp_path / "dpo").mkdir()
    with (tmp_path / "dpo" / "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert oat("train", config) == 2
        assert "in use by another process; wait" in capsys.readouterr().err
    assert train(config) == 0


@pytest.mark.slow(instead="tests/faults/test_signals.py tests other ends of a command", seconds=5.8)
def test_a_reader_that_leaves_ends_the_command_quietly(world: World, tmp_path: Path) -> None:
    """The reader of the output closes the pipe, as in `oat train CONFIG | head -1`. The command ends without
    an error message."""
    config = world.config("dpo", tmp_path, {"stop.max_steps": 60})
    command = [sys.executable, "-m", "oat", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("oat train: 60 steps")
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == f"oat train: loading torch and {world.folder / 'model'} ...\n"


def test_bench_for_people_and_for_machines(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert oat("bench", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["model"] is None
    assert [(rates["device"], rates["threads"]) for rates in plain["rates"] if rates["device"] == "cpu"] == [
        ("cpu", 1)
    ]
    assert all(
        rates[name] > 10**6 for rates in plain["rates"] for name in ("bandwidth", "float32", "bfloat16")
    )

    assert oat("bench", "--json", "--model", world.folder / "model") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    rates = plain["rates"][-1]
    elements = 4 * 16 * 16 + 3 * 16 * 32 + (len(ALPHABET) + 4) * 16
    assert (model["elements"], model["float32"]["bytes"], model["bfloat16"]["bytes"]) == (
        elements,
        4 * elements,
        2 * elements,
    )
    for name in ("float32", "bfloat16"):
        assert model[name]["decode"] == pytest.approx(rates[name] / (2 * elements))
        assert model[name]["update"] == pytest.approx(rates[name] / (6 * elements))
        assert (
            model[name]["decode_one_row"]
            <= model[name]["decode"]
            <= model[name]["decode_one_row"] * model[name]["compute_bound_rows"] * 1.001
        )

    assert oat("bench", "--model", world.folder / "model") == 0
    printed = capsys.readouterr().out
    assert f"{plain['machine']['cores']} cores; GPU: " in printed
    assert re.search(
        r"^ *device +threads +read GB/s +float32 GFLOP/s +bfloat16 GFLOP/s$", printed, re.MULTILINE
    )
    assert (
        re.search(rf"^ *cpu +1 +{rates['bandwidth'] / 1e9:.1f} +", printed, re.MULTILINE)
        or rates["device"] != "cpu"
    )
    assert re.search(r"^ *bfloat16( +\d\S*){5}$", printed, re.MULTILINE)


def test_bench_of_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert oat("bench", "--model", "nowhere") == 2
    assert "there is no directory nowhere" in capsys.readouterr().err


def test_what_a_kill_at_the_very_start_leaves_is_no_run(world: World, tmp_path: Path) -> None:
    """A kill at the start leaves empty files, among them the journal that SQLite keeps beside a new file. The
    next start succeeds if the folder is marked. Without the mark, the files may be anybody's."""
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1, "evaluation": None})
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "ledger.sqlite").touch()
    assert train(config) == 2
    assert [file.name for file in (tmp_path / "grpo").iterdir()] == ["ledger.sqlite"]
    (tmp_path / "grpo" / "ledger.sqlite").unlink()
    mark(tmp_path / "grpo")
    for name in ("lock", ".new-config.yaml", "ledger.sqlite", "ledger.sqlite-journal"):
        (tmp_path / "grpo" / name).touch()
    assert train(config) == 0
