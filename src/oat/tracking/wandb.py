"""The sink Weights & Biases, with its own library (`oat-align[wandb]`).

* By default, the sink is offline: each process of the run writes to a new folder in `RUN/wandb`, and `wandb
  sync` uploads the folders.
* All processes of a run write to one run of Weights & Biases. Its id is stored in `RUN/sinks/wandb.json`. A
  fork writes to a new run of Weights & Biases.
* The service gets the metrics, the configuration without secrets and, with `samples: true`, the samples.
* The service does not get code, git state, command line, names of machines or users, the list of packages,
  the console's output, or the machine's load.
"""

import json
import os
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from oat.tracking.base import Opening, Row

_OFF = {
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "console": "off",
    "silent": True,
}
_OFF_X = {
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}
_FLUSH_S = 1.0
"""Seconds between two writes to the file of an offline run. If the sink's process is killed, the rows since
the last write are lost."""


@dataclass(frozen=True)
class WandbConfig:
    project: str = "oat"
    """Project to which the run belongs."""
    entity: str | None = None
    """User or team that owns the project; None: the account's default."""
    run_name: str | None = None
    """Name of the run; None: the name of its directory."""
    group: str | None = None
    """Name of a group; the runs of a group are shown together. None: the run is in no group."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["offline", "online"] = "offline"
    """`online`: rows are sent while the run goes on; the key is WANDB_API_KEY, or the one that `wandb login`
    stored. `offline`: rows are written to RUN/wandb, and `wandb sync` sends them later."""


class Wandb:
    Config = WandbConfig
    extra = "wandb"
    place = ("project", "entity", "mode")
    told = ("mode",)

    def __init__(self, **options: Any):
        self.config = WandbConfig(**options)

    def open(self, run: Opening) -> str:
        # without this, the library reports its errors to its makers, even offline
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        c, id = self.config, run.id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=c.project,
            entity=c.entity,
            id=id,
            name=c.run_name or run.folder.name,
            group=c.group,
            tags=list(c.tags),
            resume="allow" if c.mode == "online" and run.id else None,
            mode=c.mode,
            dir=str(run.folder),
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(**_OFF, **_OFF_X, x_transaction_log_flush_interval=_FLUSH_S),
        )
        return id

    def row(self, row: Row) -> None:
        import wandb

        values: dict[str, Any] = dict(row.values)
        if row.samples:
            names = sorted({name for sample in row.samples for name in sample})
            cells = [
                [json.dumps(sample.get(name), ensure_ascii=False) for name in names] for sample in row.samples
            ]
            values["samples"] = wandb.Table(columns=names, data=cells)
        self._run.log(values, step=row.step, commit=True)

    def close(self) -> None:
        self._run.finish()
