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

This page has every name that `oat` reports in `metrics.jsonl`. A row has the names that apply to its step, to
the algorithm and to the oracle; your own objective adds names under `user/`. The unit – means that the number
has no unit. The second half is for readers who know the names of TRL, or of the predecessor.

Two equal runs have the same numbers in their rows, even if one of them was killed and continued, except for
the metrics in the list below. These depend on clocks, on machines, or on what a process has asked since it
began; a row that learns from answers given before a kill, for example, has no `oracle/source/...`. The
command `oat digest` leaves these metrics out:

{_CHANGING}

Made by `python tests/metrics_page.py` from `src/oat/metrics.py` and `src/oat/reports/metric_names.py`; a test
fails when this page is out of date.

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

The predecessor's names, in its groups. An explorer of your own reports under `user/` what the predecessor has
under `explorer/`.

| predecessor | here | |
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
