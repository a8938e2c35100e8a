"""The command line: parses and calls, nothing else."""

import argparse
import importlib
import json
import os
import sqlite3
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oat.commands.serve import add_serve
from oat.control.interruption import Interruption
from oat.errors import ConfigError, Interrupted, OatError, OatWarning, described, printable
from oat.files import seen, seen_from
from oat.plugins.loading import naming, place_of

if TYPE_CHECKING:
    from oat.build.resolved import Resolved
    from oat.build.speaker import Manner


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code; docs/exit-codes.md has the table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    arguments, rest = _parser().parse_known_args(argv)
    if rest and not hasattr(arguments, "target"):
        print(
            (
                f"oat {arguments.command}: {rest[0]!r} is not an argument of it; see oat {arguments.command} "
                "--help"
            ),
            file=sys.stderr,
        )
        return 2
    try:
        with seen_from(), _short_warnings(), naming({}):
            code: int = arguments.call(arguments, rest)
        return code
    except OatError as error:
        print(f"oat {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our lines has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (sqlite3.DatabaseError, OSError) as error:
        what = printable(f"{type(error).__name__}: {error}")
        print(f"oat {arguments.command}: {what}; mend this and run the same command again", file=sys.stderr)
        return 1
    except Interrupted as end:
        how = "goes on where it stopped" if arguments.command == "train" else "begins anew"
        print(f"oat {arguments.command}: {end.name} ended it; the same command {how}", file=sys.stderr)
        return end.exit_code
    except KeyboardInterrupt:
        how = (
            "; the same command goes on from the last checkpoint"
            if arguments.command in ("train", "quickstart")
            else ""
        )
        print(f"oat {arguments.command}: stopped{how}", file=sys.stderr)
        return 130
    except BaseException as error:  # of a user's algorithm or explorer, say
        place = place_of(error)
        if place is None or os.environ.get("OAT_TRACEBACK"):
            raise
        what = f"{place} raised {printable(described(error))}"
        print(
            (
                f"oat {arguments.command}: {what}; mend it and run the same command again (OAT_TRACEBACK=1 "
                "shows all of it)"
            ),
            file=sys.stderr,
        )
        return 1


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Within it a warning of ours is one line, without a place in the source."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, OatWarning):
            return f"oat: warning: {' '.join(str(message).splitlines())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oat",
        description="Align language models online: sample, ask, learn, repeat.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, call: object, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(call=call)
        return sub

    train = command("train", _train, "start a run, or continue the one in its directory")
    train.add_argument("target", metavar="CONFIG", help="a YAML file; --section.field value flags go over it")
    train.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="trace N steps from the second one on; the trace goes to RUN/profile",
    )
    check = command(
        "check",
        _check,
        (
            "say what a configuration would run, and refuse what `oat train` would refuse; no weights are "
            "loaded"
        ),
    )
    check.add_argument("target", metavar="CONFIG", help="a YAML file; --section.field value flags go over it")
    check.add_argument("--memory", action="store_true", help="also estimate how much memory it needs")
    check.add_argument(
        "--show-tokens",
        action="store_true",
        help="also print an example of what is learned from, token by token",
    )
    for sub in (train, check):
        sub.add_argument(
            "--from",
            dest="source",
            metavar="RUN@STEP",
            help="begin a new run where that one stood, under settings that differ",
        )
        sub.add_argument(
            "--accept-changed",
            action="append",
            default=[],
            metavar="reward",
            help="go on though the reward's file has changed",
        )
        sub.add_argument(
            "--print-config",
            action="store_true",
            help="print the resolved configuration as YAML, and do nothing else",
        )
    evaluate = command(
        "eval", _eval, "evaluate a run's newest checkpoint, or the start model of a configuration"
    )
    evaluate.add_argument(
        "target",
        metavar="RUN|CONFIG",
        help=(
            "a run directory or a YAML file; with --against also a model; --section.field value flags go "
            "over it"
        ),
    )
    evaluate.add_argument(
        "--against",
        metavar="B",
        help="instead, the win rate over another run, configuration or model on the same prompts",
    )
    export = command("export", _export, "write a run's policy as a model directory that transformers loads")
    export.add_argument("run", metavar="RUN")
    export.add_argument("out", metavar="OUT")
    export.add_argument(
        "--step",
        metavar="N|best",
        help="of the checkpoint; by default the newest. best: with the highest checkpoint.best_metric",
    )
    export.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with LoRA the adapter alone, for PEFT, instead of the merged model",
    )
    _add_speaking(
        command("generate", _generate, "write responses to the prompts of a file, as lines of JSON"),
        is_file=True,
    )
    _add_speaking(
        command(
            "chat", _chat, "talk to a run's policy, or to a model; through a pipe, lines in and answers out"
        )
    )
    samples = command(
        "samples", _samples, "show prompts, responses and what the oracle said of them, newest first"
    )
    samples.add_argument("run", metavar="RUN")
    samples.add_argument(
        "--step", type=int, metavar="N", help="only what this step learned from, counted as in metrics.jsonl"
    )
    samples.add_argument(
        "--eval",
        dest="evaluations",
        action="store_true",
        help="the responses of evaluations, rather than those of training",
    )
    ledger = command(
        "ledger",
        _ledger,
        "say what a run asked, of whom, and what came back; or write its answers as a data set",
    )
    ledger.add_argument("run", metavar="RUN")
    ledger.add_argument(
        "--check", action="store_true", help="hold the file against itself; exit code 1 if it is not sound"
    )
    ledger.add_argument("--export", metavar="FILE", help="write the answers to FILE, .jsonl or .parquet")
    ledger.add_argument(
        "--layout",
        default="preference",
        metavar="preference|scored",
        help="of the exported rows, as TRL reads them",
    )
    plot = command(
        "plot",
        _plot,
        "plot a metric of runs; those that differ only in their seed become one line with a band",
    )
    plot.add_argument("runs", metavar="RUN", nargs="+")
    metric = (
        "of docs/metrics.md, also several times; by default eval/sampled, or reward/mean, or loss/total; "
        "against a KL proxy and gold"
    )
    plot.add_argument("--metric", action="append", default=[], metavar="NAME", help=metric)
    plot.add_argument(
        "--against",
        default="steps",
        metavar="steps|queries|tokens|time|kl|sqrt_kl",
        help="the axis; by default steps",
    )
    plot.add_argument(
        "--out",
        default="plot.png",
        metavar="FILE.png",
        help="the numbers go beside it, as FILE.csv; FILE.csv writes them alone",
    )
    digest = command("digest", _digest, "print hashes of a run; two runs with equal hashes are equal")
    digest.add_argument("run", metavar="RUN")
    bench = command(
        "bench",
        _bench,
        "measure what this machine can do: bandwidth, matrix products, and what they mean for a model",
    )
    bench.add_argument("--model", metavar="PATH", help="a directory or a hub id")
    bench.add_argument(
        "--json", action="store_true", help="bytes, operations and tokens a second as one JSON object"
    )
    add_serve(command("serve", _serve, "serve a reward model over HTTP, for the oracle `remote`"))
    quickstart = command(
        "quickstart", _quickstart, "train, align and compare a tiny model on this machine in a few minutes"
    )
    quickstart.add_argument("--out", default="quickstart", metavar="DIR")
    quickstart.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the data, the start and the runs"
    )
    return parser


def _add_speaking(command: argparse.ArgumentParser, *, is_file: bool = False) -> None:
    """Who is to answer, and how; and of a file, what is answered."""
    command.add_argument(
        "model", metavar="RUN|MODEL", help="a run, whose policy answers; or a model, an adapter or a hub id"
    )
    if is_file:
        command.add_argument(
            "--prompts",
            required=True,
            metavar="FILE",
            help="as prompts.path: a file, a saved dataset or one of the hub",
        )
        command.add_argument(
            "--prompt-key", metavar="NAME", help="column of the prompt; by default the run's, or prompt"
        )
        command.add_argument(
            "--out",
            metavar="FILE",
            help="a new file, there whole or not at all; by default the standard output",
        )
        command.add_argument("--n", type=int, default=1, metavar="N", help="responses a prompt; by default 1")
    _add_manner(command)


def _add_manner(command: argparse.ArgumentParser) -> None:
    """How a model is to answer."""
    command.add_argument(
        "--step", metavar="N|best", help="of a run's checkpoint, as for oat export; by default the newest"
    )
    command.add_argument(
        "--template",
        metavar="T",
        help=(
            "as render.template, or none: text is continued as it stands; by default the run's or the model's"
        ),
    )
    command.add_argument("--system", metavar="TEXT", help="a system message for conversations that have none")
    command.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens of a response; by default the run's, or 256",
    )
    command.add_argument(
        "--temperature", type=float, metavar="X", help="0 is greedy; by default the run's, or 1"
    )
    command.add_argument(
        "--top-p", type=float, metavar="X", help="as sampling.top_p; by default the run's, or 1"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random numbers; by default 0"
    )
    command.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        metavar="cpu|gpu",
        help="where it computes; by default as the run, or on the CPU",
    )
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        metavar="bfloat16|float32",
        help="of a model's weights; by default float32",
    )


def _manner(arguments: argparse.Namespace) -> "Manner":
    from oat.build.speaker import Manner

    names = ("template", "system", "temperature", "top_p", "max_new_tokens", "dtype", "seed")
    own = {name: getattr(arguments, name) for name in names}
    return Manner(step=_checkpoint(arguments.step), profile=arguments.device, **own)


@contextmanager
def _heard() -> Iterator[Interruption]:
    """Within it signals are the command's. One that comes while torch is imported waits until it is: what is
    raised within its C++ aborts the process."""
    told = Interruption()
    with told.heard():
        importlib.import_module("torch")
        yield told


def _train(arguments: argparse.Namespace, flags: list[str]) -> int:
    with _heard() as told:
        with told.at_once():  # a start is over soon, and leaves nothing
            from oat.build.targets import resolve_file

            if arguments.profile is not None and arguments.profile < 1:
                raise ConfigError(
                    f"--profile is {arguments.profile}; give the number of steps to trace, at least 1"
                )
            resolved = resolve_file(arguments.target, flags)
            if arguments.print_config:
                print(resolved.as_yaml(), end="")
                return 0
        return _trained(arguments, resolved, told)


def _trained(arguments: argparse.Namespace, resolved: "Resolved", told: Interruption) -> int:
    about = resolved.about
    with told.at_once():
        from oat.build.open_run import open_run
        from oat.loop import train
        from oat.reports.outcome import Outcome
        from oat.reports.progress import opening, shown
        from oat.reports.trace import train_traced

    with open_run(resolved, arguments.source, arguments.accept_changed, told) as run:
        outcome = Outcome(run, about)
        print(printable("\n".join(f"oat train: {line}" for line in opening(run, about.run_dir))), flush=True)
        with shown(run, about.run_dir) as show:

            def report(step: int, metrics: dict[str, float]) -> None:
                show(step, metrics)
                outcome.note_step(step)

            if arguments.profile is None:
                reason, trace = train(run, report), None
            else:
                reason, trace = train_traced(run, report, seen(about.run_dir) / "profile", arguments.profile)
        if arguments.profile is not None:
            where = (
                f"the trace is {trace}; open it in Perfetto or chrome://tracing"
                if trace
                else "no trace: the run had no second step"
            )
            print(f"oat train: {where}")
        closing = outcome.lines(
            reason, outcome.nothing_learned(), f"; write its model with: oat export {about.run_dir} OUT"
        )
    print(printable("\n".join(f"oat train: {line}" for line in closing)))
    return 0


def _check(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.build.targets import resolve_file

    resolved = resolve_file(arguments.target, flags)
    if arguments.print_config:
        print(resolved.as_yaml(), end="")
        return 0
    from oat.commands.check import outline

    shown = {"with_tokens": arguments.show_tokens, "with_memory": arguments.memory}
    lines = outline(resolved, arguments.source, accept_changed=arguments.accept_changed, **shown)
    print(printable("\n".join([f"oat check: {arguments.target} is sound", *lines])))
    return 0


def _eval(arguments: argparse.Namespace, flags: list[str]) -> int:
    with _heard() as told, told.at_once():
        return _evaluated(arguments, flags)


def _evaluated(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.build.targets import resolve_evaluated
    from oat.commands.eval import evaluate_once
    from oat.reports.terminal import numbers_table

    if arguments.against is not None:
        return _compare(arguments, flags)
    target = Path(arguments.target)
    resolved = resolve_evaluated(target, flags)
    values = evaluate_once(resolved, target if target.is_dir() else None)
    if sys.stdout.isatty():
        numbers = {name: value for name, value in values.items() if name != "step"}
        title = f"{target} after {values['step']} steps, asked about {resolved.about.evaluated}"
        print(numbers_table(title, numbers))
    else:
        print(json.dumps(values))
    return 1 if "eval/failed" in values else 0


def _compare(arguments: argparse.Namespace, flags: list[str]) -> int:
    from oat.commands.compare import compare_models
    from oat.reports.terminal import numbers_table

    found = compare_models(arguments.target, arguments.against, flags)
    if sys.stdout.isatty():
        steps = [
            f" after {found[f'{side}_step']} steps" if found[f"{side}_step"] else "" for side in ("a", "b")
        ]
        title = (
            f"{found['a']}{steps[0]} against {found['b']}{steps[1]}, {found['prompts']} prompts, judged "
            f"by {found['oracle']}"
        )
        about = ("a", "b", "a_step", "b_step", "prompts", "oracle")
        print(numbers_table(title, {name: value for name, value in found.items() if name not in about}))
    else:
        print(json.dumps(found))
    return 0


def _export(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.export import export_run

    replaced = any(Path(arguments.out, name).exists() for name in ("config.json", "adapter_config.json"))
    step = export_run(
        Path(arguments.run), Path(arguments.out), _checkpoint(arguments.step), adapter=arguments.adapter
    )
    print(
        f"oat export: the model after {step} steps is in "
        f"{arguments.out}{', in place of the model that was there' if replaced else ''}"
    )
    return 0


def _checkpoint(which: str | None) -> int | Literal["best"] | None:
    """What `--step` says.

    Raises:
        ConfigError: it is neither a number nor best.
    """
    if which is None:
        return None
    if which == "best":
        return "best"
    if not which.isdecimal():
        raise ConfigError(f"--step is {which!r}; give the step of a checkpoint, or best")
    return int(which)


def _generate(arguments: argparse.Namespace, _: list[str]) -> int:
    with _heard() as told, told.at_once():
        return _generated(arguments)


def _generated(arguments: argparse.Namespace) -> int:
    from oat.build.speaker import load_speaker
    from oat.commands.generate import generate, refuse_known, write_lines

    if arguments.n < 1:
        raise ConfigError(f"--n is {arguments.n}; give at least 1 response a prompt")
    out = None if arguments.out is None else seen(arguments.out)
    if out is not None:
        refuse_known(out)
    lines = generate(
        load_speaker(arguments.model, _manner(arguments)),
        arguments.prompts,
        arguments.n,
        prompt_key=arguments.prompt_key,
    )
    if out is None:
        for line in lines:
            print(line, flush=True)
    else:
        count = write_lines(lines, out)
        print(printable(f"oat generate: {arguments.n} responses to each of {count:,} prompts are in {out}"))
    return 0


def _chat(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.build.speaker import NO_TEMPLATE, load_speaker
    from oat.commands.chat import chat

    chat(load_speaker(arguments.model, _manner(arguments)), continues=arguments.template == NO_TEMPLATE)
    return 0


def _samples(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.samples import sample_pages
    from oat.reports.terminal import show_pages

    show_pages(sample_pages(Path(arguments.run), arguments.step, evaluations=arguments.evaluations))
    return 0


def _ledger(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.accounts import accounts_table, export_answers, problems

    run_dir = Path(arguments.run)
    if arguments.check:
        found = problems(run_dir)
        for problem in found:
            print(printable(f"oat ledger: {run_dir}: {problem}"), file=sys.stderr)
        if found:
            return 1
        print("the ledger is sound")
    if arguments.export is None:
        print(printable(accounts_table(run_dir)))
    else:
        rows = export_answers(run_dir, Path(arguments.export), arguments.layout)
        print(f"oat ledger: {rows} rows are in {arguments.export}")
    return 0


def _plot(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.reports.plot import plot_runs

    files = plot_runs(
        [Path(run) for run in arguments.runs], Path(arguments.out), arguments.metric, arguments.against
    )
    print(f"oat plot: {' and '.join(map(str, files))} {'is' if len(files) == 1 else 'are'} written")
    return 0


def _digest(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.export import digest_run

    for name, value in digest_run(Path(arguments.run)).items():
        print(f"{name:<10} {value}")
    return 0


def _bench(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.bench import bench, table

    found = bench(arguments.model)
    print(json.dumps(found) if arguments.json else table(found))
    return 0


def _serve(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.commands.serve import serve

    return serve(arguments)


def _quickstart(arguments: argparse.Namespace, _: list[str]) -> int:
    from oat.quickstart import quickstart

    return quickstart(Path(arguments.out), arguments.seed)
