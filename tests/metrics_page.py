"""Writes docs/metrics.md from `oat.metrics` and `oat.reports.metric_names`: `python
tests/metrics_page.py`."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from oat.metrics import NAMES, UNREPEATABLE, unit
from oat.reports.metric_names import PREDECESSOR, TRL, Name

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"

_CHANGING = fill(
    ", ".join(f"`{name}{'...' if name.endswith('/') else ''}`" for name in sorted(UNREPEATABLE)),
    width=110,
    break_on_hyphens=False,
)

HEAD = f"""# Metrics

This page has every name that `oat` reports in `metrics.jsonl`. A row has those names that the step, the
algorithm and the oracle give rise to; your own objective adds names under `user/`. A unit of – means that the
number has no unit. The second half is for readers who know the names of TRL, or of the predecessor.

Rows of two equal runs, of which one may have been killed, have the same numbers, but for the ones below.
These depend on clocks, on machines, or on what a process has asked since it began. `oat digest` leaves them
out, and rows that learn from answers of before a kill lack `oracle/source/...`:

{_CHANGING}

Made by `python tests/metrics_page.py` from `src/oat/metrics.py` and `src/oat/reports/metric_names.py`; a test
fails when this page is behind them.

| name | unit | meaning |
| --- | --- | --- |
"""

OF_TRL = """
## Names of TRL

The names that TRL's trainers for DPO, GRPO, RLOO, SFT and online DPO report. `oat plot` knows them too, and
says what they are called here.

| TRL | here | |
| --- | --- | --- |
"""

OF_PREDECESSOR = """
## Names of the predecessor

The predecessor's names, by its key groups. What it has under `explorer/`, an explorer of your own reports
under `user/`.

| predecessor | here | |
| --- | --- | --- |
"""


def page() -> str:
    metrics = "".join(f"| `{name}` | {unit(name) or '–'} | {meaning} |\n" for name, meaning in NAMES.items())
    return HEAD + metrics + OF_TRL + _names(TRL) + OF_PREDECESSOR + _names(PREDECESSOR)


def _names(names: Mapping[str, Name]) -> str:
    return "".join(
        f"| `{theirs}` | {f'`{name.ours}`' if name.ours else '–'} | {name.note} |\n"
        for theirs, name in names.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
