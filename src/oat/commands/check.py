"""`oat check`: make a run without weights, and say what it would do.

Every part of the run is made as `oat train` makes it, but with tensors that have a shape and no memory. So
most mistakes are refused with the same messages. If these tensors do not tell whether a model will be refused
(`forecast/trial.py`), its weights are loaded for a moment. Otherwise these mistakes are found only by `oat
train`:
* weights that are not finite;
* a model that gives other logits with the engine's KV cache than without it, although all of its attention
  can be replaced;
* if the model is on the hub or Accelerate is not installed: tensors that the model's files lack or have in
  another shape.
"""

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from oat.commands.interruptible import say_loading
from oat.commands.train import add_run_arguments, print_config
from oat.errors import printable
from oat.files import absolute

if TYPE_CHECKING:
    from oat.assemble.run_inputs import RunInputs
    from oat.forecast.estimate import Lengths
    from oat.forecast.rows import Row
    from oat.resolve.resolved import Resolved
    from oat.rundir.provenance import Origin
    from oat.types import Price


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="CONFIG", help="a YAML file; flags --section.field value override its settings"
    )
    parser.add_argument("--memory", action="store_true", help="also estimate how much memory it needs")
    parser.add_argument(
        "--time",
        action="store_true",
        help="also measure how long a step, an evaluation and the run take, and try faster settings; it "
        "loads the weights, samples and learns for a minute or two, asks no oracle and keeps nothing",
    )
    parser.add_argument(
        "--show-tokens",
        action="store_true",
        help="also print an example of what the run learns from, token by token (this may load weights)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: config, rows and notes")
    add_run_arguments(parser)


def call(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.resolve.targets import loaded_for, resolve_present

    if arguments.print_config:
        return print_config(arguments, flags)
    resolved = resolve_present(arguments.target, flags)  # refuses what needs no torch to be refused
    say_loading(loaded_for(resolved.config, trains=False))
    rows, notes = check_run(
        resolved,
        arguments.source,
        accept_changed=arguments.accept_changed,
        with_tokens=arguments.show_tokens,
        with_memory=arguments.memory,
        with_time=arguments.time,
    )
    if arguments.json:
        found = {"config": arguments.target, "rows": [asdict(row) for row in rows], "notes": notes}
        print(json.dumps(found, indent=1))
    else:
        lines = [f"oat check: {arguments.target} is sound", *table(rows), *notes]
        print(printable("\n".join(lines)))
    return 0


def check_run(
    resolved: "Resolved",
    source: str | None = None,
    *,
    accept_changed: Collection[str] = (),
    with_tokens: bool = False,
    with_memory: bool = False,
    with_time: bool = False,
) -> "tuple[list[Row], list[str]]":
    """Refuse a configuration that `oat train` would refuse, and return rows and notes that describe the run.

    Args:
        source: "RUN@STEP" or "RUN": check a fork of this run; None: no fork.
        accept_changed: names of the inputs that may have changed, as for `open_run`.
        with_tokens: True: also show the responses to the first prompt, token by token (`token_lines`).
        with_memory: True: also estimate the memory that the run needs, which takes seconds.
        with_time: True: also measure how long the run takes, which takes a minute or two.

    Raises:
        OatError: `oat train` would refuse the run before its first step.
    """
    from oat.assemble.fingerprints import OwnFiles
    from oat.commands.show_tokens import token_lines
    from oat.forecast.all_rows import left, rows_of
    from oat.forecast.memory import memory_rows
    from oat.forecast.memory_apart import process_lines
    from oat.forecast.time_rows import time_rows
    from oat.forecast.trial import load_unknown
    from oat.opening.open_run import outlined

    found = _inspected(resolved, source, accept_changed)
    resolved, run_inputs, lengths = found.resolved, found.run_inputs, found.lengths
    trial = load_unknown(resolved, run_inputs.outline)
    processes = [f"{name}: {text}" for name, text in process_lines(resolved, lengths)]
    with outlined(resolved, run_inputs) as run:
        told = [*rows_of(resolved, run, run_inputs, found.origin, found.dearest), *processes]
        told += [f"memory: {found.memory}", *run.notes, *trial.untried]
        to_do = left(resolved, run, found.origin)
        OwnFiles(run_inputs.known, run_inputs.roles)()
    trial.decode()
    if with_tokens:
        told += token_lines(resolved, run_inputs)
    if with_memory:
        told += memory_rows(resolved, lengths, run_inputs.outline)
    if with_time:
        told += time_rows(resolved, lengths, to_do)
    notes = [each for each in told if isinstance(each, str)]
    return [each for each in told if not isinstance(each, str)], notes


class _Inspected(NamedTuple):
    """A configuration that was not refused, as the run would read it.

    Attributes:
        origin: the origin of a fork that is still to be made; None: no fork is to be made.
        dearest: the highest price of a question of training.
        memory: a text about the memory that is free.
    """

    resolved: "Resolved"
    origin: "Origin | None"
    run_inputs: "RunInputs"
    lengths: "Lengths"
    dearest: "Price"
    memory: str


def _inspected(resolved: "Resolved", source: str | None, accept_changed: Collection[str]) -> _Inspected:
    """Refuse what can be refused before a run is made. See `check_run`."""
    from oat.assemble.apart import refuse_without_cluster
    from oat.assemble.fingerprints import recorded
    from oat.assemble.late_checks import check_with_inputs
    from oat.assemble.run_inputs import gather_inputs, refuse_weights
    from oat.forecast.estimate import lengths_of
    from oat.forecast.highest_cost import highest_price, refuse_small_budget
    from oat.forecast.memory import refuse_short_cache, refuse_too_large
    from oat.opening.open_run import refuse_changes, settled
    from oat.rundir.checkpoints import Checkpoints

    resolved.refuse_missing_sinks()
    refuse_without_cluster(resolved)
    resolved, origin = settled(resolved, source)
    own = absolute(resolved.about.run_dir)
    directory, step = (own, None) if origin is None else (origin.run, origin.step)
    run_inputs = gather_inputs(resolved, known=recorded(directory, step))
    lengths = lengths_of(run_inputs)
    is_begun = origin is None and (directory / "config.yaml").exists()
    refuse_short_cache(resolved, lengths, run_inputs.outline, is_begun=is_begun)
    memory = refuse_too_large(resolved, lengths, run_inputs.outline)
    refuse_changes(resolved, run_inputs, directory / "ledger.sqlite", accept_changed, step)
    dearest = highest_price(resolved, run_inputs)
    refuse_small_budget(resolved, dearest, is_begun=is_begun)
    check_with_inputs(resolved, run_inputs, dearest, is_begun=is_begun or origin is not None)
    has_checkpoint = bool(Checkpoints(directory / "checkpoints", every=1, keep_last=1).steps)
    refuse_weights(resolved, run_inputs, is_begun=has_checkpoint)
    return _Inspected(resolved, origin, run_inputs, lengths, dearest, memory)


def table(rows: "Sequence[Row]") -> list[str]:
    """Return the lines of a table of rows. Numbers are aligned at their right ends."""
    cells = [(row.name, _number(row.number), row.unit, row.setting) for row in rows]
    numeric = [each for each, row in zip(cells, rows, strict=True) if not isinstance(row.number, str)]
    widths = [max(len(each[column]) for each in (cells if column == 0 else numeric)) for column in range(3)]
    lines = []
    for row, (name, number, unit, setting) in zip(rows, cells, strict=True):
        if isinstance(row.number, str):
            value = f"{number}{', ' if unit else ''}{unit}".ljust(widths[1] + 2 + widths[2])
        else:
            value = f"{number:>{widths[1]}}  {unit:<{widths[2]}}"
        lines.append(f"  {name:<{widths[0]}}  {value}  {setting}".rstrip())
    return lines


def _number(number: float | str) -> str:
    if isinstance(number, str):
        return number
    return f"{number:,}" if isinstance(number, int) or number >= 1000 else f"{number:,.3g}"
