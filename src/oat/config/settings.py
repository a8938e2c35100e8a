"""The tree of a configuration: every section and field, its type, its default, and its meaning.

The sections engine, explorer, oracle and algorithm choose a part by the field `name`: one of ours,
`path/to/file.py:Name` or `package.module:Name`. The part declares further fields (`oat.types.part`). They are
written in the same section, and `oat.resolve.parts` checks them. `oat.config.load` reads and writes the tree.
"""

import datetime
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec

from oat.config.alarm_settings import AlarmsConfig
from oat.config.compute_settings import ComputeConfig
from oat.config.conditions import (
    ALL_STEPS,
    AS_DTYPE,
    ASKS,
    ASKS_AHEAD,
    ASKS_ANY,
    CRITIC_FALLS,
    CRITIC_START,
    CRITIC_STEPS,
    DRAWS,
    EIGHT_ROWS,
    FALLS,
    HAS_CRITIC,
    HAS_PROMPTS,
    HAS_RECORDED,
    HAS_REFERENCE,
    IS_RECORDED,
    KEEPS_BEST,
    LEARNS_PAIRS,
    LEARNS_WITH_REFERENCE,
    MAY_BE_LATE,
    NEXT_QUESTION,
    ONE_SOURCE,
    PASSES,
    READS_DATE,
    REFERENCE_START,
    SAMPLES,
    SHOWS_GROUPS,
    SKIPS,
    SYNCS,
    TAKES_BEST,
    TRAINING_ORACLE,
    TRL_COLUMNS,
    VOTES,
    WAITS_FOR_ENVIRONMENT,
    as_policy,
)
from oat.config.fields import setting
from oat.config.ranges import Count, Decay, NonNegative, Positive, Share, Whole
from oat.config.stop_settings import StopConfig


@dataclass(frozen=True)
class LoraConfig:
    rank: Count = 8
    """Rank of the adapter's matrices: the length of their shorter side."""
    alpha: Positive = 16.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Layers with an adapter. `all-linear`: every linear layer except the head. A list: layers by the last
    part of their names, such as [q_proj, v_proj]."""


@dataclass(frozen=True)
class ReferenceUpdateConfig:
    """Makes the reference follow the policy. Every `every` steps, reference = mix * policy + (1 - mix) *
    reference (TR-DPO, arXiv:2404.09656)."""

    every: Count = setting(1, may_change="fork")
    """Steps of the run between two updates of the reference."""
    mix: Annotated[float, msgspec.Meta(gt=0, le=1)] = setting(1.0, may_change="fork")
    """Share of the policy in the updated reference. 1: the reference becomes equal to the policy. A small
    share at every step makes the reference a moving average. With an adapter, the adapter's matrices are
    mixed."""


@dataclass(frozen=True)
class ModelConfig:
    path: str
    """The model that the policy starts from: a hub id `org/name`, or a directory in the layout of
    transformers."""
    reference: str | None = setting(None, read_if=HAS_REFERENCE, follows=REFERENCE_START)
    """The reference: a hub id or a directory of a model, or the directory of an adapter for `path`. None: the
    weights that the policy starts from."""
    reference_device: Literal["cpu"] | None = setting(None, read_if=HAS_REFERENCE)
    """Device of a reference with its own weights; used if compute.profile is `gpu`. `cpu`: the reference is
    in the CPU's memory and computes there. None: it is on the policy's device."""
    reference_dtype: Literal["float32", "bfloat16"] | None = setting(
        None, read_if=HAS_REFERENCE, follows=AS_DTYPE
    )
    """Precision of a reference with weights of its own; bfloat16 takes half the memory of float32. None: the
    precision of `dtype`."""
    reference_update: ReferenceUpdateConfig | None = setting(None, read_if=LEARNS_WITH_REFERENCE)
    """Makes the reference follow the policy (docs/models.md#references). None: it is frozen."""
    critic: str | None = setting(None, read_if=HAS_CRITIC, follows=CRITIC_START)
    """The model that the critic starts from, for algorithms that have one: a hub id or a directory of a
    language model or of a sequence-classification model with one label, such as a reward model. Its head, if
    it has one, is the start of the value head. None: the model that the policy starts from."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights. bfloat16 is refused, since most steps of AdamW would be lost to rounding; set
    learner.autocast instead."""
    lora: LoraConfig | None = None
    """Trains a small adapter beside frozen weights. None: every weight is trained that `frozen` does not
    name."""
    frozen: tuple[str, ...] = ()
    """Names of tensors of `path` that are not trained; `*` stands for any characters, as in
    `model.layers.0.*`. A model object given from Python sets them by requires_grad
    (docs/models.md#frozen-tensors)."""
    adapter: str | None = None
    """Directory of an adapter for `path`, written by PEFT or `oat export --adapter`. The policy starts with
    this adapter and trains it further. The adapter's files then set `lora`."""
    quantize: Literal["nf4"] | None = None
    """`nf4`: the frozen linear layers, except the head, are stored in four bits (QLoRA). This needs an
    adapter and `oat-align[quantize]`. None: all weights have the precision of `dtype`."""


@dataclass(frozen=True)
class SourceConfig:
    path: str
    """One source: a file, a dataset or a function, as in `prompts.path`."""
    weight: Positive = 1.0
    """Share of the prompts that come from this source, relative to the weights of the other sources."""
    split: str | None = None
    """Split of a dataset to read, as in `prompts.split`."""


@dataclass(frozen=True)
class PromptsConfig:
    path: str | tuple[str | SourceConfig, ...]
    """Source of the prompts: a file (.jsonl, .csv, .parquet), a saved dataset, a dataset of the hub
    (`org/name`, `org/name@config`) or `file.py:function`. A list names several sources; an entry of the list
    may also be a section {path, weight, split}."""
    split: str | None = setting(None, read_if=ONE_SOURCE)
    """Split of a dataset to read; None: `train`."""
    max_prompts: Count | None = None
    """Number of records to read from the beginning of each source; None: all."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """`stop`: a malformed record ends the run before its first step. `skip`: the record is left out and
    counted (`prompts/skipped`). The setting also applies to `evaluation`."""
    prompt_key: str = "prompt"
    """Column of the prompt (a string or a list of messages), or of a complete conversation. Records without
    this column may have one of TRL's formats (docs/data.md)."""
    reference_key: str | None = None
    """Column of the reference answer or response; None: there is none."""
    max_tokens: Count | None = None
    """Largest number of tokens in a prompt. If responses are recorded: in a prompt together with its longest
    response. A longer record is left out and counted (`prompts/dropped`). `too_long` can have recorded
    responses or their prompts cut to fit. The setting also applies to `evaluation`."""
    too_long: Literal["leave_out", "cut_prompt_start", "cut_response_end"] = setting(
        "leave_out", read_if=HAS_RECORDED
    )
    """Treatment of recorded data that exceed `max_tokens` or the context. `leave_out`: a record that
    exceeds `max_tokens` is left out; one that exceeds only the model's context is an error.
    `cut_prompt_start`: the first tokens of the prompt are cut off. `cut_response_end`: the last tokens of
    each response that is too long are cut off. Cuts are counted (`prompts/cut`). A record that the
    cut cannot make short enough is left out. The setting also applies to `evaluation.pairs`
    (docs/data.md#records-that-are-too-long)."""
    epochs: Count | None = None
    """Number of passes over the prompts; None: no limit. With several sources, a pass takes as many prompts
    as the sources have together."""
    shuffle: bool = True
    """True: every epoch has a new order, drawn from the seed. False: every epoch has the order of the
    data."""
    responses: tuple[str, ...] = setting((), follows=TRL_COLUMNS)
    """Columns of recorded responses, the best first. With recorded responses, nothing is sampled in training.
    With the oracle `recorded`, the default is TRL's columns: `chosen` and `rejected`, or `completion`. With
    any other oracle the default is empty: the policy responds."""
    score_key: str | None = setting(None, read_if=IS_RECORDED)
    """Column of the scores of recorded responses, for the oracle `recorded`. None: if a record has one
    response and a `label`, the score is 1 for a true label and 0 for a false one; in any other record, the
    first response has a score of 1 and further ones 0."""


@dataclass(frozen=True)
class RenderConfig:
    template: str | None = None
    """Chat template: `chatml`, `tokenizer` (the tokenizer's own) or the path of a .jinja file. None: plain
    text."""
    system: str | None = None
    """System message for conversations that have none. Oracles do not get it."""
    question: Literal["gsm8k", "math", "countdown"] | None = None
    """Form into which every prompt is put: an instruction, examples, the question, and a cue. A prompt must
    then be one user message (docs/data.md#questions)."""
    few_shot: Whole = 0
    """Number of worked examples that the form named by `question` shows before the prompt's own text."""
    special_tokens: Literal["keep", "drop"] | None = setting(None, open=None, earlier="drop")
    """Whether the text of a sampled response has the special tokens that the model wrote. Rewards, judges,
    environments, samples, the ledger and `oat generate` get this text. `keep`: it has them, except the tokens
    that end a response. `drop`: it has none, also no `<think>` where that is a special token. None: `keep`;
    a run that a version without this setting began continues with `drop`, as it began."""
    date: datetime.date | None = setting(None, open=None, read_if=READS_DATE)
    """Date that a template reads with `strftime_now`, YYYY-MM-DD. None: the date on which the run is created;
    a continued run keeps this date."""


@dataclass(frozen=True)
class Component:
    """A part, chosen by its name, with the fields that the part declares."""

    name: str
    """Name of one of our parts, or of your own part as `path/to/file.py:Name` or `package.module:Name`."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part(Component):
    """An algorithm, an engine or an explorer, with its settings.

    Attributes:
        settings: an instance of the class `Config` of the part; `options` has the same as plain data.
    """

    name: str = setting(may_change="never")
    settings: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class SamplingConfig:
    max_new_tokens: Count = 256
    """Largest number of tokens in a response."""
    temperature: NonNegative = setting(1.0, read_if=DRAWS)
    """Number by which the logits are divided; 0 is greedy."""
    top_k: Whole = setting(0, read_if=DRAWS)
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = setting(1.0, read_if=DRAWS)
    """Keep the smallest set of most probable tokens whose probabilities add up to at least this; 1 keeps
    all."""
    min_p: Share = setting(0.0, read_if=DRAWS)
    """Keep tokens whose probability is at least this fraction of the most probable token's; 0 keeps all."""
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = setting(
        (), read_if=SAMPLES, follows=NEXT_QUESTION
    )
    """Strings that end a response; none may be empty. The text of the response ends before the string, or
    behind it if it closes a tag which the text opens (`</answer>`)."""
    overflow: Literal["refuse", "cut"] = setting("refuse", read_if=SAMPLES)
    """Treatment of a prompt after which the model's context has fewer than max_new_tokens tokens left.
    `refuse`: an error before the run starts. `cut`: the response ends at the end of the context."""
    refill_rounds: Whole = 0
    """Largest number of further rounds in which a step of training asks questions in place of those that
    teach the algorithm nothing, such as groups with equal rewards (dynamic sampling). 0: none are asked."""
    environment: str | Component | None = setting(None, read_if=SAMPLES, may_change="never")
    """Environment that answers the model within an episode: its name, as `file.py:Class`, or a section with
    the name and the environment's own options (docs/environments.md). None: an episode is one response."""
    environment_deadline_s: Positive = setting(120.0, read_if=WAITS_FOR_ENVIRONMENT, may_change="always")
    """Seconds within which an environment with `async` methods must answer. An episode that is not answered
    in time ends without a reward."""


@dataclass(frozen=True)
class OracleConfig:
    name: str
    """One of our oracles (docs/oracles/), or your own as `file.py:function` or `package.module:Name`."""
    labels: Literal["threshold", "bernoulli"] = setting("threshold", read_if=LEARNS_PAIRS, may_change="fork")
    """Rule that makes a label from a probability. `threshold`: the probability is compared with one half.
    `bernoulli`: the label is drawn with that probability from the run's seed. With both rules, a probability
    of exactly one half is a tie."""
    scale: Positive = setting(1.0, read_if=LEARNS_PAIRS)
    """Scale of rewards in Bradley-Terry preferences: p = sigmoid((r1 - r2) / scale)."""
    max_outstanding: Whole = setting(0, read_if=ASKS_AHEAD, may_change="fork")
    """Largest number of questions that are asked ahead of the steps that learn from them. Answers can then
    arrive while the run learns. 0: each step asks only its own questions."""
    max_wait_s: Positive | None = setting(None, read_if=ASKS, may_change="always")
    """Largest number of seconds that a step waits for answers. The wait ends earlier when enough questions
    for the step are answered. The step takes answered questions in the order in which they were asked, and
    leaves the others to later steps. None: a step waits until each of its questions is answered or past its
    deadline, so runs do not depend on when answers arrive."""
    max_answer_age: Whole | None = setting(None, read_if=MAY_BE_LATE, may_change="fork")
    """Largest age of an answer, in steps since its question was asked. Older answers are counted (metric
    `answers/expired`), and no step learns from them. None: no answer is too old."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = setting(600.0, read_if=ASKS_ANY, may_change="always")
    """Seconds after which an unanswered question counts as failed."""
    repeats: Whole = setting(1, read_if=ASKS)
    """Number of answers that are bought about the same response (or pair). After these, the oracle is not
    asked about it again: the mean of the answers is used. 0: the oracle is asked every time. An oracle with
    `cacheable = False` is asked every time, because its answers are not a function of the question. So is a
    reward function that gets whole groups (`whole_groups`)."""
    whole_groups: bool | None = setting(None, read_if=SHOWS_GROUPS, open=None, earlier=False)
    """True: a reward function gets every response of a group, equal ones too, and each of them is a query.
    Its rewards are not used again. So a reward may depend on the other responses of the group. A function
    with the attribute `reads_group = False` gets equal responses once. False: this holds for every reward
    function of the run. None: True, except for runs that earlier versions of `oat` began."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BufferConfig:
    questions: Count
    """Largest number of questions that a step learns from: its own, and the newest questions of earlier
    steps. It must be at least the number of questions of one step."""
    clear_every: Count | None = None
    """Number of steps between two clearings of the buffer; None: it is never cleared."""


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: NonNegative = setting(1e-6, may_change="fork")
    """Learning rate of AdamW at the top of the schedule."""
    critic_learning_rate: NonNegative | None = setting(
        None, read_if=HAS_CRITIC, may_change="fork", follows=as_policy("learning_rate")
    )
    """Learning rate of the critic, for algorithms that have one. None: the policy's."""
    critic_weight_decay: NonNegative | None = setting(
        None, read_if=HAS_CRITIC, may_change="fork", follows=as_policy("weight_decay")
    )
    """Weight decay of the critic's matrices. None: the policy's."""
    critic_max_grad_norm: Positive | None = setting(
        None, read_if=HAS_CRITIC, may_change="fork", follows=as_policy("max_grad_norm")
    )
    """Largest norm of the critic's gradient. None: the policy's."""
    critic_schedule: Literal["constant", "linear", "cosine"] | None = setting(
        None, read_if=HAS_CRITIC, may_change="fork", follows=as_policy("schedule")
    )
    """Course of the critic's learning rate; it falls to a tenth of the critic's own rate. None: the
    policy's."""
    critic_warmup_steps: Whole | None = setting(
        None, read_if=HAS_CRITIC, may_change="fork", follows=as_policy("warmup_steps")
    )
    """Number of optimiser steps over which the critic's learning rate rises from 0. None: the policy's."""
    critic_schedule_steps: Count | None = setting(
        None, read_if=CRITIC_FALLS, may_change="fork", follows=CRITIC_STEPS
    )
    """Number of the critic's optimiser steps after which its learning rate is lowest. None: schedule_steps if
    that is set, otherwise the optimiser steps of `stop.max_steps` steps."""
    critic_only_steps: Whole = setting(0, read_if=HAS_CRITIC, may_change="fork")
    """Number of steps, at the beginning of the run, in which only the critic learns. The policy's weights
    stay the same, and its schedule begins afterwards."""
    betas: tuple[Decay, Decay] = setting((0.9, 0.95), may_change="fork")
    """Betas of AdamW."""
    weight_decay: NonNegative = setting(0.0, may_change="fork")
    """Weight decay of matrices; biases and norms never decay."""
    max_grad_norm: Positive = setting(1.0, may_change="fork")
    """Largest norm of a model's gradient; a gradient with a larger norm is scaled down to it."""
    on_nonfinite: Literal["stop", "skip"] = setting("stop", may_change="always")
    """Reaction to a loss, a gradient or an input of the loss that is not finite. The check comes before the
    weights change. `stop`: the run ends and the batch is written to a file. `skip`: this optimiser step is
    left out and counted."""
    max_skips: Count = setting(3, read_if=SKIPS, may_change="always")
    """Largest number of optimiser steps in a row that `on_nonfinite: skip` leaves out. After one more, the
    run ends."""
    schedule: Literal["constant", "linear", "cosine"] = setting("constant", may_change="fork")
    """Course of the learning rate after warm-up. `constant`: no change. `linear` and `cosine`: a fall to a
    tenth of learning_rate at schedule_steps, and no change from then on."""
    warmup_steps: Whole = setting(0, may_change="fork")
    """Number of optimiser steps over which the learning rate rises from 0."""
    schedule_steps: Count | None = setting(None, read_if=FALLS, may_change="fork", follows=ALL_STEPS)
    """Number of optimiser steps after which `linear` and `cosine` reach their lowest rate. None: the
    optimiser steps of `stop.max_steps` steps. The number is fixed when the run begins, so set it if
    `stop.max_steps` may be raised later."""
    micro_batch_size: Count | None = setting(None, may_change="fork", follows=EIGHT_ROWS)
    """Largest number of rows in a forward pass. It changes memory and speed, not the result. A unit, such as
    the two rows of a pair, is never split. None: 8, or no limit if micro_batch_tokens is set."""
    micro_batch_tokens: Count | Literal["auto"] | None = setting(None, open="auto")
    """Largest number of tokens in a forward pass. A pass of a single unit may have more. `auto`: the number
    that fits into compute.memory_gb; it is measured when the run is created, and then kept. None: no
    limit."""
    gradient_checkpointing: bool = setting(False, may_change="fork")
    """Computes activations again in the backward pass instead of keeping them. This saves memory and takes
    about a third more time."""
    autocast: Literal["bfloat16"] | None = None
    """Precision of matrix products in learning. Weights and log-probabilities stay in float32. None:
    float32."""
    logits_chunk: Count | None = setting(None, may_change="fork")
    """Largest number of trained tokens whose logits are in memory at once. None: the number of tokens that
    have 2^26 logits together (0.27 GB)."""
    sync_every: Count = setting(1, read_if=SYNCS)
    """Steps between two transfers of new weights to the sampler."""
    weights_proof: Literal["auto", "all", "sample", "probe"] = setting("auto", may_change="always")
    """Proof, after each transfer, that a holder such as the engine computes with the weights that were sent.
    All that arrives is compared with its checksum in any case. `all`: every tensor is read back. `sample`: a
    sixteenth of every large tensor is read back, another one after each transfer. `probe`: nothing is read
    back; log-probabilities of a fixed sequence are compared with the learner's (docs/decisions/006 says what
    each finds). `auto`: `all`, or `probe` if the engine's weights cannot be read."""
    buffer: BufferConfig | None = None
    """Replay buffer: the learner also learns from questions of earlier steps (docs/learner.md). None: it
    learns only from the step's own questions."""
    max_updates: Count | None = setting(None, may_change="fork")
    """Largest number of optimiser steps that the algorithm makes in one step of the run. None: the optimiser
    steps of all its passes."""


@dataclass(frozen=True)
class GoldConfig(Component):
    """The second oracle of evaluations: its name, its options, and its budget."""

    max_queries: Count | None = None
    """Budget of the gold oracle in queries, for all evaluations together. If an evaluation could exceed it,
    this oracle is not asked, and the evaluation goes on without it."""
    max_tokens: Count | None = None
    """Budget of the gold oracle in tokens."""
    max_cost: Positive | None = None
    """Budget of the gold oracle in money."""


@dataclass(frozen=True)
class EvaluationConfig:
    path: str | None = setting(None, read_if=None)
    """Held-out prompts: one source as in `prompts.path`, with the columns that `prompts` names. The model
    responds to them, and an oracle is asked about the responses."""
    pairs: str | None = setting(None, read_if=None)
    """Recorded pairs that are never learned: one source, written like a source in `prompts.path`. The columns
    are those that `prompts.responses` names (default: `chosen` and `rejected`). Evaluations measure the
    algorithm's loss on the pairs (`eval/pairs/...`), and ask no oracle."""
    split: str | None = setting(None, read_if=None)
    """Split to read, of `path` and of `pairs`; None: `train`. With a split, a `path` or `pairs` that is not a
    dataset is an error."""
    every: Count = setting(10, read_if=None)
    """Steps between two evaluations. There is also one before the first step and one after the last."""
    every_queries: Count | None = setting(None, read_if=None)
    """Least number of queries that training makes between two evaluations. An evaluation that is due by
    `every` waits for them. With `every: 1`, the queries alone decide. None: no such wait."""
    every_hours: Positive | None = setting(None, read_if=None)
    """Least number of hours of running between two evaluations; time without a process does not count. An
    evaluation that is due by `every` waits until these hours have passed. None: no such wait."""
    slot: Literal["policy", "sampler", "reference"] = "policy"
    """Engine slot whose weights respond."""
    samples: Whole = 1
    """Responses per prompt, drawn with the settings of `sampling`; 0: none."""
    greedy: bool = True
    """Also evaluates the greedy response to each prompt."""
    best_of: Count | None = None
    """Also samples this number of responses per prompt, and evaluates, as `eval/best`, the one with the
    highest mean reward over the members of the explorer's ensemble. None: no."""
    best_of_temperature: NonNegative = setting(0.7, read_if=TAKES_BEST)
    """Temperature of the responses of `best_of`."""
    max_prompts: Count | None = setting(None, read_if=None)
    """Number of records to read from the beginning of `path` and of `pairs`; None: all."""
    online: bool = False
    """Also evaluates, as `eval/online`, the sampled responses whose answers the last training step took. The
    evaluation's oracle is asked about them, within the evaluation's budget."""
    oracle: str | Component | None = setting(None, follows=TRAINING_ORACLE)
    """Oracle of evaluations: a name, or a section with the name and the oracle's own options. If it is only a
    name, and training's oracle has this name, training's options hold too. None: the oracle of training."""
    max_queries: Count | None = None
    """Budget of all evaluations together, in queries. An evaluation that could exceed it is left out."""
    max_tokens: Count | None = None
    """Budget of all evaluations together, in tokens, for an oracle that states how many a question takes."""
    max_cost: Positive | None = None
    """Budget of all evaluations together, in money, for an oracle that states its prices."""
    gold: str | GoldConfig | None = None
    """A second oracle, which is asked about the same responses, with a budget of its own: a name, or a
    section as in `oracle`. It shows whether a rising reward is a real improvement
    (docs/over_optimisation.md)."""
    kl: bool = False
    """Also reports `eval/kl`, the estimated divergence (KL) of `slot` from the reference on the sampled
    responses. The reference is loaded for it."""
    intervals: bool = False
    """Also reports 95 % intervals of the mean values and win rates that the evaluation's oracle gives. They
    are bootstrap intervals over prompts. Gold scores, length-controlled win rates, pass@k and majority@k get
    no intervals."""
    pass_at: tuple[Count, ...] = ()
    """Values of k for which pass@k is reported; each is at most `samples`."""
    success: Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)] = setting(1.0, read_if=PASSES)
    """Smallest value with which a response counts as passed in pass@k."""
    majority_at: tuple[Count, ...] = ()
    """Values of k for which majority@k is reported; each is at most `samples`. Needs `answers`."""
    answers: str | None = setting(None, read_if=VOTES)
    """Function that finds the answer in a response's text, for majority@k: last_number, marked_number,
    tagged_answer, or your own as `file.py:function`. Your function returns None if it finds no answer."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Count = 10
    """Steps between two checkpoints. There is also one at the end of the run."""
    background: bool = True
    """True: a checkpoint is written while the run goes on, from a copy of the learned weights and their
    moments. False: no copy is kept in memory, and the step waits until the checkpoint is written."""
    keep_last: Count = 2
    """Number of the newest checkpoints that are kept. Older ones are removed after a new one has been
    verified."""
    keep_best: Whole = 0
    """Number of checkpoints with the highest `best_metric` that are kept in addition to the newest ones."""
    best_metric: str = setting("eval/sampled", read_if=KEEPS_BEST)
    """A metric of docs/metrics.md, or your own under user/; higher is better. If the row of metrics of a
    checkpoint lacks this metric, the checkpoint is not ranked."""
    max_gb: Positive | None = None
    """Largest size of all checkpoints together, 10^9 bytes; None: no limit. Beyond the limit the oldest
    checkpoints are removed, even the best ones. The newest checkpoint, and the one that a roll back would
    restore, are never removed. A checkpoint that is being written is not counted."""


@dataclass(frozen=True)
class SinkConfig(Component):
    """A sink: its name, and its own options."""

    samples: bool = False
    """Also sends the texts of samples.jsonl to the sink."""
    wait_s: NonNegative = 20.0
    """Largest number of seconds that the end of the run waits for the sink."""


@dataclass(frozen=True)
class TrackingConfig:
    samples: Whole = 4
    """Number of groups that each step writes to samples.jsonl."""
    shown: tuple[str, ...] = (
        "eval/sampled",
        "eval/greedy",
        "eval/best",
        "reward/mean",
        "pairs/accuracy",
        "loss/total",
        "response/length",
        "response/truncated_frac",
        "oracle/queries",
        "oracle/cost",
        "oracle/changes",
        "time/step_s",
    )
    """Metrics of docs/metrics.md, or your own under user/, that the line of a step shows, in this order. A
    line leaves out the metrics that its row lacks; with an empty list it has the step alone. A list of your
    own is also what the display in a terminal shows (docs/watching.md). The files and sinks get all
    metrics."""
    sinks: tuple[str | SinkConfig, ...] = ()
    """Other places for the metrics (docs/watching.md): `tensorboard`, `wandb`, `mlflow`, or your own as
    `file.py:Class` or `package.module:Class`. An entry is a name, or a section with options: `{name: wandb,
    project: mine}`. The files of the run directory are always written."""
    tensorboard: bool = False
    """Writes the metrics to RUN/tensorboard, which `tensorboard --logdir runs` shows. Short for
    `sinks: [tensorboard]`."""
    keep_trajectories: bool = False
    """Keeps trajectories in the ledger even if no kept checkpoint needs them. The run can then be replayed
    from its start."""


@dataclass(frozen=True, kw_only=True)
class Config:
    run_dir: str = setting(may_change="always")
    """Directory of the run. Default: `runs/` and the name of the configuration file without its ending."""
    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig = setting(SamplingConfig(), may_change="fork")
    oracle: OracleConfig
    algorithm: Component = setting(may_change="fork")
    learner: LearnerConfig = LearnerConfig()
    stop: StopConfig = setting(may_change="always")
    seed: int = setting(0, may_change="fork")
    """Seed of everything random in the run."""
    render: RenderConfig = RenderConfig()
    engine: Component = Component("torch")
    explorer: Component = Component("none")
    evaluation: EvaluationConfig | None = setting(None, may_change="fork", read_if=HAS_PROMPTS)
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), may_change="always")
    tracking: TrackingConfig = setting(TrackingConfig(), may_change="always")
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    alarms: AlarmsConfig = setting(default_factory=AlarmsConfig, may_change="always")
    """Alarms that notice a collapsing run, each with its action."""

    @property
    def answering(self) -> EvaluationConfig | None:
        """The section `evaluation` if it has held-out prompts (`evaluation.path`), otherwise None."""
        return self.evaluation if self.evaluation is not None and self.evaluation.path is not None else None


DEFAULT_PARTS = {f.name: f.default.name for f in fields(Config) if isinstance(f.default, Component)}
"""Name of the default part, by section, for sections that may leave out `name`."""
MAIN_FIELDS = {"model": "path", "prompts": "path"} | dict.fromkeys(
    ("oracle", "algorithm", "engine", "explorer"), "name"
)
"""The sections that may be given as a value alone, each with the field that the value is for."""
