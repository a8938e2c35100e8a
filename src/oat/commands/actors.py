"""`oat actors`: change the number of actors of a run while it works."""

from pathlib import Path

from oat.build.apart import first_actors
from oat.build.directory import refuse_idle
from oat.errors import many
from oat.files import seen
from oat.runtime.wanted import want


def want_actors(run_dir: Path, number: int) -> str:
    """Ask a run for another number of actors, and return a sentence that says what happens.

    Raises:
        ConfigError: there is no run, no process works in it, the number of its actors cannot change, or the
            number is below 1.
    """
    directory = seen(run_dir)
    first = first_actors(directory)
    refuse_idle(directory)
    want(directory, number)
    return (
        f"the run takes {many(number, 'actor')} from its next sampling on, each as soon as it is ready; when "
        f"the run is continued, it begins with compute.actors ({first})"
    )
