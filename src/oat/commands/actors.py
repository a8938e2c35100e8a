"""`oat actors`: say or change the number of actors of a run while it works."""

from pathlib import Path

from oat.assemble.apart import first_actors
from oat.errors import many
from oat.files import seen
from oat.opening.directory import refuse_idle
from oat.runtime.wanted import Wanted, want


def want_actors(run_dir: Path, number: int | None) -> str:
    """Ask a run for another number of actors, and return a sentence that says what happens.

    Args:
        number: None: ask for nothing, and say how many there shall be.

    Raises:
        ConfigError: there is no run, no process works in it, the number of its actors cannot change, or the
            number is below 1.
    """
    directory = seen(run_dir)
    first = first_actors(directory)
    refuse_idle(directory)
    later = f"when the run is continued, it begins with compute.actors ({first})"
    if number is None:
        return f"the run shall sample with {many(Wanted(directory, first, is_new=False)(), 'actor')}; {later}"
    want(directory, number)
    return f"the run shall sample with {many(number, 'actor')}, as soon as it can; {later}"
