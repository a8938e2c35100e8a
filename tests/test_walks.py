"""Settings go one way (docs/architecture.md): `config/` reads them, the rooms that make a run (`MAKING`)
give each part its own, and no file reads a setting of another part. The tests read the source and run
nothing."""

import ast
from collections.abc import Iterator
from dataclasses import fields

import pytest
from syntax import ROOT, texts, trees

from oat.config.settings import Config

MAKING = ("resolve", "assemble", "forecast", "opening", "answering")
"""The packages on the way from a configuration to a run, or to a learned model that answers."""
PAGE = ROOT.parent.parent / "docs" / "architecture.md"
OUTSIDE = ("config", *MAKING)
"""The packages that the tests leave out: they read settings."""

SECTIONS = {f.name for f in fields(Config)}
DOORS = {
    "oat.config.settings": {"Config"},
    "oat.config.load": {"load_config", "config_of", "stored_config", "convert"},
    "oat.resolve.resolve": {"resolve", "make_objective"},
    "oat.resolve.resolved": {"Resolved"},
    "oat.resolve.targets": {"resolve_file", "resolve_tree", "resolve_evaluated", "evaluated_as"},
    "oat.answering.learned": {"run_config"},
    "oat.answering.contenders": {"contenders_of"},
    "oat.rundir.reading": {"LoadedRun", "load_run"},
}
"""Functions and classes that give a file a whole configuration, or that make one section from another's
text."""
HOLDERS = {
    "__init__.py": "offers oat.load_run",
    "commands/check.py": "passes it to the functions of forecast/ that write its lines",
    "commands/eval.py": "passes it to assemble/run.py",
    "commands/export.py": "reads the activation of the ensemble of a run (answering/learned.py)",
    "commands/features.py": "passes it to assemble/run.py",
    "commands/show_tokens.py": "passes it to assemble/run_inputs.py",
    "commands/train.py": "passes it to opening/open_run.py",
    "reports/accounts.py": "asks the run in a directory for its columns (rundir/reading.py)",
    "reports/plot.py": "asks it for its settings as plain data, which a plot compares whatever they are",
    "reports/samples.py": "asks it for the column of the prompts",
    "rundir/reading.py": "reads the configuration of a run, and says of it what people and reports need",
    "tracking/sinks.py": "makes the options of a sink of what its own section has (`convert`)",
    "trainer.py": "makes one of Python objects, passes it to opening/, and shows it as `Trainer.config`",
}
"""The files that hold a configuration, each with the reason."""
READER = "rundir/reading.py"
"""The only one of them that reads settings from it."""

OWNERS = {
    "AlarmsConfig": "control",
    "GoldAlarm": "control",
    "BufferConfig": "learner",
    "LoraConfig": "models",
    "ModelConfig": "models",
    "SinkConfig": "tracking",
    "TrackingConfig": "tracking",
}
"""The part that gets each section, or a piece of it, unchanged. Other parts get plain values."""

WALKS = {
    "learner.learning_rate": "learner/optimiser.py",
    "sampling.temperature": "engines/decoding.py",
    "oracle.max_outstanding": "collector.py",
}
"""The file outside `config/` and `MAKING` that reads the value of a setting."""
ASIDE = {
    "temperature": {"learner/models.py", "blobs.py"},
    "learning_rate": {"laboratory/agents.py"},
}
"""Files that read something else of the same name: the temperature at which a trajectory was drawn, which the
trajectory holds; the learning rate of the laboratory's ensemble."""


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def is_named(node: ast.AST, name: str) -> bool:
    """Return True if a node is `x["name"]` or `getattr(x, "name")`."""
    if isinstance(node, ast.Subscript):
        key: ast.AST | None = node.slice
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        key = node.args[1]
    else:
        key = None
    return isinstance(key, ast.Constant) and key.value == name


def reads(tree: ast.AST, name: str) -> bool:
    """Return True if the file uses an attribute of this name outside the class that declares it, or an item
    or attribute by this name as a string."""
    own = {
        id(inner)
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        and any(isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == name for line in cls.body)
        for inner in ast.walk(cls)
    }
    return any(is_named(node, name) for node in ast.walk(tree)) or any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and not (id(node) in own and ast.unparse(node.value) == "self")
        for node in ast.walk(tree)
    )


def settings_read(tree: ast.AST) -> set[str]:
    """Return the sections of a configuration that a file reads, under any name of the configuration."""
    names = {"config"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == "config"
        ):
            names |= {ast.unparse(target) for target in node.targets}
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in SECTIONS
        and (ast.unparse(node.value) in names or ast.unparse(node.value).endswith(".config"))
    }


def test_the_reader_of_settings_sees_them() -> None:
    tree = ast.parse(
        "c = run.config\nc.model\nload(x).config.sampling.top_k\nself.config.samples\nconfig.stop"
    )
    assert settings_read(tree) == {"c.model", "load(x).config.sampling", "config.stop"}
    tree = ast.parse("class A:\n    rate: float\n    def f(self):\n        return self.rate")
    assert not reads(tree, "rate")
    for way in ("a.rate", "getattr(a, 'rate', 0)", "a['learner']['rate']"):
        assert reads(ast.parse(f"def f(a):\n    return {way}"), "rate")


def test_who_holds_a_configuration_is_known() -> None:
    found = {
        name
        for name, tree in trees(*DOORS, outside=OUTSIDE)
        if any(symbol in DOORS.get(module, ()) for module, symbol in imported(tree))
    }
    assert found | {READER} == set(HOLDERS)


def test_one_file_outside_reads_settings_of_a_configuration() -> None:
    found = {name: read for name in HOLDERS if (read := settings_read(ast.parse(texts()[name])))}
    assert found.keys() == {READER}, found


def test_sections_go_to_their_owners() -> None:
    modules = ("oat.config.settings", "oat.config.alarm_settings")
    imports = {name: set(imported(tree)) for name, tree in trees(*modules, outside=OUTSIDE)}
    found = {
        symbol: {name.split("/")[0] for name, others in imports.items() if (module, symbol) in others}
        for module, symbol in set().union(*imports.values())
        if module in modules and symbol[0].isupper()
    }
    found.pop("Config")
    assert found == {section: {owner} for section, owner in OWNERS.items()}


@pytest.mark.parametrize(("setting", "place"), WALKS.items())
def test_a_setting_is_read_in_one_place(setting: str, place: str) -> None:
    name = setting.split(".")[1]
    aside = ASIDE.get(name, set())
    found = {file for file, tree in trees(name, outside=OUTSIDE) if reads(tree, name)}
    assert found - aside == {place}


@pytest.mark.parametrize(("setting", "place"), [*WALKS.items(), ("the configuration", READER)])
def test_the_page_shows_the_walk(setting: str, place: str) -> None:
    (line,) = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith((f"| `{setting}` |", f"| {setting} |"))
    ]
    ways = [part for part in line.split("`") if part.endswith(".py")]
    assert all((ROOT / file).exists() for file in ways), ways
    assert ways[-1] == place
