"""Rows of `oat check` about places: the device and the precision of each box, and the checkpoints on
disk."""

from pathlib import Path

from oat.assemble.apart import cluster_of
from oat.assemble.run_inputs import RunInputs
from oat.config.secrets import Hider
from oat.config.settings import Config
from oat.errors import plural
from oat.files import absolute, bytes_free
from oat.forecast.arithmetic import Rows
from oat.forecast.rows import Row
from oat.learner.learner import Learner
from oat.learner.limits import GB
from oat.oracles.base import Oracle
from oat.oracles.builtin import KnownOracle
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.provenance import Origin
from oat.tracking.sinks import told_of
from oat.types import ENSEMBLE

_MOMENTS = 2
"""Number of moments of AdamW. Each moment is as large as the weights that learn."""
_UNITS = ((GB, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


def stored_step(resolved: Resolved) -> int | None:
    """Return the step of the checkpoint from which the run in the run directory would go on; None if there
    is no checkpoint."""
    directory = absolute(resolved.config.run_dir)
    return Checkpoints(directory / "checkpoints", every=1, keep_last=1).next_loaded


def checkpoint_rows(resolved: Resolved, learner: Learner, origin: Origin | None, last: int | None) -> Rows:
    """Yield rows about the checkpoints (how many are kept, and how large they are), and about where the run
    begins or goes on.

    Args:
        origin: the origin of a fork that is still to be made; None: no fork is to be made.
        last: number of steps of the run; None: no limit.
    """
    config, c = resolved.config, resolved.config.checkpoint
    sizes = {
        name: sum(parameter.nbytes for parameter in part.model.trainable().values())
        for name, part in learner.trained.items()
    }
    # a sampler that lags and a reference that follows have weights of their own
    copies = (config.learner.sync_every > 1) + (learner.following is not None)
    size = (1 + _MOMENTS) * sum(sizes.values()) + copies * sizes.get("policy", 0)
    yield Row("steps between checkpoints", c.every, "steps", "checkpoint.every")
    yield Row("checkpoints that stay", c.keep_last + c.keep_best, "checkpoints", "checkpoint.keep_last")
    yield Row("size of a checkpoint", size / 10**6, "MB", "model.path")
    yield Row("free on the disk", bytes_free(absolute(config.run_dir)) / GB, "GB", "run_dir")
    yield Row("run directory", str(Path(config.run_dir)), "", "run_dir")
    stored = stored_step(resolved)
    if stored is not None:
        is_over = last is not None and stored >= last
        yield f"the run {'is over' if is_over else 'goes on'} after step {stored}"
    elif origin is not None:
        yield f"the run begins as a fork of {origin.run} after step {origin.step}"


def place_rows(resolved: Resolved, learner: Learner, run_inputs: RunInputs) -> Rows:
    """Yield rows about each box: device and precision of the engine and the learner, and where the oracle is
    asked."""
    config, engine, c = resolved.config, resolved.engine, resolved.config.learner
    is_cpu = config.compute.profile != "gpu"
    yield Row("device", "CPU" if is_cpu else "CUDA", "", "compute.profile")
    yield Row("engine", config.engine.name, engine.dtype, "engine.name")
    if config.compute.runtime != "local":
        to = ", to which `oat check` does not connect" if config.compute.address else ""
        yield Row("actors", config.compute.actors, "processes", "compute.actors")
        yield f"actors work on {cluster_of(config.compute)}{to}"
    if is_cpu:
        counts = {"engine": engine.threads or config.compute.threads, "compute": config.compute.threads}
        for name, section in (("engine", "engine"), ("learner", "compute")):
            count = counts[section] or "measured at the start"
            yield Row(
                f"threads of the {name}", count, "threads" if counts[section] else "", f"{section}.threads"
            )
    yield Row("steps between transfers of weights", c.sync_every, "steps", "learner.sync_every")
    yield Row("precision of the learner", config.model.dtype, "", "model.dtype")
    if c.autocast:
        yield Row("precision of products", c.autocast, "", "learner.autocast")
    learning = [name for name in learner.trained if name == ENSEMBLE or resolved.objective.learns]
    frozen = [
        name
        for name in learner.models
        if name not in learning and not (name == "reference" and learner.following)
    ]
    yield Row("models that learn", ", ".join(learning) or "none", "", "algorithm.name")
    if frozen:
        yield Row("frozen models", ", ".join(frozen), "", "algorithm.name")
    if c.critic_only_steps:
        yield Row("steps of the critic alone", c.critic_only_steps, "steps", "learner.critic_only_steps")
    if update := config.model.reference_update:
        yield Row(
            "steps between updates of the reference", update.every, "steps", "model.reference_update.every"
        )
        yield Row("share of the policy in an update", update.mix, "", "model.reference_update.mix")
    if config.explorer.name != "none":
        yield Row("explorer", config.explorer.name, "", "explorer.name")
    _, oracle = run_inputs.training_oracle
    asked = Hider(config.oracle.options).text(_asked(config, oracle))
    yield Row("oracle", config.oracle.name, asked, "oracle.name")


def _asked(config: Config, oracle: Oracle) -> str:
    """Return where the oracle of training answers, and who asks it, in words."""
    if not config.compute.oracle_clients or isinstance(oracle, KnownOracle):
        return oracle.where_asked
    asked = f"asked by {plural(config.compute.oracle_clients, 'client')} on {cluster_of(config.compute)}"
    return asked if oracle.where_asked == Oracle.where_asked else f"{oracle.where_asked}, {asked}"


def sink_rows(resolved: Resolved) -> Rows:
    """Yield one row that names all sinks of the run. Without sinks, yield nothing."""
    if named := told_of(resolved.config.tracking):
        yield Row("sinks", Hider({}).text(", ".join(named)), "", "tracking.sinks")


def size_of(count: int) -> str:
    """Return a number of bytes in words, such as "1.5 GB"."""
    unit = next((unit for unit in _UNITS if count >= unit[0]), _UNITS[-1])
    return f"{count / unit[0]:.3g} {unit[1]}"
