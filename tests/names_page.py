"""Write docs/names.md from the tables of names in `src/oat/config/peers`: `python tests/names_page.py`."""

import json
from pathlib import Path

from oat.config.peers.table import Row, rows, values

PAGE = Path(__file__).parent.parent / "docs" / "names.md"
FIELDS = Path(__file__).parent / "config" / "trl_fields.json"
VERSIONS = {"OpenRLHF": "0.11.2", "verl": "0.9.1"}
SAID = {"*": "it", "*-1": "it - 1", "*/s": "it / optimiser steps of a step, rounded up"}
"""How the right side of a conversion reads."""
INTRODUCTION = """# Names of TRL, OpenRLHF and verl

What the settings of other libraries are called here; `python tests/names_page.py` makes this page from the
tables in `src/oat/config/peers`. The message about an unknown setting reads the same tables, so
`--num_generations 8` says what to write in its place.

A step here asks about `algorithm.prompts` prompts with `algorithm.samples` responses each, and learns from
them in `algorithm.epochs` passes of `algorithm.minibatches` optimiser steps. So a field there that counts
completions, records or optimiser steps needs a conversion. In the column *value*, "the same" is a value that
does not change, A → B a value A that becomes B, and "it" the value itself; without an entry the value has to
be worked out. In brackets stands what a value gives too unless another name says otherwise; you choose the
value of a setting with `...`. A name without a setting means nothing here. A name with an algorithm in
brackets means this with that algorithm.
"""
HEADS = {
    "TrainingArguments": "## TRL: fields of every configuration\n\nTRL {trl} with transformers "
    "{transformers}. Its configurations inherit these fields of `TrainingArguments`.",
    "GRPOConfig": "## TRL: GRPOConfig",
    "DPOConfig": "## TRL: DPOConfig",
    "RewardConfig": "## TRL: RewardConfig",
    "SFTConfig": "## TRL: SFTConfig",
    "trainers": "## TRL: arguments of the trainers",
    "older": "## TRL: older names\n\nNames that earlier versions of TRL and transformers had.",
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
    known = [row for row in rows() if row.peer == "TRL"]
    return [row for row in known if head in [group.partition(":")[0] for group in row.groups]]


def table(found: list[Row], has_groups: bool, has_values: bool) -> list[str]:
    first = "setting | value there" if has_values else "in | name" if has_groups else "name"
    lines = [f"| {first} | here | value | remark |", "| --- " * (first.count("|") + 4) + "|"]
    for row in found:
        groups = (
            f"`{row.groups[0]}`"
            if has_values
            else ", ".join(dict.fromkeys(group.partition(":")[0] for group in row.groups))
        )
        own = ", ".join(f"`{group.partition(':')[2]}`" for group in row.groups if ":" in group)
        name = f"`{row.field}`" + (f" ({own})" if own else "")
        name = f"{groups} | {name}" if has_groups or has_values else name
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
        name = {"*": "others" if texts else "any", "whole": "whole numbers"}.get(there, f"`{there}`")
        if ours == "=":
            texts.append(f"{name} → the same" if texts else "the same")
        else:
            texts.append(f"{name} → {settings_in(row, ours)}")
    return "; ".join(texts)


def settings_in(row: Row, ours: str) -> str:
    """Return the settings that a value gives; in brackets those that give way to other names."""
    pairs = (
        [pair.split("=", 1) for pair in ours.split(" & ") if not pair.endswith("=-")] if ours != "-" else []
    )
    texts = {False: list[str](), True: list[str]()}
    for setting, value in pairs:
        gives_way = setting.endswith("?") and len(pairs) > 1
        name = setting.rstrip("?")
        said = SAID.get(value, f"`{value}`")
        is_short = len(pairs) == 1 and (name,) == row.settings[:1]
        plain = "..." if value == "..." else value
        full = f"`{name}`: {said}" if value in SAID else f"`{name}: {plain}`"
        texts[gives_way].append(said if is_short else full)
    bracket = f" ({', '.join(texts[True])})" if texts[True] else ""
    return f"{', '.join(texts[False])}{bracket}".strip() or "no setting"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
