"""Write docs/names.md from the tables of names in `src/oat/config/peers`: `python tests/names_page.py`."""

import json
from pathlib import Path

from oat.config.peers.table import Row, rows, values

PAGE = Path(__file__).parent.parent / "docs" / "names.md"
FIELDS = Path(__file__).parent / "config" / "trl_fields.json"
VERSIONS = {"OpenRLHF": "0.11.2", "verl": "0.9.1"}
INTRODUCTION = """# Names of TRL, OpenRLHF and verl

What the settings of other libraries are called here; `python tests/names_page.py` makes this page from the
tables in `src/oat/config/peers`. The message about an unknown setting reads the same tables, so
`--num_generations 8` says what to write in its place.

A step here asks about `algorithm.prompts` prompts with `algorithm.samples` responses each, and learns from
them in `algorithm.epochs` passes of `algorithm.minibatches` optimiser steps. So a field there that counts
completions, records or optimiser steps needs a conversion. In the column *value*, "the same" is a value that
does not change, and A → B a value A that becomes B; without an entry the value has to be worked out. A name
without a setting means nothing here.
"""
HEADS = {
    "TrainingArguments": "## TRL: fields of every configuration\n\nTRL {trl} with transformers "
    "{transformers}. Its configurations inherit these fields of `TrainingArguments`.",
    "GRPOConfig": "## TRL: GRPOConfig",
    "DPOConfig": "## TRL: DPOConfig",
    "RewardConfig": "## TRL: RewardConfig",
    "SFTConfig": "## TRL: SFTConfig",
    "trainers": "## TRL: arguments of the trainers",
    "ModelConfig": "## TRL: flags of its scripts\n\nThe fields of `ModelConfig` and `ScriptArguments`.",
    "OpenRLHF": "## OpenRLHF\n\nOpenRLHF {openrlhf}; `older`: names before its flags had dots.",
    "verl": "## verl\n\nverl {verl}.",
    "": "## Names in common use",
    "values": "## Values\n\nValues of other libraries in a setting of ours.",
}


def page() -> str:
    versions = {**json.loads(FIELDS.read_text(encoding="utf-8"))["versions"]}
    versions |= {name.lower(): version for name, version in VERSIONS.items()}
    parts = [INTRODUCTION]
    for head, title in HEADS.items():
        has_groups = head in ("trainers", "ModelConfig", "OpenRLHF")
        parts += [title.format(**versions) + "\n", *table(of(head), has_groups, head == "values"), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def of(head: str) -> list[Row]:
    """Return the rows below a heading."""
    if head == "values":
        return list(values().values())
    if head == "trainers":
        return [row for row in rows() if row.groups[0].endswith("Trainer")]
    if head == "ModelConfig":
        return [row for row in rows() if row.groups[0] in ("ModelConfig", "ScriptArguments")]
    if head in ("OpenRLHF", "verl", ""):
        return [row for row in rows() if row.peer == head]
    return [row for row in rows() if head in row.groups]


def table(found: list[Row], has_groups: bool, has_values: bool) -> list[str]:
    first = "setting | value there" if has_values else "in | name" if has_groups else "name"
    lines = [f"| {first} | here | value | remark |", "| --- " * (first.count("|") + 4) + "|"]
    for row in found:
        groups = f"`{row.groups[0]}`" if has_values else ", ".join(row.groups)
        name = f"{groups} | `{row.field}`" if has_groups or has_values else f"`{row.field}`"
        here = ", ".join(f"`{setting}`" for setting in row.settings)
        lines.append(f"| {name} | {here} | {written(row)} | {row.remark} |")
    return lines


def written(row: Row) -> str:
    """Return a row's conversion as text."""
    if row.conversion in ("=", "whole"):
        return "the same"
    texts = []
    for entry in row.conversion.split("; ") if row.conversion else []:
        there, ours = entry.split(" -> ")
        short = ours.removeprefix(f"{row.settings[0]}=") if "&" not in ours else ours.replace(" & ", ", ")
        if ours == "=":
            texts.append("others are the same" if texts else "the same")
        elif there == "*":
            texts.append(f"`{ours.replace(' & ', ', ').replace('=', ': ')}`")
        else:
            texts.append(f"`{there}` → " + ("no setting" if ours == "-" else f"`{short.replace('=', ': ')}`"))
    return "; ".join(texts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
