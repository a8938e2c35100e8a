"""The metrics of a run for TensorBoard, in `RUN/tensorboard`, by its own library.

It is a copy of `metrics.jsonl`, written anew when a run is continued: so each point stands there once, also after a kill or a fork, and a run that is
told late to write it has all of its points.
"""

import importlib.util
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oat.errors import ConfigError


class TensorBoard:
    """Raises:
    ConfigError: the library is not installed.
    """

    def __init__(self, folder: Path):
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tracking.tensorboard is set, and its library is missing: pip install 'oat-align[tensorboard]', or remove the field")
        self.folder = folder
        self._writer: Any = None

    def open(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Begin anew with the rows that the run keeps. As if it had not stood still since, their times end now."""
        from torch.utils.tensorboard import FileWriter

        shutil.rmtree(self.folder, ignore_errors=True)
        self._writer = FileWriter(str(self.folder), flush_secs=10)
        left = [sum(row.get(f"time/{name}_s", 0.0) for name in ("step", "evaluate", "save")) for row in rows]
        now = time.time() - sum(left)
        for row, seconds in zip(rows, left, strict=True):
            now += seconds
            self.row(int(row["step"]), row, now)

    def row(self, step: int, values: Mapping[str, float], seconds: float | None = None) -> None:
        """Add the metrics of a row.

        Args:
            seconds: since 1970; None is now.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if name != "step"]
        self._writer.add_summary(Summary(value=points), step, seconds)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
