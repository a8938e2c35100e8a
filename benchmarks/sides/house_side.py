"""The side of `oat` in `benchmarks/house.py`: one-step runs in the folder `house.py` has made, observed.

    python house_side.py entered | warm N | made     prints one line of JSON

The tree that is measured comes first in PYTHONPATH. This file names nothing of it but the command line, the
file `loop.py` with its functions `fill` and `learn`, and the class `DPOConfig`, so it works in trees whose
packages differ.
"""

import dataclasses
import functools
import io
import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from itertools import count
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
WITH_CLASSES = {"run": "run, with classes", "before": "before, with classes"}
LOOP = "loop.py"
WARM_UP = 3
SAMPLED_EVERY_S = 0.001
WORK = {
    "YAML": r"/yaml/",
    "outlines of models": r"/oat/models/outline",
    "settings": r"/oat/(config/|resolve/|build/(resolved?|parts|defaults|given|targets|cross_checks))",
    "models loaded": r"/oat/models/(loading|lora|weight_files|causal_lm|compatibility)",
}
"""What a run's start does, by the files of the frames in which it is done. The first that matches counts."""
_places = count()


def entered() -> dict[str, Any]:
    """Return the files of `oat` of which a function runs in a run, by window (`Windows`), and those that are
    imported."""
    windows = Windows(_root())
    threading.setprofile(windows.note)
    sys.setprofile(windows.note)
    try:
        _train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if not (windows.is_sampled and windows.is_learned):
        raise SystemExit("house_side: the first generate, or the end of the first learn, was not seen")
    imported = {
        str(Path(module.__file__).relative_to(windows.root))
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "oat" and getattr(module, "__file__", None)
    }
    return {"imported": sorted(imported), **{name: sorted(files) for name, files in windows.found.items()}}


class Windows:
    """What `sys.setprofile` calls: notes the files whose functions run.

    Attributes:
        found: by window: "run"; "before" the first token is sampled (the first call of a function `generate`
            in `engines/`); "between" the beginning of the first `fill` and the end of the first `learn`; and
            the first two with the bodies of classes and comprehensions.
    """

    def __init__(self, root: Path):
        self.root = root
        self.found: dict[str, set[str]] = {
            name: set() for name in ("run", "before", "between", *WITH_CLASSES.values())
        }
        self.is_sampled = self.is_filling = self.is_learned = False
        self._places: dict[CodeType, tuple[str, bool] | None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code not in self._places:
            self._places[code] = _file_of(code, self.root)
        place = self._places[code]
        if place is not None:
            file, is_function = place
            if event == "return":
                self.is_learned |= (file, code.co_name) == (LOOP, "learn")
            else:
                self.is_sampled |= code.co_name == "generate" and file.startswith("engines/")
                self.is_filling |= (file, code.co_name) == (LOOP, "fill")
                self._note_file(file, is_function)

    def _note_file(self, file: str, is_function: bool) -> None:
        is_open = {
            "run": True,
            "before": not self.is_sampled,
            "between": self.is_filling and not self.is_learned,
        }
        for window in (name for name, now in is_open.items() if now):
            if is_function:
                self.found[window].add(file)
            if window in WITH_CLASSES:
                self.found[WITH_CLASSES[window]].add(file)


def warm(repetitions: int) -> dict[str, Any]:
    """Return the processor's seconds of each of some runs in a process that has made such runs. As many
    further runs are sampled, by the processor's time, for the shares of the work in `WORK` and of the loop's
    functions."""
    for _ in range(WARM_UP):
        _train()
    seconds = []
    for _ in range(repetitions):
        begin = time.process_time()
        _train()
        seconds.append(time.process_time() - begin)
    work: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    root = _root()

    def sample(_: int, frame: FrameType | None) -> None:
        files, part = [], "outside of the loop"
        while frame is not None:
            code = frame.f_code
            files.append(code.co_filename)
            if code.co_filename == f"{root}/{LOOP}" and code.co_name not in ("steps", "train"):
                part = code.co_name  # of the outermost function
            frame = frame.f_back
        parts[part] += 1
        for name, pattern in WORK.items():
            if any(re.search(pattern, file) for file in files):
                work[name] += 1
                return
        work["other"] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, SAMPLED_EVERY_S, SAMPLED_EVERY_S)
    for _ in range(repetitions):
        _train()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    total = max(1, sum(work.values()))
    cpu_ms = 1e3 * median(seconds)
    return {
        "seconds": seconds,
        "samples": total,
        "work_ms": {name: cpu_ms * work[name] / total for name in (*WORK, "other")},
        "parts_ms": {name: cpu_ms * number / total for name, number in parts.most_common()},
    }


def made() -> dict[str, Any]:
    """Return how often each `Config` dataclass of `oat` is made in a run, in a process that has made a run:
    by a call, or by msgspec, which calls only `__post_init__`. None for `DPOConfig`: it is no dataclass."""
    _train()
    classes = {
        value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "oat"
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__name__.endswith("Config")
        and value.__module__.startswith("oat")
    }
    counts: Counter[str] = Counter()
    observed = [one for one in classes if dataclasses.is_dataclass(one)]
    for one in observed:
        _observe(one, counts)
    _train()
    is_seen = any(one.__name__ == "DPOConfig" for one in observed)
    return {"DPOConfig": counts["DPOConfig"] if is_seen else None, "all": dict(counts.most_common())}


def _observe(one: type, counts: Counter[str]) -> None:
    making = threading.local()
    init, after = one.__init__, getattr(one, "__post_init__", None)

    @functools.wraps(init)
    def counted(self: Any, *positional: Any, **named: Any) -> None:
        if type(self) is not one:
            return init(self, *positional, **named)
        counts[one.__name__] += 1
        making.now = True
        try:
            init(self, *positional, **named)
        finally:
            making.now = False

    def counted_after(self: Any) -> None:
        if type(self) is one and not getattr(making, "now", False):
            counts[one.__name__] += 1
        if after is not None:
            after(self)

    one.__init__ = counted  # type: ignore[misc]
    one.__post_init__ = counted_after  # type: ignore[attr-defined]
    if "__msgspec_cache__" in vars(one):  # it knows whether the class has a __post_init__
        del one.__msgspec_cache__  # type: ignore[attr-defined]


def _train() -> None:
    from oat.cli import main

    run_dir = Path(f"run_{sys.argv[1]}_{next(_places)}")
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = main(["train", "config.yaml", "--run_dir", str(run_dir)])
    if code != 0:
        raise SystemExit(f"house_side: oat train ended with {code}: {printed.getvalue()}")


def _root() -> Path:
    """Return the folder of `oat`, which is not imported yet."""
    for entry in sys.path:
        if (Path(entry) / "oat" / LOOP).exists():
            return (Path(entry) / "oat").resolve()
    raise SystemExit("house_side: no oat in the path")


def _file_of(code: CodeType, root: Path) -> tuple[str, bool] | None:
    """Return the name of a code's file, relative to `oat`, and whether the code is a function's. None: it is
    the level of a module, or another's."""
    if code.co_name == "<module>" or not code.co_filename.startswith(f"{root}/"):
        return None
    is_function = code.co_flags & CO_OPTIMIZED and code.co_flags & CO_NEWLOCALS
    return code.co_filename.removeprefix(f"{root}/"), bool(is_function) and code.co_name not in COMPREHENSIONS


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    answer = {"entered": entered, "made": made, "warm": warm}[verb](*map(int, rest))
    print(json.dumps(answer))
