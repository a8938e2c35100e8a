"""No command replaces, truncates or deletes a file that oat did not write.

A folder gets files, folders and links under the names that oat writes itself. Then a command is told to write
there. Afterwards each of them is as it was. If the command is refused, nothing else is there either.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fixtures import Finished, World, forked, kill_at, named, oat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oat as library
from oat.commands.digest import digest_run
from oat.commands.export import export_run
from oat.commands.export_mark import MARK as EXPORT_MARK
from oat.errors import ConfigError
from oat.rundir.mark import MARK, OWN, foreign, is_own, is_run, mark

Snapshot = dict[str, tuple[str, int, bytes]]

RUN_NAMES = [*OWN, MARK, *(f".new-{name}" for name in ("config.yaml", "metrics.jsonl", MARK))]
OTHERS = ["README.md", "README.txt", "notes.txt", "data.jsonl", ".git"]
EXPORT_NAMES = [
    *("README.md", "config.json", "model.safetensors", "adapter_config.json", "tokenizer.json", "vocab.txt"),
    *("chat_template.jinja", "ensemble.json", "ensemble.safetensors", EXPORT_MARK, ".oat-export-0123abcd"),
]
QUICKSTART = ["README.txt", "start", "dpo", "dpo.yaml", "train.jsonl", "heldout.jsonl", "models", "dpo.log"]
LABORATORY = ["curves.csv", "tuning.csv", "rules.json", "table.md", "regret.png"]
KINDS = ["empty", "text", "json", "config", "read-only", "folder", "empty folder", "link", "broken link"]
JSON = '{"files": {}, "step": 4, "run": "/", "first_row": 0}\n'


def put(folder: Path, name: str, kind: str, config: str) -> None:
    """Put a user's file, folder or link of this name into a folder. What a link leads to is beside it."""
    path, aside = folder / name, folder.parent / "aside"
    if kind in ("folder", "empty folder"):
        path.mkdir()
        if kind == "folder":
            (path / "step_00000004").write_text("a user's")
    elif kind in ("link", "broken link"):
        aside.mkdir(exist_ok=True)
        path.symlink_to(aside / name)
        if kind == "link":
            (aside / name).write_text('{"prompt": "a user\'s"}\n')
    else:
        text = {"empty": "", "config": config, "json": JSON}.get(kind, '{"prompt": "a user\'s"}')
        path.write_text(text, encoding="utf-8")
        if kind == "read-only":
            path.chmod(0o444)


def snapshot(folder: Path) -> Snapshot:
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        is_link = path.is_symlink()
        kind = "link" if is_link else "folder" if path.is_dir() else "file"
        text = os.readlink(path).encode() if is_link else b"" if kind == "folder" else path.read_bytes()
        found[str(path.relative_to(folder))] = (kind, path.lstat().st_mode, text)
    return found


@pytest.fixture(scope="module")
def run_dir(finished: Finished) -> Path:
    """Return a finished run. Tests must not change it."""
    return finished.only_read("dpo", {"evaluation": None})


class Place:
    """A world, a run, and a folder in which a user's files stand, with all that is around it."""

    def __init__(self, world: World, run_dir: Path, around: Path):
        self.world, self.run_dir, self.around = world, run_dir, around
        self.folder = around / "folder"
        self.config = around / "mine.yaml"
        tree = world.tree("dpo", self.folder, {"evaluation": None, "stop.max_steps": 1})
        self.text = yaml.safe_dump(tree, sort_keys=False)
        self.evaluated = ("--evaluation.path", world.folder / "held_out.jsonl", "--evaluation.max_prompts", 2)

    def fill(self, entries: dict[str, str]) -> None:
        shutil.rmtree(self.around, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.config.write_text(self.text, encoding="utf-8")
        for name, kind in entries.items():
            # an empty working folder of a killed export is removed, whoever made it
            is_left = name.startswith(".oat-export-") and kind == "empty folder"
            put(self.folder, name, "folder" if is_left else kind, self.text)

    def from_python(self) -> int:
        tree = self.world.tree("dpo", self.folder, {"evaluation": None, "stop.max_steps": 1})
        tree["prompts"] = [{"prompt": "1+1=", "answer": "2"}]
        try:
            library.Trainer(**tree, quiet=True).train()
        except ConfigError:
            return 2
        return 0


def first(entries: dict[str, str]) -> str:
    return next(iter(entries))


def plotted(name: str) -> str:
    """Return a name for `--out` so that `oat plot` would write a file of the given name."""
    return f"{Path(name).stem}.png" if name.endswith((".png", ".csv")) else name


Command = Callable[[Place, dict[str, str]], int]
COMMANDS: dict[str, tuple[list[str], Command]] = {
    "train": (RUN_NAMES, lambda p, _: oat("train", p.config)),
    "train here": (RUN_NAMES, lambda p, _: oat("train", p.config, "--run_dir", f"{p.folder}/../folder")),
    "check": (RUN_NAMES, lambda p, _: oat("check", p.config)),
    "fork": (RUN_NAMES, lambda p, _: oat("train", p.config, "--from", p.run_dir)),
    "Trainer": (RUN_NAMES, lambda p, _: p.from_python()),
    "eval": (RUN_NAMES, lambda p, _: oat("eval", p.config, *p.evaluated)),
    "compare": (RUN_NAMES, lambda p, _: oat("eval", p.config, "--against", p.run_dir, *p.evaluated)),
    "features": (
        RUN_NAMES,
        lambda p, _: oat("features", p.config, "--prompts", "8", "--explorer.name", "ensemble"),
    ),
    "export": (EXPORT_NAMES, lambda p, _: oat("export", p.run_dir, p.folder)),
    "quickstart": (QUICKSTART, lambda p, _: oat("quickstart", "--out", p.folder)),
    "generate": (
        OTHERS,
        lambda p, e: oat("generate", p.run_dir, "--prompts", "x", "--out", p.folder / first(e)),
    ),
    "ledger": (["a.jsonl"], lambda p, e: oat("ledger", p.run_dir, "--export", p.folder / first(e))),
    "samples": (["a.csv"], lambda p, e: oat("samples", p.run_dir, "--csv", p.folder / first(e))),
    "plot": (
        ["plot.csv", "plot.png"],
        lambda p, e: oat("plot", p.run_dir, "--out", p.folder / plotted(first(e))),
    ),
    "bench": (LABORATORY, lambda p, _: oat("bench", "explore", "--out", p.folder)),
}
"""For each command, the names that it writes itself, and a call of it. It is told to write into the folder,
or to the first of the user's files."""


LONG = {"eval", "compare", "features", "export"}
"""The commands that are not refused, or not always, and take time."""


def drawn(command: str) -> st.SearchStrategy[dict[str, str]]:
    names = COMMANDS[command][0]
    others = st.dictionaries(st.sampled_from(OTHERS), st.sampled_from(KINDS), max_size=2)
    own = st.dictionaries(st.sampled_from(names), st.sampled_from(KINDS), min_size=1, max_size=3)
    # the folder's own configuration is the one that the command is given
    mine = st.sampled_from([{"config.yaml": "config"}, {}] if names is RUN_NAMES else [{}])
    return st.builds(lambda own, others, mine: {**own, **others, **mine}, own, others, mine)


def leaves_all(place: Place, command: str, entries: dict[str, str]) -> None:
    place.fill(entries)
    before = snapshot(place.around)
    code = COMMANDS[command][1](place, entries)
    after = snapshot(place.around)
    assert {name: after.get(name) for name in before} == before
    if code == 2:
        assert after == before
    else:
        assert code == 0


def test_no_command_changes_a_users_files(world: World, run_dir: Path, tmp_path: Path) -> None:
    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(sorted({*COMMANDS} - LONG)))
        leaves_all(Place(world, run_dir, tmp_path / "around"), command, data.draw(drawn(command)))

    holds()


@pytest.mark.slow(instead="test_no_command_changes_a_users_files", seconds=60)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_changes_a_users_files_in_many_folders(
    world: World, run_dir: Path, tmp_path: Path, command: str
) -> None:
    @settings(
        max_examples=20 if command in LONG else 150, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(entries=drawn(command))
    def holds(entries: dict[str, str]) -> None:
        leaves_all(Place(world, run_dir, tmp_path / "around"), command, entries)

    holds()


def test_the_folder_of_the_configuration_is_no_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration, its data and a file of metrics, all under names that a run has. One message names
    them."""
    place = Place(world, tmp_path, tmp_path / "around")
    place.fill({"config.yaml": "config", "samples.jsonl": "text", "metrics.jsonl": "text", "lock": "empty"})
    monkeypatch.chdir(place.folder)
    before = snapshot(place.around)
    for command in ("check", "train"):
        assert oat(command, "config.yaml", "--run_dir", ".") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(name in error for name in ("config.yaml", "samples.jsonl", "metrics.jsonl"))
        assert snapshot(place.around) == before
    assert oat("train", "config.yaml", "--run_dir", "runs/mine") == 0
    assert {name: snapshot(place.around)[name] for name in before} == before
    monkeypatch.chdir("runs/mine")
    assert oat("train", "config.yaml", "--run_dir", ".", "--stop.max_steps", "2") == 0, "it is a run"


def test_a_home_that_no_shell_has_put_there_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--run_dir=~/run` reaches a command as it is, and a folder `~` would be made."""
    config = world.config("grpo", tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in ("~/run", str(tmp_path / "~" / "run")):
        assert oat("train", config, "--run_dir", path) == 2
        assert "has a `~`" in capsys.readouterr().err
    assert not (tmp_path / "~").exists()


def test_a_run_writes_the_names_that_the_mark_knows(run_dir: Path) -> None:
    assert [name for name in os.listdir(run_dir) if not is_own(name)] == []


@pytest.mark.parametrize("is_half", [False, True])
def test_a_run_of_an_earlier_version_is_known_by_its_ledger(
    finished: Finished, tmp_path: Path, is_half: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no mark. Its tables may still be in SQLite's log alone."""
    run = finished.copy("dpo", tmp_path, {"evaluation": None})
    (run / MARK).unlink()
    before = digest_run(run)
    with (run / "config.yaml").open("a") as file:
        file.write("# mine\n")
    if is_half:
        whole = (run / "ledger.sqlite").read_bytes()
        (run / "ledger.sqlite").write_bytes(whole[:100])
        (run / "ledger.sqlite-wal").write_bytes(whole)
        assert is_run(run)
        return
    assert oat("train", tmp_path / "dpo.yaml") == 0
    assert "finished" in capsys.readouterr().out
    assert digest_run(run) == before
    assert (run / "config.yaml").read_text().endswith("# mine\n")
    assert (run / MARK).exists()
    (run / MARK).unlink()
    (run / "ledger.sqlite").unlink()
    assert not is_run(run)
    assert "config.yaml" in foreign(run)


@pytest.mark.sample("oat.opening.open_run:write_stored", seconds=3)
@pytest.mark.parametrize(
    "place",
    [
        "oat.rundir.mark:os.urandom",
        "oat.rundir.mark:sync_to_disk",
        "oat.opening.open_run:gather_inputs",
        "a ledger is opened",
        "oat.opening.open_run:write_stored",
    ],
)
def test_a_start_that_was_killed_goes_on(world: World, tmp_path: Path, place: str) -> None:
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1, "evaluation": None})
    assert forked(lambda: kill_at(*named(place), 1) or oat("train", config), tmp_path / "log") < 0
    assert forked(lambda: oat("train", config), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert not [name for name in os.listdir(tmp_path / "grpo") if name.startswith(".new-")]


@pytest.mark.slow(instead="test_a_start_that_was_killed_goes_on", seconds=60)
def test_a_start_that_is_killed_at_any_operation_goes_on(world: World, tmp_path: Path) -> None:
    """The process is killed before the n-th operation on a path of its run, until a start has fewer."""
    code, done = -signal.SIGKILL, 0
    while code == -signal.SIGKILL:
        folder = tmp_path / str(done)
        folder.mkdir()
        config = world.config("grpo", folder, {"stop.max_steps": 1, "evaluation": None})
        left = 1 + 7 * done

        def action(config: Path = config, run: str = str(folder / "grpo"), left: int = left) -> int:
            def strike(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                left -= any(run in str(argument) for argument in arguments) and event != "import"
                if left == 0:
                    left = -1  # the kill is an event too
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(strike)
            return oat("train", config)

        code = forked(action, folder / "log")
        assert forked(lambda config=config: oat("train", config), folder / "log") == 0, (  # type: ignore[misc]
            (folder / "log").read_text()
        )
        done += 1
    assert code == 0
    assert done > 5


@pytest.mark.slow
def test_a_fork_that_was_cut_off_keeps_what_a_user_put_beside_it(finished: Finished, tmp_path: Path) -> None:
    run = finished.copy("dpo", tmp_path, {"evaluation": None})
    fork = ("train", tmp_path / "dpo.yaml", "--from", f"{run}@2", "--run_dir", tmp_path / "fork")
    cut = named("oat.opening.fork:Store.cut")
    assert forked(lambda: kill_at(*cut, 1) or oat(*fork), tmp_path / "log") < 0
    (tmp_path / "fork" / "notes.txt").write_text("mine")
    assert forked(lambda: oat(*fork), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "fork" / "notes.txt").read_text() == "mine"
    assert digest_run(tmp_path / "fork") == digest_run(run)


def test_a_start_that_fails_leaves_what_another_program_wrote_there(world: World, tmp_path: Path) -> None:
    """A user's file appears in the new folder while the run starts, and the start fails."""
    config = world.config(
        "grpo", tmp_path, {"evaluation": None, "oracle.name": f"{tmp_path / 'late.py'}:late"}
    )
    (tmp_path / "late.py").write_text(
        f"open({str(tmp_path / 'grpo' / 'notes.txt')!r}, 'w').write('mine')\nraise ValueError\n"
    )
    assert oat("train", config) != 0
    assert os.listdir(tmp_path / "grpo") == ["notes.txt"]


def test_an_export_replaces_its_own_files_only(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    export_run(run_dir, out, 2)
    (out / "notes.txt").write_text("mine")
    export_run(run_dir, out)
    card = (out / "README.md").read_text()
    assert "after 4 steps" in card
    mine = {
        "README.md": f"{card}\nMy notes.\n",
        "vocab.txt": "mine",
        "adapter_config.json": "{}",
    }
    for name, text in mine.items():
        before = (out / name).read_text() if (out / name).exists() else None
        (out / name).write_text(text)
        kept = snapshot(out)
        assert oat("export", run_dir, out) == 2
        assert name in capsys.readouterr().err
        assert snapshot(out) == kept
        (out / name).unlink() if before is None else (out / name).write_text(before)
    assert oat("export", run_dir, out) == 0
    (out / EXPORT_MARK).write_text(json.dumps({"files": {"../dpo.yaml": ["0"]}}))
    assert oat("export", run_dir, out) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_that_is_none(tmp_path: Path, kind: str) -> None:
    put(tmp_path, MARK, kind, "")
    assert not is_run(tmp_path)
    assert foreign(tmp_path) == [MARK]


def test_a_mark_that_was_cut_off_is_taken_away(tmp_path: Path) -> None:
    new = tmp_path / f".new-{MARK}-0123456789abcdef"
    for text in (b"", b"A run of oat"):
        new.write_bytes(text)
        assert foreign(tmp_path) == []
        mark(tmp_path)
        assert new.exists() == (text == b"")
        assert is_run(tmp_path)
        (tmp_path / MARK).unlink()
    new.write_text("A user's")
    assert foreign(tmp_path) == [new.name]
