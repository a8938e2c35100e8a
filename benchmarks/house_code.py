"""The figures of `benchmarks/house.py` that are read from the code: sizes, checks and private functions. The
head of that script says what they are."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


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
