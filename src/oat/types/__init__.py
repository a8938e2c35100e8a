"""The values that travel between the boxes, and the notation of the whole project.

Axes, used as suffixes of names and in docstrings:

    B   prompts of a batch              N   sequences (rows); B * G when every prompt has G samples
    G   samples of a prompt             U   units: rows that are never separated (the two rows of a pair)
    T   tokens of one sequence          K   trained tokens of the rows at hand, flat, in row order
    V   vocabulary                      M   members of an ensemble

`policy` is being learned, `sampler` produced the tokens, `reference` is frozen. Log-probabilities are float32
nats; `recorded` ones were kept at sampling, `old` ones are the policy's at `prepare`. `raw` means temperature
1 and the whole vocabulary; `sampled` means the distribution that was really drawn from, after temperature,
top-k, top-p and min-p.

Values are frozen and made of numbers, strings, tuples, dicts and numpy arrays, so that each survives
`oat.wire`.
"""

from oat.types.conversation import Message, Prompt
from oat.types.learning import Batch, Loss, Per, Plan, Receipt, Requires
from oat.types.questions import (
    ENSEMBLE,
    UNASKED,
    Answer,
    Feedback,
    Item,
    Key,
    Kind,
    Mark,
    Price,
    Question,
    Spent,
)
from oat.types.sampling import (
    KEPT_LIMIT,
    Completion,
    FinishReason,
    Group,
    KeptSets,
    Request,
    Sampling,
    Segment,
    Trajectory,
    Work,
)

__all__ = [
    "ENSEMBLE",
    "KEPT_LIMIT",
    "UNASKED",
    "Answer",
    "Batch",
    "Completion",
    "Feedback",
    "FinishReason",
    "Group",
    "Item",
    "KeptSets",
    "Key",
    "Kind",
    "Loss",
    "Mark",
    "Message",
    "Per",
    "Plan",
    "Price",
    "Prompt",
    "Question",
    "Receipt",
    "Request",
    "Requires",
    "Sampling",
    "Segment",
    "Spent",
    "Trajectory",
    "Work",
]
