"""The values that travel between the boxes, and the notation and the glossary of the whole project.

Values are frozen dataclasses of numbers, strings, tuples, dicts, numpy arrays and tensors. So `oat.wire` can
send each of them to another process.

Axes, used as suffixes of names and in docstrings:

    B   prompts of a batch              N   sequences (rows); B * G when every prompt has G samples
    G   samples of a prompt             U   units: rows that are never separated (the two rows of a pair)
    T   tokens of one sequence          K   trained tokens of the rows at hand, flat, in row order
    V   vocabulary                      M   members of an ensemble

Words. Models and log-probabilities:

    policy          the model that is learned
    sampler         the weights that produced the tokens: the policy's, or those of some steps ago
    reference       the model that the policy is tied to: frozen, or following the policy
    version         of a policy: the number of steps so far; of a reference: the number of its updates
    slot            the name under which an engine or a scorer holds weights: `sampler`, `policy`,
                    `reference`, `ensemble`
    receipt         version of the weights in a slot after a load, and checksums of them
    probe           tokens whose log-probabilities show which weights an engine computes with
    log-probability float32, nats. `raw`: at temperature 1, over the whole vocabulary. `sampled`: under the
                    distribution that was drawn from, after temperature, top-k, top-p and min-p
    recorded        of log-probabilities: as they were stored at sampling
    old             of log-probabilities: the policy's at `prepare`; the denominator of importance ratios
    kept set        the ids that could be drawn for a token, after top-k, top-p and min-p

Boxes (each has a protocol, most of them in `protocols.py`) and parts:

    box             a stage of the loop; other boxes use it only through its protocol
    part            a class that a setting `name` selects: an algorithm, engine, explorer, oracle or sink
    engine          generates token ids with the weights of its slots, and scores them
    actor           the renderer and the engine: samples responses to prompts, and scores them
    explorer        chooses the sampled responses that the oracle is asked about
    oracle          answers questions: a rule, a model, a judge, a server, a person
    environment     answers the policy's responses in an episode, turn by turn
    ensemble        several small reward networks, the members, which learn from the same answers
    outline         a model's modules without weights, of which only shapes and sizes are known

From prompts to answers:

    prompt          a conversation to be continued, with the further columns of its record
    trajectory      a prompt and one response as token ids, sampled or recorded, never padded
    episode         a conversation of several turns with an environment; one trajectory
    segment         a run of a trajectory's tokens by one author: the model, or the context that it reads
    branch          a trajectory that begins with the tokens of another response of its group and goes on by
                    itself; it is scored like the others and never trained
    group           a prompt with its trajectories; it stays together from the actor to the loss
    round           the prompts that a step takes at a time; their questions are recorded in one transaction
    candidate       a response that a question is about
    question        what an oracle is asked about a group: compare two candidates, or score any number of them
    query           one priced item of a question: a scored candidate, or a compared pair
    answer          what an oracle says to a question: values, each with a mark
    source          an oracle whose scores another oracle, a mixture, adds up
    step reward     the reward of one step of a response. Such a step is a part of the response, for example
                    a line; "step" alone means a step of the loop
    turn            a response of an episode; the environment rewards each turn
    mark            of a value: `ok`, `tie`, `abstain`, `failed`, or `unpaid` (the question was never asked)
    ticket          the string by which an oracle names a question that it has not answered yet
    wave            questions that are sent together, because their highest price fits the budget
    budget          the limits of a purpose, in queries, tokens and money
    purpose         what questions are asked for: `train`, `eval`, or `gold`, an evaluation's second oracle
    ledger          the record of every question, answer and price of a run, in SQLite
    take            the answered questions that a step or an evaluation gets from the ledger, which records
                    the take first; a take is never made twice
    feedback        the answered questions that a step learns from, in recorded order

From feedback to weights:

    objective       an algorithm, made with its settings, that learns from feedback
    batch           the rows that an objective prepares of feedback, with their columns
    row             of a batch: a trajectory. Of metrics: a line of `metrics.jsonl`. Of data: the number by
                    which messages name a record
    unit            rows of a batch that stay in one forward pass, such as the two of a pair
    column          a tensor of a batch. The last letter of its name names its first axis, along which it
                    is cut into mini-batches and micro-batches
    step            one turn of the loop: fill, take, learn. Step n leads from row n of metrics to row n + 1
    optimiser step  one step of Adam. It learns from a mini-batch, whose gradient is accumulated over
                    micro-batches
    update          the optimiser steps that a step of the loop makes of one batch
    replay buffer   the older feedback that a step learns from beside its own
    run directory   the folder of a run: configuration, ledger, metrics, checkpoints
    checkpoint      the state of every part before a step; a run continues from it
    fork            a new run that begins with a checkpoint and the ledger of another run
    alarm           a bound of a metric; past it the run warns, ends, or rolls back
    roll back       restore what was learned (learner, objective, ensemble) from a checkpoint; prompts,
                    questions and answers go on
"""

from oat.types.learning import (
    Batch,
    Branching,
    Bucket,
    Loss,
    Per,
    Plan,
    Probe,
    Receipt,
    Requires,
    Shipment,
)
from oat.types.questions import (
    ENSEMBLE,
    UNASKED,
    Answer,
    Feedback,
    IsUsable,
    Item,
    Key,
    Kind,
    Mark,
    Price,
    Question,
    Spent,
    Steps,
    StepUnit,
)
from oat.types.sampling import (
    KEPT_LIMIT,
    Completion,
    FinishReason,
    Group,
    KeptSets,
    Message,
    Opening,
    Prompt,
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
    "Branching",
    "Bucket",
    "Completion",
    "Feedback",
    "FinishReason",
    "Group",
    "IsUsable",
    "Item",
    "KeptSets",
    "Key",
    "Kind",
    "Loss",
    "Mark",
    "Message",
    "Opening",
    "Per",
    "Plan",
    "Price",
    "Probe",
    "Prompt",
    "Question",
    "Receipt",
    "Request",
    "Requires",
    "Sampling",
    "Segment",
    "Shipment",
    "Spent",
    "StepUnit",
    "Steps",
    "Trajectory",
    "Work",
]
