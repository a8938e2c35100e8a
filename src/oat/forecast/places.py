"""Lines of `oat check` about places: the device and the precision of each box, and the checkpoints on
disk."""

from pathlib import Path

from oat.assemble.apart import cluster_of
from oat.assemble.run_inputs import RunInputs
from oat.config.secrets import Hider
from oat.config.settings import Config
from oat.errors import many
from oat.files import bytes_free, seen
from oat.forecast.arithmetic import Lines
from oat.learner.learner import Learner
from oat.learner.limits import GB
from oat.oracles.base import Oracle
from oat.oracles.builtin import KnownOracle
from oat.resolve.defaults import derived
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
    directory = seen(resolved.config.run_dir)
    return Checkpoints(directory / "checkpoints", every=1, keep_last=1).next_loaded


def checkpoint_lines(resolved: Resolved, learner: Learner, origin: Origin | None, last: int | None) -> Lines:
    """Yield a line about the checkpoints (how many are kept, and how large they are), and a line about where
    the run begins or goes on.

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
    directory = seen(config.run_dir)
    kept = f"{c.keep_last + c.keep_best} stay, of {size_of(size)} each"
    free = f"{size_of(bytes_free(directory))} are free there"
    yield "checkpoints", f"every {many(c.every, 'step')} and at the end; {kept}; {free}"
    stored = stored_step(resolved)
    begins = f"begins as a fork of {origin.run} after step {origin.step}" if origin else "new"
    is_over = stored is not None and last is not None and stored >= last
    where = begins if stored is None else f"{'is over' if is_over else 'goes on'} after step {stored}"
    yield "run", f"{where}, in {Path(config.run_dir)}"


def place_lines(resolved: Resolved, learner: Learner, run_inputs: RunInputs) -> Lines:
    """Yield a line for each box: device and precision of the engine and the learner, and where the oracle is
    asked."""
    config = resolved.config
    device = "a CUDA device" if config.compute.profile == "gpu" else "the CPU"
    engine, c = resolved.engine, config.learner

    def threads(count: int | None) -> str:
        return (
            ""
            if config.compute.profile == "gpu"
            else f", {many(count, 'thread')}"
            if count
            else ", threads as measured at the start"
        )

    synced = f"new weights every {many(c.sync_every, 'step')}"
    if config.compute.runtime == "ray":
        synced += f"; {many(config.compute.actors, 'actor')} on {cluster_of(config.compute)}"
        synced += ", to which `oat check` does not connect" if config.compute.address else ""
    yield (
        "engine",
        (
            f"{config.engine.name} on {device}, "
            f"{engine.dtype}{threads(engine.threads or config.compute.threads)}; {synced}"
        ),
    )
    precision = f"{config.model.dtype}, products in {c.autocast}" if c.autocast else config.model.dtype
    learning = [name for name in learner.trained if name == ENSEMBLE or resolved.objective.learns]
    frozen = [
        name
        for name in learner.models
        if name not in learning and not (name == "reference" and learner.following)
    ]
    models = "trains " + ", ".join(learning) + (f", beside a frozen {', '.join(frozen)}" if frozen else "")
    if c.critic_only_steps:
        models += f"; in the first {many(c.critic_only_steps, 'step')} only the critic learns"
    if update := config.model.reference_update:
        models += (
            f"; after every {many(update.every, 'step')} the reference takes {update.mix:g} of the policy"
        )
    yield "learner", f"on {device}, {precision}{threads(config.compute.threads)}; {models}"
    if config.explorer.name != "none":
        yield "explorer", f"{config.explorer.name}, in this process"
    _, oracle = run_inputs.training_oracle
    yield "oracle", f"{config.oracle.name}, {Hider(config.oracle.options).text(_asked(config, oracle))}"


def _asked(config: Config, oracle: Oracle) -> str:
    """Return where the oracle of training answers, and who asks it, in words."""
    if not config.compute.oracle_clients or isinstance(oracle, KnownOracle):
        return oracle.where_asked
    asked = f"asked by {many(config.compute.oracle_clients, 'client')} on {cluster_of(config.compute)}"
    return asked if oracle.where_asked == Oracle.where_asked else f"{oracle.where_asked}, {asked}"


def default_lines(resolved: Resolved) -> Lines:
    """Yield a line for each setting that the user left open and that follows from another setting."""
    for number, line in enumerate(derived(resolved)):
        yield "" if number else "by default", line


def sink_lines(resolved: Resolved) -> Lines:
    """Yield one line that names all sinks of the run. Without sinks, yield nothing."""
    if named := told_of(resolved.config.tracking):
        yield "sinks", Hider({}).text(", ".join(named))


def size_of(count: int) -> str:
    """Return a number of bytes in words, such as "1.5 GB"."""
    unit = next((unit for unit in _UNITS if count >= unit[0]), _UNITS[-1])
    return f"{count / unit[0]:.3g} {unit[1]}"
