"""Runs with a sink of a user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oat.tracking.sink_process import Described, SinkProcess

OWN = Path(__file__).parents[1] / "support" / "sinks.py"


def process(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    key: str = "mine",
    wait_s: float = 60.0,
    **options: Any,
) -> SinkProcess:
    described = Described(
        key, f"{OWN}:Rows", {"file": f"{key}.jsonl", **options}, options, config is not None, wait_s
    )
    return SinkProcess(described, folder, config or {})
