"""Name the test files that a change can touch: `python tests/affected.py [BASE]` (`make affected`).

The change is what differs from the commit BASE (HEAD, if none is given), and files that git does not know
yet. A test file is touched by the files that it reaches: by imports, its helpers' and the package's own
included, also those within functions; by the dotted names of modules in its text; by the names of parts
(`plugins/registry.py`); and by the names of the commands that it runs. What is reached by none of these ways,
such as a part that only a recipe names, is left to the tests of pages, which run for every change of the
package, and to `make test`.
"""

import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src"
ALWAYS = ("test_laws.py", "test_walks.py", "test_premises.py")
"""Tests that read all sources, in seconds."""
EVERYTHING = (
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "tests/conftest.py",
    "src/oat/__init__.py",
    "src/oat/__main__.py",
)
"""Files on which every test depends."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n]+))|import[ \t]+([^\n]+))",
    re.MULTILINE,
)
_DOTTED = re.compile(r"\boat(?:\.\w+)+")
_QUOTED = re.compile(r'"(oat(?:\.\w+)+)(?::serve)?"')
_WORD = re.compile(r"\w+")
_PART = re.compile(r'"(\w+)": "(oat(?:\.\w+)+):')
_HOME = re.compile(r'"(\w+)": "(oat(?:\.\w+)+)"')
_ALONE = {"quickstart"}
"""Commands that are packages of their own."""
_RUN = re.compile(r"[\"'](\w+)[\"']|\boat (\w+)")


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of the package and the helpers of the tests, by the names under which they are
    imported."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        found[".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")] = file
    for file in TESTS.rglob("*.py"):
        if not file.name.startswith(("test_", "conftest")):
            found.setdefault(file.stem, file)
    return found


def imported(text: str) -> set[str]:
    """Return the names after `import` and `from` in a source, and for `from a import b` also a.b."""
    found = set()
    for module, several, one, plain in _IMPORT.findall(text):
        if plain:
            found |= {name.split()[0] for name in plain.split(",") if name.split()}
        else:
            found |= {module} | {f"{module}.{name}" for name in _WORD.findall(several or one)}
    return found


def file_of(name: str) -> Path | None:
    """Return the file of a module, or of the module in which a name stands; None: it is not ours."""
    while name:
        if name in modules():
            return modules()[name]
        name = name.rpartition(".")[0]
    return None


@functools.cache
def parts() -> dict[str, set[Path]]:
    """Return the files of the parts that a registry names, and of the names that `oat` itself offers."""
    found: dict[str, set[Path]] = {}
    for name, file in modules().items():
        if not name.startswith("oat."):
            continue
        for part, place in _PART.findall(text_of(file)):
            found.setdefault(part, set()).add(modules()[place])
    for name, place in _HOME.findall(text_of(modules()["oat"])):
        found.setdefault(name, set()).add(modules()[place])
    return found


@functools.cache
def next_to(file: Path) -> set[Path]:
    """Return the files that a file names."""
    text, is_test = text_of(file), TESTS in file.parents
    names = imported(text) | set((_DOTTED if is_test else _QUOTED).findall(text))
    if file == modules()["oat.cli.entry"]:
        names -= {f"oat.{word}" for word in _ALONE}  # who runs this command reaches it
    found = {other for name in names if (other := file_of(name)) is not None}
    if is_test:
        found |= {other for word in set(_WORD.findall(text)) & parts().keys() for other in parts()[word]}
        words = {quoted or typed for quoted, typed in _RUN.findall(text)}
        commands = {f"oat.commands.{word}" for word in words} | {f"oat.{word}" for word in words & _ALONE}
        found |= {modules()[command] for command in commands & modules().keys()}
        found |= {other for folder in file.parents if (other := folder / "conftest.py").exists()}
        return found - {TESTS / "conftest.py"}
    rooms = {folder / "__init__.py" for folder in file.parents if SOURCE in folder.parents}
    return (found | rooms) - {modules()["oat"]}


@functools.cache
def reached(file: Path) -> frozenset[Path]:
    """Return a file, and all files that it reaches."""
    done, waiting = {file}, [file]
    while waiting:
        new = next_to(waiting.pop()) - done
        done |= new
        waiting += new
    return frozenset(done)


def tests() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def affected(changed: Iterable[str]) -> list[Path]:
    """Return the test files that a change can touch.

    Args:
        changed: paths from the root of the project.
    """
    files = set(changed)
    if files & set(EVERYTHING):
        return tests()
    places = {ROOT / name for name in files}
    has_code = any(name.startswith("src/") for name in files)
    names = {Path(name).name for name in files if not name.startswith(("src/", "tests/"))}
    return [test for test in tests() if _touches(test, places, names, has_code=has_code)] if files else []


def _touches(test: Path, places: set[Path], names: set[str], *, has_code: bool) -> bool:
    """Return True if a change touches a test file.

    Args:
        places: the changed files.
        names: names of changed files outside the package and the tests.
        has_code: True if a file of the package has changed.
    """
    data = {place.parent for place in places if TESTS in place.parents and place.suffix != ".py"}
    is_of_pages = test.relative_to(TESTS).parts[0] == "pages"
    return (
        test.name in ALWAYS
        or (is_of_pages and (has_code or bool(names)))
        or test.parent in data
        or any(name in text_of(test) for name in names)
        or not places.isdisjoint(reached(test))
    )


def changed_since(base: str) -> list[str]:
    """Return the paths of files that differ from a commit, and of those that git does not know."""
    found = []
    for words in (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        found += done.stdout.splitlines()
    return found


if __name__ == "__main__":
    for test in affected(changed_since(sys.argv[1] if len(sys.argv) > 1 else "HEAD")):
        print(test.relative_to(ROOT))
