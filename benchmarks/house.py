"""The house in figures: what a small run enters and costs, and what the code is made of.

    python benchmarks/house.py [--tree DIR] [--repetitions 15] [--json] [--tests]

measures the `src/oat` of this checkout, or of another one (`--tree`), with the Python that runs this script.
So two commits are compared on one machine, without an environment for each. The script names nothing that
lies in a package of `oat`, but for `loop.fill` and `loop.learn`. Times are of the processor, on one thread,
and medians of `--repetitions` (cold starts: of a third of them).

The run is one step of online DPO: `oat train` with a Llama of two layers and 20 thousand random weights, 4
prompts, two responses of at most 4 tokens, a reward function in a file, and a checkpoint at its end.

*entered*: files of which at least one function runs (a lambda is one; module level, class bodies and
    comprehensions are none) in a fresh process, from the first import of `oat` to the end of the command.
    *before the first token*: those of which one runs before the engine's first `generate`.
    *with class bodies*: the same if bodies of classes and comprehensions count too, which an import runs.
    *from prompt to gradient*: from the beginning of the first `loop.fill` to the end of the first
    `loop.learn`.
*statements*: nodes of the kind `ast.stmt`, without docstrings. *lines of code*: lines on which a statement or
    its continuation lies, without docstrings, comments and blank lines.
*docstring words*: words of all docstrings, those of attributes too, as strings that stand alone.
*checks*: statements that do nothing but refuse. These are (1) a `raise` of `OatError` or of a class derived
    from it; (2) a call of a function that only refuses; (3) an `if`, `for`, `while`, `with` or `match` with
    such statements only, and before them assignments to names; an `if` counts by its body, and its `else` by
    itself; (4) functions all of whose statements are such, or that are declared to return an error or a
    `Check` (a rule between settings), or that only statements of these kinds name, such as those that write
    a message. Ranges in the annotation of a field are no statements. Their share is told of the statements
    and of the lines of code.
*private, called once*: functions and methods with one leading underscore whose name is defined once and read
    once in their file, as a share of all functions and methods.
*settings made*: how often the dataclass `DPOConfig` is made in a warm run, and all `*Config` together.
*where a warm run's time goes*: samples of the processor's time of as many further runs, by the frames that
    work: in yaml, in `models/outline*`, in the files that read, derive and check settings, and in those that
    load models, the first of these that is found; and by the loop's functions.
"""

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
SIDE = HERE / "sides" / "house_side.py"
CONFIG = """\
model: {path: model}
prompts: {path: prompts.jsonl}
sampling: {max_new_tokens: 4}
oracle: {name: "reward.py:reward"}
algorithm: {name: dpo, prompts: 4}
learner: {learning_rate: 0.003}
compute: {threads: 1}
stop: {max_steps: 1}
"""
WRONG = CONFIG.replace("learning_rate", "lerning_rate")
REWARD = (
    "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
)
MODEL = """
from pathlib import Path
from oat.testing.tiny import write_tiny_model
write_tiny_model(Path("model"), "0123+=ab")
"""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def make_inputs(folder: Path, tree: Path) -> None:
    """Write the model, the prompts, the reward function and two configurations into a folder."""
    _python(["-c", MODEL], folder, tree)
    lines = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(4) for b in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, text in {"config.yaml": CONFIG, "wrong.yaml": WRONG, "reward.py": REWARD}.items():
        (folder / name).write_text(text, encoding="utf-8")


def measure_runs(tree: Path, repetitions: int) -> dict[str, Any]:
    """Return the figures of runs: files, times of the processor in ms, and settings made."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_inputs(folder, tree)
        entered, made, warm = (
            json.loads(_python([str(SIDE), *words], folder, tree))
            for words in (["entered"], ["made"], ["warm", str(repetitions)])
        )
        times = max(3, repetitions // 3)
        cold = {
            name: [_cold(["-m", "oat", *words], folder, tree, code) for _ in range(times)]
            for name, words, code in (
                ("help_ms", ["--help"], 0),
                ("wrong_setting_ms", ["train", "wrong.yaml"], 2),
            )
        }
    milliseconds = [1e3 * each for each in warm["seconds"]]
    return {
        "files_imported": len(entered["imported"]),
        "files_entered": len(entered["run"]),
        "files_before_first_token": len(entered["before"]),
        "files_entered_with_classes": len(entered["run, with classes"]),
        "files_before_with_classes": len(entered["before, with classes"]),
        "files_prompt_to_gradient": len(entered["between"]),
        "DPOConfig_made": made["DPOConfig"],
        "configs_made": sum(made["all"].values()),
        "configs_made_by_name": made["all"],
        "warm_step_ms": median(milliseconds),
        "warm_step_ms_range": [min(milliseconds), max(milliseconds)],
        "warm_work_ms": warm["work_ms"],
        "warm_parts_ms": warm["parts_ms"],
        **{name: median(found) for name, found in cold.items()},
        "entered": entered,
    }


def _python(words: Sequence[str], folder: Path, tree: Path) -> str:
    """Return what a fresh process with the tree's `oat` prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"house: {words[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def _cold(words: Sequence[str], folder: Path, tree: Path, code: int) -> float:
    """Return the processor's time of a fresh process in ms."""
    before = _children_s()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != code:
        raise SystemExit(f"house: {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return 1e3 * (_children_s() - before)


def _environment(tree: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_tests(tree: Path) -> dict[str, float]:
    """Run `make test` of the tree, which needs its own environment, and return its processor's seconds, with
    those of its children. Its output goes to stderr."""
    before = _children_s()
    done = subprocess.run(["make", "-C", str(tree), "test"], stdout=sys.stderr, check=False)
    return {"make_test_cpu_s": _children_s() - before, "make_test_exit_code": done.returncode}


def measure_code(source: Path) -> dict[str, Any]:
    """Return the figures of the code in a folder: sizes, checks and private functions."""
    modules = [
        Module(ast.parse(file.read_text(encoding="utf-8")), file, _place(file, source))
        for file in sorted(source.rglob("*.py"))
    ]
    docstrings = [text for module in modules for text in module.docstrings()]
    statements = [node for module in modules for node in module.statements()]
    lines = sum(len(module.lines(module.statements())) for module in modules)
    checks = Checks(modules).by_module()
    checked_statements = sum(map(len, checks.values()))
    checked_lines = sum(len(module.lines(found)) for module, found in checks.items())
    functions, once = private_once(modules)
    return {
        "files": len(modules),
        "lines": sum(len(file.path.read_text(encoding="utf-8").splitlines()) for file in modules),
        "lines_of_code": lines,
        "statements": len(statements),
        "docstring_words": sum(len(text.split()) for text in docstrings),
        "check_statements": checked_statements,
        "check_statements_share": checked_statements / len(statements),
        "check_lines": checked_lines,
        "check_lines_share": checked_lines / lines,
        "functions": functions,
        "private_called_once": once,
        "private_called_once_share": once / functions,
    }


@dataclass(frozen=True, eq=False)
class Module:
    """A module, its file, and its name as it is imported."""

    tree: ast.Module
    path: Path
    place: str

    def functions(self) -> Iterator[Function]:
        return (n for n in ast.walk(self.tree) if isinstance(n, FUNCTIONS))

    def statements(self) -> list[ast.stmt]:
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and _text(n) is None]

    def docstrings(self) -> Iterator[str]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and (text := _text(node)) is not None:
                yield text

    def lines(self, statements: Iterable[ast.stmt]) -> set[int]:
        """Return the numbers of the lines on which these statements lie. Of a statement with a body, only its
        head; the statements of the body count by themselves."""
        found: set[int] = set()
        for node in statements:
            body = _bodies(node)
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            last = body[0][0].lineno - 1 if body and body[0] else (node.end_lineno or node.lineno)
            if body and body[0]:
                before = [each.lineno for each in getattr(body[0][0], "decorator_list", ())]
                last = min([last + 1, *before]) - 1
                inner = [n.end_lineno or 0 for n in _heads(node)]
                last = min(last, max([node.lineno, *inner]))  # no comment between head and body
            found.update(range(first, max(first, last) + 1))
        return found


def _text(node: ast.stmt) -> str | None:
    """Return the text of a docstring, also of an attribute's. None: the statement is something else."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return node.value.value if is_text and isinstance(node.value.value, str) else None  # type: ignore[union-attr]


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks of a statement: its body, else, handlers and finally."""
    found = [
        block
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, name, None), list) and block
    ]
    found += [each.body for each in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    return found


def _heads(node: ast.AST) -> Iterator[ast.expr | ast.arg]:
    """Return the expressions and arguments of a statement that are not in its blocks."""
    for name, value in ast.iter_fields(node):
        if name in ("body", "orelse", "finalbody", "handlers", "cases"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from (n for n in ast.walk(each) if isinstance(n, ast.expr | ast.arg))


def _place(file: Path, source: Path) -> str:
    words = file.relative_to(source.parent).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def error_names(modules: Sequence[Module]) -> set[str]:
    """Return the names of the error classes: those of `errors.py`, and all that are derived from them."""
    classes = {
        node.name: {_name(base) for base in node.bases}
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"OatError"}
    while new := {name for name, bases in classes.items() if bases & found} - found:
        found |= new
    return found


def _name(node: ast.AST | None) -> str:
    """Return the last word of a name, an attribute or a call of one; "" for anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class Checks:
    """The statements of modules that only refuse.

    Attributes:
        errors: the names of the error classes.
        found: the functions that only refuse, or make an error.
    """

    def __init__(self, modules: Sequence[Module]):
        self.modules = modules
        self.errors = error_names(modules)
        self.own = {module: {node.name: node for node in module.functions()} for module in modules}
        self.by_name: dict[str, list[Function]] = {}
        for module in modules:
            for node in module.functions():
                self.by_name.setdefault(node.name, []).append(node)
        by_place = {module.place: module for module in modules}
        self.imported = {
            module: {
                alias.asname or alias.name: self.own[by_place[node.module]].get(alias.name)
                for node in ast.walk(module.tree)
                if isinstance(node, ast.ImportFrom) and node.module in by_place
                for alias in node.names
            }
            for module in modules
        }
        self.found = {each for nodes in self.by_name.values() for each in nodes if self._makes_error(each)}
        while new := {
            node
            for module in modules
            for node in module.functions()
            if node not in self.found and self._is_refusal(_code(node), module)
        }:
            self.found |= new

    def by_module(self) -> dict[Module, set[ast.stmt]]:
        """Return the statements of each module that only refuse, with functions that only these call."""
        checks = {module: set(self._checked(module.tree, module)) for module in self.modules}
        reads = self._reads({module: module.statements() for module in self.modules})
        while True:
            of_checks = self._reads(checks)
            served = {
                (module, node)
                for module in self.modules
                for node in module.functions()
                if 0 < reads[node] == of_checks[node] and node not in checks[module]
            }
            if not served:
                return checks
            for module, node in served:
                checks[module].update(_all(node))

    def _reads(self, statements: Mapping[Module, Iterable[ast.stmt]]) -> Counter[Function]:
        """Return how often each function is named in these statements."""
        found: Counter[Function] = Counter()
        for module, nodes in statements.items():
            for part in (part for node in nodes for part in _heads(node)):
                if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Load):
                    found.update(self._meant(part, module))
        return found

    def _meant(self, node: ast.AST | None, module: Module) -> list[Function]:
        """Return the functions that a name means, or may mean if it is an attribute."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Name):
            one = self.imported[module].get(node.id) or self.own[module].get(node.id)
            return [one] if one is not None else []
        return self.by_name.get(_name(node), [])

    def _makes_error(self, node: Function) -> bool:
        """Return whether a function is declared to return an error, or checks between settings (`Check`)."""
        names = {_name(n) for n in ast.walk(node.returns)} - {""} if node.returns is not None else set()
        return (bool(names) and names <= self.errors) or "Check" in names

    def _is_refusal(self, block: Sequence[ast.stmt], module: Module) -> bool:
        """Return whether a block has refusals, and otherwise only what prepares them."""
        refuses = [self._refuses(each, module) for each in block]
        return any(refuses) and all(
            refusal or _prepares(each) for each, refusal in zip(block, refuses, strict=True)
        )

    def _refuses(self, node: ast.stmt, module: Module) -> bool:
        if isinstance(node, ast.Raise):
            return _name(node.exc) in self.errors or self._is_found(node.exc, module)
        if isinstance(node, ast.Expr):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            return isinstance(value, ast.Call) and self._is_found(value, module)
        is_block = isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Match)
        return is_block and all(self._is_refusal(block, module) for block in _bodies(node))

    def _is_found(self, node: ast.AST | None, module: Module) -> bool:
        meant = self._meant(node, module)
        return bool(meant) and all(each in self.found for each in meant)

    def _checked(self, node: ast.AST, module: Module) -> Iterator[ast.stmt]:
        """Yield the statements below a node that only refuse."""
        for each in (each for block in _bodies(node) for each in block):
            if each in self.found or self._refuses(each, module):
                yield from _all(each)
            elif isinstance(each, ast.If) and self._is_refusal(each.body, module):
                yield each
                for inner in each.body:
                    yield from _all(inner)
                yield from self._checked(ast.Module(each.orelse, []), module)
            else:
                yield from self._checked(each, module)


def _code(node: Function) -> list[ast.stmt]:
    return [each for each in node.body if _text(each) is None]


def _prepares(node: ast.stmt) -> bool:
    """Return whether a statement only prepares a refusal: it sets local names, or leaves."""
    if isinstance(node, ast.Assign):
        return all(isinstance(n, ast.Name | ast.Tuple) for n in node.targets)
    if isinstance(node, ast.If):
        return all(map(_prepares, (*node.body, *node.orelse)))
    if isinstance(node, ast.Return):
        return node.value is None
    return isinstance(node, ast.AnnAssign | ast.Import | ast.ImportFrom | ast.Continue | ast.Pass)


def _all(node: ast.stmt) -> Iterator[ast.stmt]:
    yield from (n for n in ast.walk(node) if isinstance(n, ast.stmt) and _text(n) is None)


def private_once(modules: Sequence[Module]) -> tuple[int, int]:
    """Return the number of functions and methods, and of those that are private and read once."""
    total = once = 0
    for module in modules:
        names = [node.name for node in module.functions()]
        read = Counter(
            _name(n)
            for n in ast.walk(module.tree)
            if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)
        )
        total += len(names)
        once += sum(
            name.startswith("_") and not name.startswith("__") and read[name] == number == 1
            for name, number in Counter(names).items()
        )
    return total, once


ROWS: tuple[tuple[str, str, str], ...] = (
    ("files", "files of `src/oat`", ",d"),
    ("files_imported", "imported by a one-step run", ",d"),
    ("files_entered", "entered by a one-step run", ",d"),
    ("files_before_first_token", "of these before the first token", ",d"),
    ("files_entered_with_classes", "entered, with class bodies", ",d"),
    ("files_before_with_classes", "of these before the first token", ",d"),
    ("files_prompt_to_gradient", "entered from prompt to gradient", ",d"),
    ("lines", "lines", ",d"),
    ("lines_of_code", "lines of code", ",d"),
    ("statements", "statements", ",d"),
    ("docstring_words", "words of docstrings", ",d"),
    ("check_statements_share", "checks, of the statements", ".1%"),
    ("check_lines_share", "checks, of the lines of code", ".1%"),
    ("functions", "functions and methods", ",d"),
    ("private_called_once", "of these private and called once", ",d"),
    ("private_called_once_share", "their share", ".1%"),
    ("DPOConfig_made", "`DPOConfig` made in a run", ",d"),
    ("configs_made", "all `Config` made in a run", ",d"),
    ("warm_step_ms", "ms of a warm one-step run", ".0f"),
    ("help_ms", "ms of a cold `oat --help`", ".0f"),
    ("wrong_setting_ms", "ms of a wrong setting's message", ".0f"),
    ("make_test_cpu_s", "s of `make test`", ".0f"),
    ("make_test_exit_code", "its exit code", "d"),
)


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures as a table of Markdown."""
    lines = ["| what | figure |", "| --- | ---: |"]
    for name, title, form in ROWS:
        if name in figures:
            shown = "unknown" if figures[name] is None else format(figures[name], form)
            lines.append(f"| {title} | {shown} |")
        if name == "warm_step_ms":
            lines += [f"| - {part} | {ms:.1f} |" for part, ms in figures.get("warm_work_ms", {}).items()]
            lines += [
                f"| - in `{part}` | {ms:.1f} |" for part, ms in figures.get("warm_parts_ms", {}).items()
            ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=HERE.parent, metavar="DIR", help="a checkout of oat")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--tests", action="store_true", help="also run the tree's `make test`")
    parser.add_argument("--json", action="store_true", help="print all figures, with the names of the files")
    options = parser.parse_args()
    tree = options.tree.resolve()
    figures = {**measure_code(tree / "src" / "oat"), **measure_runs(tree, options.repetitions)}
    if options.tests:
        figures |= measure_tests(tree)
    print(json.dumps(figures, indent=1) if options.json else table(figures))


if __name__ == "__main__":
    main()
