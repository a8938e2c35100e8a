"""Write docs/metrics.md from `oat.metrics` and `oat.metrics.counterparts`: `python tests/metrics_page.py`."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from oat.metrics import NAMES, UNREPEATABLE, unit
from oat.metrics.counterparts import PREDECESSOR, TRL, Name

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

_CHANGING = fill(
    ", ".join(f"`{name}{'...' if name.endswith('/') else ''}`" for name in sorted(UNREPEATABLE)),
    width=110,
    break_on_hyphens=False,
)

HEAD = f"""# Metrics

This page lists the metrics in `metrics.jsonl`, by name. A row has its number (`step`), and the metrics that
apply to its step, to the algorithm and to the oracle; your own objective adds names under `user/`, and your
own explorer under `user/explorer/`. The unit `–` means that the number has no unit. In `loss/*`, "averaged"
means averaged over an optimiser step, as the table at the head of `src/oat/learner/reduction.py` says. The
last two tables are for readers who know the names of TRL, or of the predecessor (the dormant package
`oat-llm`).

Two equal runs have the same numbers in their rows, even if one of them was killed and continued, except for
the metrics in the list below. These depend on clocks, on machines, or on what a process has asked since it
began. (`oracle/source/...` did so in earlier versions only.) The command `oat digest` leaves these metrics
out:

{_CHANGING}

The command `python tests/metrics_page.py` makes this page from `src/oat/metrics/names.py` and
`src/oat/metrics/counterparts.py`; a test fails when the page is out of date.

| name | unit | meaning |
| --- | --- | --- |
"""

OF_TRL = """
## Names of TRL

This table has the names that TRL's trainers for DPO, GRPO, RLOO, SFT and online DPO report, and for each name
the nearest metric of `oat`. The last column says how the two differ, or where to look instead. If you give
one of these names to `oat plot`, its message says the name in `oat`.

| TRL | `oat` | difference |
| --- | --- | --- |
"""

OF_PREDECESSOR = """
## Names of the predecessor

This table has the predecessor's names, in its groups. What an explorer of your own notes about its questions
(docs/extending.md) is reported as means under `user/explorer/`.

| predecessor | `oat` | difference |
| --- | --- | --- |
"""


def page() -> str:
    metrics = "".join(
        f"| `{name}` | {unit(name) or '–'} | {_cell(meaning)} |\n" for name, meaning in NAMES.items()
    )
    return HEAD + metrics + OF_TRL + _names(TRL) + OF_PREDECESSOR + _names(PREDECESSOR)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _names(names: Mapping[str, Name]) -> str:
    return "".join(
        f"| `{theirs}` | {f'`{name.ours}`' if name.ours else '–'} | {name.note} |\n"
        for theirs, name in names.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
