"""The tree of a configuration: every section and field, its type, its default, and its meaning.

Sections with a `name` (engine, explorer, oracle, algorithm) name a part: one of ours, `path/to/file.py:Name`
or `package.module:Name`. The part's own fields stand beside the name; the part declares them
(`oat.types.part`), and `oat.build.parts` checks them. `oat.config.load` reads and writes the tree.
"""

import datetime
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec

from oat.config.alarm_settings import AlarmsConfig
from oat.config.ranges import Count, Decay, NonNegative, Positive, Share, Whole


@dataclass(frozen=True)
class LoraConfig:
    rank: Count = 8
    """Width of the adapter's matrices."""
    alpha: Positive = 16.0
    """The adapter's output is scaled by alpha / rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Every linear layer but the head, or a list of layers by the last part of their names, such as [q_proj,
    v_proj]."""


@dataclass(frozen=True)
class ReferenceUpdateConfig:
    """The reference follows the policy: every `every` steps, reference = mix * policy + (1 - mix) * reference
    (TR-DPO, arXiv:2404.09656)."""

    every: Count = 1
    """Steps of the policy between two updates of the reference."""
    mix: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Share of the policy. 1 sets the reference to the policy; a small share at every step makes it a moving
    average. With an adapter, the adapter's matrices are mixed."""


@dataclass(frozen=True)
class ModelConfig:
    path: str
    """The model that the policy starts from: a hub id `org/name`, or a directory in the layout of
    transformers."""
    reference: str | None = None
    """The reference: a model as in `path`, or the directory of an adapter for `path`. None: the policy's
    start."""
    reference_device: Literal["cpu"] | None = None
    """`cpu` keeps a reference with weights of its own in the CPU's memory and computes there; None: beside
    the policy."""
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of a reference with weights of its own; bfloat16 takes half the memory. None: `dtype`."""
    reference_update: ReferenceUpdateConfig | None = None
    """Makes the reference follow the policy (docs/models.md#references). None: it is frozen."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights. bfloat16 is refused, since AdamW would lose most of its steps; see
    learner.autocast."""
    lora: LoraConfig | None = None
    """Trains a small adapter beside frozen weights. None: every weight is trained."""
    adapter: str | None = None
    """Directory of an adapter for `path`, written by PEFT or `oat export --adapter`. The policy starts with
    it and trains it further; `lora` then follows from its files."""
    quantize: Literal["nf4"] | None = None
    """Keeps the frozen weights beside an adapter in four bits (QLoRA); needs `oat-align[quantize]`. None: in
    `dtype`."""


@dataclass(frozen=True)
class SourceConfig:
    path: str
    """A source, as `prompts.path`."""
    weight: Positive = 1.0
    """Share of the prompts that come from this source, relative to the weights of the other sources."""
    split: str | None = None
    """Split of a dataset, as `prompts.split`."""


@dataclass(frozen=True)
class PromptsConfig:
    path: str | tuple[str | SourceConfig, ...]
    """A file (.jsonl, .csv, .parquet), a saved dataset, a dataset of the hub (`org/name`, `org/name@config`)
    or `file.py:function`; or a list of these, each also as {path, weight, split}."""
    split: str | None = None
    """Split of a dataset; None: `train`."""
    max_prompts: Count | None = None
    """Number of records to read from the beginning of each source; None: all."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A malformed record ends the run before it starts, or is left out and counted (`prompts/skipped`); for
    `evaluation` too."""
    prompt_key: str = "prompt"
    """Column of the prompt (a string, or a list of messages), or of a whole conversation. Records without
    this column may have one of TRL's formats (docs/data.md)."""
    reference_key: str | None = None
    """Column of the reference answer or response; None: there is none."""
    max_tokens: Count | None = None
    """Longer prompts are dropped and counted (`prompts/dropped`). With recorded responses, this bounds a
    prompt together with its longest response."""
    too_long: Literal["leave_out", "cut_prompt_start", "cut_response_end"] = "leave_out"
    """Recorded data that have more tokens, or do not fit into the context, are left out, or cut until they
    fit: by the first tokens of the prompt, or by the last ones of a response; cuts are counted
    (`prompts/cut`). For `evaluation.pairs` too (docs/data.md#records-that-are-too-long)."""
    epochs: Count | None = None
    """Passes over the prompts; None: without end. With several sources, a pass is as many prompts as they
    have together."""
    shuffle: bool = True
    """Draws a new order from the seed in every epoch."""
    responses: tuple[str, ...] = ()
    """Columns of recorded responses, the best first: offline data, and nothing is sampled in training. With
    the oracle `recorded` the default are TRL's columns: chosen and rejected, or completion. Empty otherwise:
    the policy answers."""
    score_key: str | None = None
    """Column of the scores of recorded responses, for the oracle `recorded`. None: the first response is
    worth 1 and the others 0; a response with a `label` is worth 1 or 0."""


@dataclass(frozen=True)
class RenderConfig:
    template: str | None = None
    """Chat template: `chatml`, `tokenizer` (the tokenizer's own) or the path of a .jinja file. None: plain
    text."""
    system: str | None = None
    """System message for conversations that have none."""
    question: Literal["gsm8k", "math", "countdown"] | None = None
    """Puts every prompt, one user message, into a question of this form: an instruction, examples, the
    question, and a cue (docs/data.md#questions)."""
    few_shot: Whole = 0
    """Number of worked examples of that form before the question."""
    date: datetime.date | None = None
    """Day that a template reads with `strftime_now`, YYYY-MM-DD. None: the day on which the run is created,
    which the run keeps."""


@dataclass(frozen=True)
class SamplingConfig:
    max_new_tokens: Count = 256
    """Most tokens of a response."""
    temperature: NonNegative = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: Whole = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all."""
    min_p: Share = 0.0
    """Keep tokens at least this many times as probable as the most probable one; 0 keeps all."""
    stop: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    """Strings that end a response; none may be empty."""
    overflow: Literal["refuse", "cut"] = "refuse"
    """A prompt that leaves less than max_new_tokens of the model's context is refused before the run starts;
    `cut`: its response ends at the end of the context."""
    environment: str | None = None
    """`file.py:Class` of an environment that answers the model within an episode. None: one response is the
    episode."""


@dataclass(frozen=True)
class Component:
    """A part chosen by its name, with the fields that the part itself declares."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OracleConfig:
    name: str
    """One of ours (docs/oracles/), or your own as `file.py:function` or `package.module:Name`."""
    labels: Literal["threshold", "bernoulli"] = "threshold"
    """Makes a label of a probability: by comparison with one half, or by a draw with that probability from
    the run's seed. One half is a tie."""
    scale: Positive = 1.0
    """Scale of rewards in Bradley-Terry preferences: p = sigmoid((r1 - r2) / scale)."""
    max_outstanding: Whole = 0
    """Number of questions asked ahead of the steps that learn from them, so that answers arrive while the run
    learns. 0: each step asks for itself."""
    max_wait_s: Positive | None = None
    """Seconds that a step waits for answers; it then takes those that came first, whichever they are. None: a
    step waits until each of its questions is answered or past its deadline, and takes them in the order in
    which they were asked, so that runs do not depend on when answers arrive."""
    max_answer_age: Whole | None = None
    """An answer that comes more than this many steps after its question is only counted, and not learned
    from. None: no answer is too old."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Seconds after which an unanswered question counts as failed."""
    repeats: Whole = 1
    """After this many answers about the same response, or pair, their mean is used again and nobody is asked.
    0: the oracle is asked every time. An oracle whose answers are no function of the question declares this
    itself (`cacheable = False`)."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BufferConfig:
    questions: Count
    """Number of questions that the buffer holds, the newest that steps took; at least those of one step."""
    clear_every: Count | None = None
    """Steps after which the buffer is emptied; None: never."""


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: NonNegative = 1e-6
    """Learning rate of AdamW at the top of the schedule."""
    critic_learning_rate: NonNegative | None = None
    """Learning rate of the critic, for algorithms that have one. None: the policy's."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; biases and norms never decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm, for each model by itself."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a number is not finite, before any weight moves: end the run and keep the batch, or leave out this
    optimiser step and count it."""
    max_skips: Count = 3
    """Most optimiser steps in a row that are left out with on_nonfinite: skip; one more ends the run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up; linear and cosine end at a tenth."""
    warmup_steps: Whole = 0
    """Optimiser steps over which the learning rate rises from 0."""
    schedule_steps: Count | None = None
    """Optimiser steps until the schedule ends. None: those of `stop.max_steps` steps. It is fixed when the
    run begins, so set it if the run may be made longer."""
    micro_batch_size: Count | None = None
    """Most rows of one forward pass. It changes memory and speed, not the result; a unit (a pair) is never
    split. None: 8, or no limit if micro_batch_tokens is set."""
    micro_batch_tokens: Count | Literal["auto"] | None = None
    """Most tokens of one forward pass. `auto` measures what fits into compute.memory_gb when the run is
    created, and keeps that number."""
    gradient_checkpointing: bool = False
    """Computes layers again in the backward pass instead of keeping their activations: less memory, about a
    third more time."""
    autocast: Literal["bfloat16"] | None = None
    """Precision of matrix products in learning; weights and log-probabilities stay in float32. None: float32,
    as the engine samples."""
    logits_chunk: Count | None = None
    """Number of trained tokens whose logits are held at once. None: as many as have 2^26 logits together,
    0.27 GB."""
    sync_every: Count = 1
    """Steps between two transfers of new weights to the sampler."""
    buffer: BufferConfig | None = None
    """Replay buffer: the learner also learns from questions of earlier steps (docs/learner.md). None: from
    the step's own questions only."""
    max_updates: Count | None = None
    """Most optimiser steps of a step; None: as many as its passes have."""


@dataclass(frozen=True)
class GoldConfig(Component):
    """An oracle by name, with its own options beside it."""

    max_queries: Count | None = None
    """Budget of the gold oracle in queries, as `evaluation.max_queries`; evaluations go on without it."""
    max_tokens: Count | None = None
    """Its budget in tokens."""
    max_cost: Positive | None = None
    """Its budget in money."""


@dataclass(frozen=True)
class EvaluationConfig:
    path: str | None = None
    """Held-out prompts: one source as in `prompts.path`, with the columns of `prompts`. The model answers
    them, and an oracle is asked."""
    pairs: str | None = None
    """Recorded pairs that are never learned: one source as in `prompts.path`, with the columns of
    `prompts.responses` (`chosen` and `rejected`). The algorithm's loss is measured on them
    (`eval/pairs/...`), and nobody is asked."""
    split: str | None = None
    """Split of a dataset, of both if both are datasets; None: `train`."""
    every: Count = 10
    """Steps between two evaluations; there is also one before the first step and one at the end."""
    every_queries: Count | None = None
    """An evaluation that is due waits until training has made this many queries since the last one; with
    `every: 1` they alone decide."""
    every_hours: Positive | None = None
    """The same in hours of running, over all restarts."""
    slot: Literal["policy", "sampler", "reference"] = "policy"
    """The slot whose weights answer."""
    samples: Whole = 1
    """Responses a prompt, drawn as in training; 0 for none."""
    greedy: bool = True
    """Also evaluates the greedy response."""
    max_prompts: Count | None = None
    """Number of records to read from the beginning of each of the two sources; None: all."""
    online: bool = False
    """Also evaluates the responses that the step before learned from (`eval/online`), as they were drawn;
    they share oracle and budget."""
    oracle: str | Component | None = None
    """Oracle of evaluations: a name, or fields as in `oracle` (the name and the oracle's own options). None:
    the oracle of training."""
    max_queries: Count | None = None
    """Budget of all evaluations together, in queries: an evaluation that would go beyond it is left out."""
    max_tokens: Count | None = None
    """The same in tokens, for an oracle that says how many a question takes."""
    max_cost: Positive | None = None
    """The same in money, for an oracle that knows its prices."""
    gold: str | GoldConfig | None = None
    """A second oracle for the same responses, as `evaluation.oracle`, with a budget of its own. It shows
    whether what is rewarded is what is wanted."""
    kl: bool = False
    """Also reports `eval/kl`, the distance of the sampled responses from the reference, whose weights are
    loaded for it."""
    intervals: bool = False
    """Also reports the 95 % interval, over prompts, of every mean and win rate."""
    pass_at: tuple[Count, ...] = ()
    """Each k of pass@k, at most `samples`."""
    success: Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)] = 1.0
    """Least value with which a response passes."""
    majority_at: tuple[Count, ...] = ()
    """Each k of majority@k, at most `samples`."""
    answers: str | None = None
    """Finds the answer in a response, for the majority: last_number, marked_number, tagged_answer, or
    `file.py:function` from a text to its answer, or None."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Count = 10
    """Steps between two checkpoints; there is also one at the end."""
    background: bool = True
    """Writes while the run goes on, from a copy of the learned weights and their moments. False: the step
    waits, and there is no copy."""
    keep_last: Count = 2
    """Number of newest checkpoints that stay; older ones are removed after the new one verifies."""
    keep_best: Whole = 0
    """Number of checkpoints with the highest `best_metric` that stay too."""
    best_metric: str = "eval/sampled"
    """A metric of src/oat/metrics.py, or your own under user/; higher is better. A checkpoint whose row lacks
    it is not ranked."""
    max_gb: Positive | None = None
    """Most that all checkpoints together may take, 10^9 bytes: the oldest go first, the newest stays. A
    checkpoint that is being written comes on top."""


@dataclass(frozen=True)
class SinkConfig(Component):
    """A sink by name, with its own options beside it."""

    samples: bool = False
    """Also sends the texts of samples.jsonl."""
    wait_s: NonNegative = 20.0
    """Most seconds that the end of the run waits for the sink."""


@dataclass(frozen=True)
class TrackingConfig:
    samples: Whole = 4
    """Groups written to samples.jsonl every step."""
    sinks: tuple[str | SinkConfig, ...] = ()
    """Other places for the metrics (docs/watching.md): `tensorboard`, `wandb`, `mlflow`, or your own as
    `file.py:Class` or `package.module:Class`; by name, or with options, `{name: wandb, project: mine}`. The
    files are always written."""
    tensorboard: bool = False
    """Short for `sinks: [tensorboard]`: the metrics in RUN/tensorboard, which `tensorboard --logdir runs`
    shows."""
    keep_trajectories: bool = False
    """Keeps trajectories in the ledger after every kept checkpoint has passed them, so that the run can be
    replayed from its start."""


@dataclass(frozen=True)
class ComputeConfig:
    profile: Literal["cpu", "gpu"] = "cpu"
    """Device of the models of learner and engine; `gpu` is one CUDA device of this machine (docs/gpu.md)."""
    threads: Count | None = None
    """Threads of torch, and of the engine unless engine.threads is set. None: the number that is fastest in a
    short measurement when the run is created, which the run keeps; on a GPU torch's own."""
    serialise: bool = False
    """Sends every value between boxes through the wire encoding, as a cluster would."""
    memory_gb: Positive | None = None
    """Memory that the run's tensors may take, 10^9 bytes. A run whose estimate is clearly above it is refused
    before it loads anything. None: the memory that is free then; a higher number runs it all the same. With
    learner.micro_batch_tokens: auto it is the memory that the learner may fill."""


@dataclass(frozen=True)
class StopConfig:
    max_steps: Count | None = None
    """Number of steps of the run."""
    max_queries: Count | None = None
    """Budget in oracle queries. It is never passed; the step that spends the last query is the last step."""
    max_tokens: Count | None = None
    """Budget in tokens, for an oracle that counts them. The most that a question can take is set aside when
    it is asked. The questions of a step are asked in waves, so that what answers leave over buys the next
    ones."""
    max_cost: Positive | None = None
    """Budget in money, in the currency of an oracle that counts it; likewise."""
    max_hours: Positive | None = None
    """The run ends at the first step boundary after this many hours of running, over all restarts. After a
    kill, only the time up to the last checkpoint counts."""


@dataclass(frozen=True, kw_only=True)
class Config:
    run_dir: str
    """Directory of the run; by default `runs/` and the name of the configuration file."""
    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig = SamplingConfig()
    oracle: OracleConfig
    algorithm: Component
    learner: LearnerConfig = LearnerConfig()
    stop: StopConfig
    seed: int = 0
    """Seed of everything random in the run."""
    render: RenderConfig = RenderConfig()
    engine: Component = Component("torch")
    explorer: Component = Component("none")
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    compute: ComputeConfig = ComputeConfig()
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """Alarms of a collapsing run, and what follows them; `oat/config/alarm_settings.py` has the fields."""

    @property
    def answering(self) -> EvaluationConfig | None:
        """The section `evaluation`, if held-out prompts are answered and not only pairs measured."""
        return self.evaluation if self.evaluation is not None and self.evaluation.path is not None else None


DEFAULT_PARTS = {f.name: f.default.name for f in fields(Config) if isinstance(f.default, Component)}
"""The part of each section that may be left out."""
