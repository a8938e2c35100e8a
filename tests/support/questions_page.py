"""The drawing in docs/ledger.md of what becomes of an open question. Run this file to print it."""

from oat.ledger.open_questions import CHANGES, RECOVERED, START, TAKEN, Stage


def drawing() -> str:
    """Return the drawing, and the table of what a restart changes, as Markdown."""
    arrows = [f"    {_name(one)} --> {_name(other)}: {why}" for (one, other), why in CHANGES.items()]
    lines = ["```mermaid", "stateDiagram-v2", *arrows, "```", ""]
    lines += ["| before a restart | after it | if |", "| --- | --- | --- |"]
    lines += [f"| {one.value} | {other.value} | {why} |" for (one, other), why in RECOVERED.items()]
    return "\n".join(lines)


def _name(stage: Stage | str) -> str:
    return "[*]" if stage in (START, TAKEN) else stage.value if isinstance(stage, Stage) else stage


if __name__ == "__main__":
    print(drawing())
