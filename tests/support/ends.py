"""The ways in which a command may end, and the places where it gets signals."""

import signal
from dataclasses import dataclass
from typing import Any

PLACE = "oat.learner.learner:Learner.update"


EVALUATION = "an evaluation samples"


@dataclass(frozen=True)
class End:
    """One way in which a command ends: by signals at the first call of `place` ("module:owner.name"), or by
    itself.

    Attributes:
        at_most: number of temporary directories that may remain; after SIGKILL nothing can remove them.
    """

    code: int
    signals: tuple[int, ...] = ()
    command: str = "train"
    changes: dict[str, Any] | None = None
    place: str = PLACE
    at_most: int = 0


ENDS = {
    "done": End(0),
    "a mistake in the configuration": End(2, changes={"algorithm.prompts": 0}),
    "a mistake in the data": End(2, changes={"prompts.prompt_key": "nothing"}),
    "an oracle that raises": End(1, changes={"oracle.name": "forbidden"}),
    "SIGTERM": End(75, (signal.SIGTERM,)),
    "Ctrl-C": End(130, (signal.SIGINT,)),
    "Ctrl-C twice": End(130, (signal.SIGINT, signal.SIGINT)),
    "a closed terminal": End(-signal.SIGHUP, (signal.SIGHUP,)),
    "kill -9": End(-signal.SIGKILL, (signal.SIGKILL,)),
    "SIGTERM in an evaluation": End(75, (signal.SIGTERM,), place=EVALUATION),
    "oat eval": End(0, command="eval"),
    "oat eval, an oracle that raises": End(1, command="eval", changes={"oracle.name": "forbidden"}),
    "oat eval, SIGTERM": End(75, (signal.SIGTERM,), "eval", place=EVALUATION),
    "oat eval, Ctrl-C": End(130, (signal.SIGINT,), "eval", place=EVALUATION),
    "oat eval, kill -9": End(-signal.SIGKILL, (signal.SIGKILL,), "eval", place=EVALUATION, at_most=1),
}
