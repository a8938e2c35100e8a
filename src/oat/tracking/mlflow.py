"""The sink MLflow, with the small edition of its library: `oat-align[mlflow]` installs mlflow-skinny.

* By default, rows go to files in `RUN/mlflow`. Every client of MLflow can read them, and `mlflow
  migrate-filestore` turns them into a database. With `tracking_uri`, rows go to a server or a database.
* All processes of a run write to one run of MLflow. Its id is stored in `RUN/sinks/mlflow.json`. A fork
  writes to a new run of MLflow.
* Training needs the library. Evaluating and exporting do not, because they send no rows to sinks.

MLflow no longer develops its store of files. It is the default here, because mlflow-skinny has no other store
without a server. The full mlflow would install a web server and needs an older pandas than this package.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from oat.tracking.base import Opening, Row

_METRICS = 1000
_PARAMETERS = 100
_CHARACTERS = 500
"""Limits that every server accepts: number of metrics in a request (`_METRICS`), number of parameters in a
request (`_PARAMETERS`), and number of characters of a parameter's value (`_CHARACTERS`)."""
_STRANGE = re.compile(r"[^\w\-. :/]")
"""Pattern of the characters that MLflow refuses in a name."""


@dataclass(frozen=True)
class MlflowConfig:
    tracking_uri: str | None = None
    """Address of a server or a database. None: files in RUN/mlflow, even if MLFLOW_TRACKING_URI is set."""
    experiment: str = "oat"
    """Experiment to which the run belongs."""
    run_name: str | None = None
    """Name of the run; None: the name of its directory."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run."""


class Mlflow:
    Config = MlflowConfig
    extra = "mlflow"
    place = ("tracking_uri", "experiment")
    told = ("tracking_uri",)

    def __init__(self, **options: Any):
        self.config = MlflowConfig(**options)

    def open(self, run: Opening) -> str:
        os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
        if self.config.tracking_uri is None:
            # the only store that mlflow-skinny has without a server
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow import MlflowClient

        c, local = self.config, (run.folder / "mlflow").as_uri()
        self._client = MlflowClient(
            tracking_uri=c.tracking_uri or local, registry_uri=c.tracking_uri or local
        )
        if run.id is None:
            found = self._client.get_experiment_by_name(c.experiment)
            experiment = (
                self._client.create_experiment(c.experiment) if found is None else found.experiment_id
            )
            self._id = str(
                self._client.create_run(
                    experiment, run_name=c.run_name or run.folder.name, tags=dict(c.tags)
                ).info.run_id
            )
            self._log_parameters(run.config)
        else:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
        self._place = str(self._client.get_run(self._id).info.artifact_uri)
        self._is_moved = c.tracking_uri is None and not self._place.startswith(local)
        return self._id

    def row(self, row: Row) -> None:
        from mlflow.entities import Metric

        when = round(1000 * row.seconds)
        metrics = [
            Metric(_STRANGE.sub("_", name), float(value), when, row.step)
            for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _METRICS])
        if row.samples:
            if self._is_moved:
                raise RuntimeError(
                    f"MLflow keeps samples where the run was begun ({self._place}), and it has been "
                    "moved; set samples: false"
                )
            self._client.log_dict(
                self._id, {"samples": list(row.samples)}, f"samples/step_{row.step:08}.json"
            )

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        """Write every field of the configuration as a parameter with a dotted name, such as `model.path`."""
        from mlflow.entities import Param

        found = [Param(name, str(value)[:_CHARACTERS]) for name, value in _fields(config)]
        for begin in range(0, len(found), _PARAMETERS):
            self._client.log_batch(self._id, params=found[begin : begin + _PARAMETERS])


def _fields(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        place = f"{above}{_STRANGE.sub('_', str(name))}"
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{place}.")
        else:
            yield place, value
