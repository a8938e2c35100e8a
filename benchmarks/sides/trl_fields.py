"""Write the fields of TRL's configurations, with their types and defaults, and the arguments of its trainers,
as JSON. TRL's environment runs it: `.venv-peers/trl/bin/python benchmarks/sides/trl_fields.py
src/oat/config/peers/trl_fields.json`.

`TrainingArguments` has every field of transformers' class. A configuration has the fields of its own, and
those to which it gives another type or default. None of the classes is made, so no default depends on the
machine.
"""

import dataclasses
import enum
import inspect
import json
import sys
import types
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
import trl

CONFIGURATIONS = ("GRPOConfig", "DPOConfig", "RewardConfig", "SFTConfig", "ModelConfig", "ScriptArguments")
TRAINERS = ("GRPOTrainer", "DPOTrainer", "RewardTrainer", "SFTTrainer")


def fields(cls: type) -> dict[str, dict[str, Any]]:
    hints = typing.get_type_hints(cls)
    return {f.name: {"type": written(hints[f.name]), "default": default(f)} for f in dataclasses.fields(cls)}


def written(hint: Any) -> str:
    """Return a type as text that is the same in every version of Python."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(written(kind) for kind in inner)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    name = "None" if hint is type(None) else getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(written, inner))}]" if inner else name


def default(f: "dataclasses.Field[Any]") -> Any:
    value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return value.value if isinstance(value, enum.Enum) else value


def main(out: Path) -> None:
    shared = fields(transformers.TrainingArguments)
    found: dict[str, Any] = {
        "versions": {name: version(name) for name in ("trl", "transformers")},
        "TrainingArguments": shared,
    }
    for name in CONFIGURATIONS:
        own = fields(getattr(trl, name))
        found[name] = {field: what for field, what in own.items() if shared.get(field) != what}
    for name in TRAINERS:
        arguments = inspect.signature(getattr(trl, name).__init__).parameters
        found[name] = {field: {} for field in arguments if field != "self"}
    lines = []
    for name, entries in found.items():
        inside = ",\n".join(f"    {json.dumps(field)}: {json.dumps(what)}" for field, what in entries.items())
        lines.append(f"  {json.dumps(name)}: {{\n{inside}\n  }}")
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
