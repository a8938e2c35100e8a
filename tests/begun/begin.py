"""Makes the run in this folder, with the last program whose modules all lay in one folder:

    git worktree add ../flat 139bad1
    PYTHONPATH=../flat/src python tests/begun/begin.py

    parts.py, model/, *.jsonl   the user's code, the model and the data; what exists is kept
    run/                        a run of eight steps that was killed in the sixth, with questions in flight;
                                its newest checkpoint is the one after the fourth
    expected.json               what that program said of the run as it stands, and what it said and left
                                after it had continued the run

The run is made in a folder of its own with relative paths, so no path of a machine is in it. After the kill
this script writes the ledger's log back into its file and packs it, and blanks the description of the machine
in `environment.json`; it changes nothing else.

No later program can make the run again. Where numbers are meant to change, `begin.py --expect` writes
expected.json anew with whichever program it is given, and the commit says why.
"""

import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
import yaml
from findings import oat, of_begun, of_continued

import oat as program

HERE = Path(__file__).parent
FLAT = "139bad1"
PROGRAM = Path(str(program.__file__)).parent
GIVEN = ("parts.py", "sums.jsonl", "words.jsonl", "held_out.jsonl", "model")
"""What a run reads, beside its own directory."""
STEPS = 8
CONFIG: dict[str, Any] = {
    "run_dir": "run",
    "seed": 20,
    "model": {"path": "model"},
    "prompts": {"path": [{"path": "sums.jsonl", "weight": 2.0}, "words.jsonl"], "reference_key": "answer"},
    "sampling": {"max_new_tokens": 5, "top_p": 0.95},
    "oracle": {
        "name": "parts.py:Umpire",
        "most": 8,
        "labels": "bernoulli",
        "max_outstanding": 6,
        "max_wait_s": 600.0,
        "max_answer_age": 2,
        "deadline_s": 1e9,
    },
    "algorithm": {"name": "parts.py:Criticised", "prompts": 4},
    "explorer": {
        "name": "parts.py:Duels",
        "samples": 3,
        "ensemble": {"members": 3, "hidden": 4, "batch": 4, "steps": 2, "buffer": 10, "learning_rate": 1e-2},
    },
    "learner": {
        "learning_rate": 2e-2,
        "critic_learning_rate": 3e-2,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "warmup_steps": 3,
        "schedule_steps": 48,
        "micro_batch_size": 4,
        "sync_every": 2,
        "buffer": {"questions": 6, "clear_every": 5},
    },
    "evaluation": {
        "path": "held_out.jsonl",
        "every": 2,
        "samples": 2,
        "kl": True,
        "intervals": True,
        "pass_at": [1, 2],
        "success": 0.5,
        "online": True,
        "oracle": "parts.py:letters",
        "gold": {"name": "parts.py:brevity", "max_queries": 60},
    },
    "alarms": {
        "kl": {"above": 0.3, "patience": 2},
        "truncated": {"above": 0.7, "patience": 1, "action": "roll_back"},
    },
    "checkpoint": {"every": 2, "keep_last": 1, "keep_best": 1},
    "tracking": {"samples": 2, "keep_trajectories": True},
    "compute": {"threads": 1},
    "stop": {"max_steps": STEPS, "max_queries": 1000},
}


def make_inputs() -> None:
    """The model, whose weights are large enough that responses differ, and the data."""
    sys.path.insert(0, str(PROGRAM.parents[1] / "tests" / "support"))
    from fixtures import make_model, write_jsonl
    from transformers import AutoModelForCausalLM

    if not (HERE / "model").exists():
        make_model(HERE / "model", hidden=8)
        model = AutoModelForCausalLM.from_pretrained(HERE / "model")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(6)
        model.save_pretrained(HERE / "model")
    data = {
        "sums": [{"prompt": f"{a}+{b}=", "answer": "ab"} for a in range(5) for b in range(2)],
        "words": [{"prompt": f"{word}=", "answer": "ba"} for word in ("a", "ab", "abb", "b", "ba", "bab")],
        "held_out": [{"prompt": f"{a}+9=", "answer": "a"} for a in range(3)],
    }
    for name, records in data.items():
        if not (HERE / f"{name}.jsonl").exists():
            write_jsonl(HERE / f"{name}.jsonl", records)


def begin() -> None:
    """The run in the working directory, up to the kill."""
    Path("run.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf-8")
    child = os.fork()
    if child == 0:
        die_after_intents(8)
        oat("train", "run.yaml")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    database = sqlite3.connect("run/ledger.sqlite", isolation_level=None)
    for statement in ("wal_checkpoint(TRUNCATE)", "journal_mode = DELETE", "page_size = 1024"):
        database.execute(f"PRAGMA {statement}")
    database.execute("VACUUM")
    database.close()
    environment = Path("run/environment.json")
    entries = json.loads(environment.read_text(encoding="utf-8"))
    for entry in entries:
        entry["platform"] = {"system": "", "processor": "", "cores": 1, "devices": []}
    environment.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def die_after_intents(round_: int) -> None:
    """This process dies when the ledger has recorded the questions of a round (from 1) of training, before it
    has sent one."""
    from oat.ledger import Ledger

    submit, rounds = Ledger._submit, 0

    def counted(ledger: Any, rows: Any) -> None:
        nonlocal rounds
        rounds += any(row.question.key.purpose == "train" for row in rows)
        if rounds == round_:
            os.kill(os.getpid(), signal.SIGKILL)
        submit(ledger, rows)

    Ledger._submit = counted


def copy_given(folder: Path) -> None:
    for name in GIVEN:
        copy = shutil.copytree if (HERE / name).is_dir() else shutil.copy
        copy(HERE / name, folder / name)


def expect() -> None:
    """Write down what this program finds in the run, before and after it continues it."""
    sys.path.insert(0, str(HERE.parent / "support"))
    from last_digits import machine

    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        copy_given(Path())
        shutil.copytree(HERE / "run", "run")
        expected = {"machine": machine(), "begun": of_begun(Path("run"), Path("before"))}
        oat("train", "run/config.yaml")
        expected["continued"] = of_continued(Path("run"), Path("after"))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    if sys.argv[1:] != ["--expect"]:
        if not (PROGRAM / "ledger.py").exists():
            sys.exit(f"the run is made by the program of commit {FLAT}; see the head of this file")
        make_inputs()
        if not (HERE / "run").exists():
            with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
                copy_given(Path())
                begin()
                assert Path("run/checkpoints/latest").read_text().strip() == "step_00000004"
                shutil.copytree("run", HERE / "run")
    expect()


if __name__ == "__main__":
    main()
