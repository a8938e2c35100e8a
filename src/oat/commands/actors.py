"""`oat actors`: change the number of actors of a run while it works."""

from pathlib import Path

from oat.config.load import stored_config
from oat.errors import ConfigError, many
from oat.files import seen
from oat.runtime.wanted import want


def want_actors(run_dir: Path, number: int) -> str:
    """Ask a run for another number of actors, and return a sentence that says what happens.

    Raises:
        ConfigError: there is no run, it has no actors of its own, or the number is below 1.
    """
    directory = seen(run_dir)
    if not (directory / "config.yaml").exists():
        raise ConfigError(f"{run_dir} holds no run; give the directory of one (run_dir)")
    compute = stored_config(directory)[0].compute
    if compute.runtime == "local" or compute.gpus is not None:
        why = "samples in its own process" if compute.runtime == "local" else "has an actor on each GPU"
        raise ConfigError(f"{run_dir}: this run {why}, so their number cannot change while it works")
    want(directory, number)
    return (
        f"the run takes {many(number, 'actor')} from its next sampling on, each as soon as it is ready; when "
        f"the run is continued, it begins with compute.actors ({compute.actors})"
    )
