"""The tree of a configuration: every section and field, its type, its default, and what it means.

Sections with a `name` (engine, explorer, oracle, algorithm) may name one of ours,
`path/to/file.py:Name` or `package.module:Name`; the fields such a part reads stand beside its name and are
checked by `oat.build.resolve`, which knows the parts. `oat.config.load` reads and writes the tree.
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
    """The reference follows the policy: after every so many steps, reference = mix * policy + (1 - mix) *
    reference (TR-DPO, arXiv:2404.09656)."""

    every: Count = 1
    """Steps of the policy between two updates of the reference."""
    mix: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Share of the policy: 1 sets the reference to it, a small share at every step is a moving average. Of an
    adapter its matrices are mixed."""


@dataclass(frozen=True)
class ModelConfig:
    path: str
    """Hub id `org/name` or a directory in the layout of transformers: the policy's start."""
    reference: str | None = None
    """The reference: a model as in `path`, or the directory of an adapter beside `path`. By default the
    policy's start."""
    reference_device: Literal["cpu"] | None = None
    """Keep a reference that is a model of its own in the CPU's memory, where it also computes; None: beside
    the policy."""
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of a reference that is a model of its own; bfloat16 is half the memory. None: `dtype`."""
    reference_update: ReferenceUpdateConfig | None = None
    """Let the reference follow the policy (docs/models.md#references); None: it is frozen."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights. bfloat16 is refused: AdamW would lose most of its steps; see
    learner.autocast."""
    lora: LoraConfig | None = None
    """Train a small adapter beside frozen weights; None trains every weight."""
    adapter: str | None = None
    """A directory with an adapter that PEFT or `oat export --adapter` wrote beside `path`: the policy starts
    with it and goes on with it. `lora` is then what it says itself."""
    quantize: Literal["nf4"] | None = None
    """Keep the frozen weights beside an adapter in four bits (QLoRA); needs `oat-align[quantize]`. None: in
    `dtype`."""


@dataclass(frozen=True)
class SourceConfig:
    path: str
    """As `prompts.path`."""
    weight: Positive = 1.0
    """Its share of the prompts, relative to the weights of the other sources."""
    split: str | None = None
    """As `prompts.split`."""


@dataclass(frozen=True)
class PromptsConfig:
    path: str | tuple[str | SourceConfig, ...]
    """A file (.jsonl, .csv, .parquet), a saved dataset, a dataset of the hub (`org/name`, `org/name@config`)
    or `file.py:function`; or a list of these, each also as {path, weight, split}."""
    split: str | None = None
    """Split of a dataset; None is `train`."""
    max_prompts: Count | None = None
    """Read the first so many records, of each source."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A malformed record ends the run before it starts, or is left out and counted (`prompts/skipped`); also
    one of `evaluation`."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of messages; or of a whole conversation. Without it TRL's
    other formats are known (docs/data.md)."""
    reference_key: str | None = None
    """Column of the reference answer or response; None when there is none."""
    max_tokens: Count | None = None
    """Prompts of more tokens are dropped, and counted (`prompts/dropped`); of recorded data the prompt and
    its longest response together."""
    too_long: Literal["leave_out", "cut_prompt_start", "cut_response_end"] = "leave_out"
    """Recorded data of more tokens, or longer than the context: left out; or cut to have room, by the
    prompt's first tokens or by the last ones of a response, and counted (`prompts/cut`); also those of
    `evaluation.pairs` (docs/data.md#records-that-are-too-long)."""
    epochs: Count | None = None
    """Passes over the prompts; None is endless. With several sources, one pass is as many prompts as they
    have together."""
    shuffle: bool = True
    """A new order, from the seed, every epoch."""
    responses: tuple[str, ...] = ()
    """Columns of recorded responses, the best first: offline data, nothing is sampled in training. With the
    oracle `recorded` they default to TRL's: chosen and rejected, or completion. Otherwise, empty, the policy
    answers."""
    score_key: str | None = None
    """Column of their scores, for the oracle `recorded`; by default the first response is worth 1 and the
    others 0, and one with a `label` 1 or 0."""


@dataclass(frozen=True)
class RenderConfig:
    template: str | None = None
    """None: plain text. `chatml`, `tokenizer` (the tokenizer's own) or a path to a .jinja file: chat."""
    system: str | None = None
    """System message put before conversations that have none."""
    question: Literal["gsm8k", "math", "countdown"] | None = None
    """Put every prompt, one user message, as a question of this form: an instruction, examples, the question,
    a cue (docs/data.md#questions)."""
    few_shot: Whole = 0
    """Worked examples of that form before the question."""
    date: datetime.date | None = None
    """The day that a template reads with `strftime_now`, YYYY-MM-DD. By default the day on which the run is
    created, which it keeps."""


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
    """A prompt that leaves less than max_new_tokens of the model's context: refused before the run starts, or
    a response cut at the context's end."""
    environment: str | None = None
    """`file.py:Class` of an environment that answers the model within an episode; None: one response is the
    episode."""


@dataclass(frozen=True)
class Component:
    """A part chosen by name, with the fields that the part itself declares."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OracleConfig:
    name: str
    """One of ours (docs/oracles/), or your own as `file.py:function` or `package.module:Name`."""
    labels: Literal["threshold", "bernoulli"] = "threshold"
    """How a probability becomes a label: above one half, or drawn with that probability from the run's seed.
    One half is a tie."""
    scale: Positive = 1.0
    """Bradley-Terry from rewards: p = sigmoid((r1 - r2) / scale)."""
    max_outstanding: Whole = 0
    """Questions that are asked ahead of the steps that learn from them, so that answers come while the run
    learns; 0 asks for each step alone."""
    max_wait_s: Positive | None = None
    """Seconds that a step waits for answers. It then takes those that come first, whichever they are. None: a
    step waits until each of its questions is answered or past its deadline, and takes them in the order they
    were asked, so that runs do not depend on when answers come."""
    max_answer_age: Whole | None = None
    """Steps after its question at which an answer is too old to learn from, and is only counted; None
    never."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Seconds after which an unanswered question counts as failed."""
    repeats: Whole = 1
    """Answers about the same response, or pair, after which their mean is used again and nobody is asked; 0
    asks every time. An oracle whose answers are no function of the question says so itself (`cacheable =
    False`)."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BufferConfig:
    questions: Count
    """The newest so many questions that steps took; at least those of one step."""
    clear_every: Count | None = None
    """Steps after which it is empty again; None: never."""


@dataclass(frozen=True)
class LearnerConfig:
    learning_rate: NonNegative = 1e-6
    """Of AdamW, at the top of the schedule."""
    critic_learning_rate: NonNegative | None = None
    """Of the critic, where the algorithm has one; by default the policy's."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: NonNegative = 0.0
    """On matrices; never on biases and norms."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm, each model by itself."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """At a number that is not finite, before any weight moves: end the run and keep the batch, or leave this
    optimiser step out and count it."""
    max_skips: Count = 3
    """With on_nonfinite: skip, most optimiser steps in a row that are left out; one more ends the run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after warm-up; linear and cosine end at a tenth."""
    warmup_steps: Whole = 0
    """Optimiser steps over which the learning rate rises from 0."""
    schedule_steps: Count | None = None
    """Optimiser steps until a schedule ends; by default those of `stop.max_steps` steps. It is fixed when the
    run begins, so set it where the run may be made longer."""
    micro_batch_size: Count | None = None
    """Most rows of one forward pass; changes memory and speed, not the result. A unit (a pair) is never
    split. By default 8, or no limit where micro_batch_tokens is set."""
    micro_batch_tokens: Count | Literal["auto"] | None = None
    """Most tokens of one forward pass. `auto` measures once, when the run is created, what fits in
    compute.memory_gb, and keeps it."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping what is in them: less memory, about a
    third more time."""
    autocast: Literal["bfloat16"] | None = None
    """Precision of matrix products in learning; weights and log-probabilities stay float32. None: float32, as
    the engine samples."""
    logits_chunk: Count | None = None
    """Trained tokens whose logits are held at once. None: as many as have 2^26 logits together, 0.27 GB."""
    sync_every: Count = 1
    """Steps between two syncs of the sampler's weights."""
    buffer: BufferConfig | None = None
    """Learn again from what earlier steps took (docs/learner.md); None: from a step's own alone."""
    max_updates: Count | None = None
    """Most optimiser steps of a step; None: all that its passes have."""


@dataclass(frozen=True)
class GoldConfig(Component):
    """An oracle by name, with its own options beside it."""

    max_queries: Count | None = None
    """Its budget, as `evaluation.max_queries`; without it evaluations go on."""
    max_tokens: Count | None = None
    """The same in tokens."""
    max_cost: Positive | None = None
    """The same in money."""


@dataclass(frozen=True)
class EvaluationConfig:
    path: str | None = None
    """Held-out prompts, with the columns of `prompts`: one source, named as in `prompts.path`. The model
    answers them, and an oracle is asked."""
    pairs: str | None = None
    """Recorded pairs that are never learned, named likewise, in the columns of `prompts.responses` (`chosen`
    and `rejected`): what the algorithm's loss says of them, `eval/pairs/...`. Nobody is asked."""
    split: str | None = None
    """Split of a dataset; None is `train`. Of both, if both are datasets."""
    every: Count = 10
    """Steps between two evaluations; also before the first step and at the end."""
    every_queries: Count | None = None
    """One that is due waits until training has made so many queries since the last one; with `every: 1` they
    alone decide."""
    every_hours: Positive | None = None
    """The same in hours of running, over all restarts."""
    slot: Literal["policy", "sampler", "reference"] = "policy"
    """Whose weights answer."""
    samples: Whole = 1
    """Responses a prompt, drawn as in training; 0 for none."""
    greedy: bool = True
    """Also evaluate the greedy response."""
    max_prompts: Count | None = None
    """Read the first so many records, of each of the two."""
    online: bool = False
    """Also evaluate the responses that the step before learned from (`eval/online`), as they were drawn; they
    share oracle and budget."""
    oracle: str | Component | None = None
    """Its own oracle: a name, or fields as in `oracle`: the name and the oracle's own options. By default the
    one that training asks."""
    max_queries: Count | None = None
    """Its budget: an evaluation that would go beyond so many queries, of all evaluations together, is left
    out."""
    max_tokens: Count | None = None
    """The same in tokens, of an oracle that says how many a question takes."""
    max_cost: Positive | None = None
    """The same in money, of an oracle that knows its prices."""
    gold: str | GoldConfig | None = None
    """A second oracle for the same responses, named as `evaluation.oracle`, with a budget of its own: is what
    is rewarded what is wanted?"""
    kl: bool = False
    """Also `eval/kl`, how far the sampled responses are from the reference, for which its weights are
    loaded."""
    intervals: bool = False
    """Also the 95 % interval, over prompts, of every mean and win rate."""
    pass_at: tuple[Count, ...] = ()
    """Each k of pass@k, at most `samples`."""
    success: Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)] = 1.0
    """The value from which on a response passes."""
    majority_at: tuple[Count, ...] = ()
    """Each k of majority@k, at most `samples`."""
    answers: str | None = None
    """What the majority is of: last_number, marked_number, tagged_answer, or `file.py:function` from a text
    to its answer, or None."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Count = 10
    """Steps between two checkpoints; also at the end."""
    background: bool = True
    """Write while the run goes on, from a copy of the weights that learn and their moments. False: the step
    waits, and there is no copy."""
    keep_last: Count = 2
    """So many of the newest stay; others are removed after the new one verifies."""
    keep_best: Whole = 0
    """So many of those with the highest `best_metric` stay too."""
    best_metric: str = "eval/sampled"
    """One of src/oat/metrics.py, or your own under user/; higher is better. A checkpoint whose row lacks it
    is not ranked."""
    max_gb: Positive | None = None
    """Most that all checkpoints together may take, 10^9 bytes: the oldest go first, the newest stays. One
    that is being written comes on top."""


@dataclass(frozen=True)
class SinkConfig(Component):
    """A sink by name, with its own options beside it."""

    samples: bool = False
    """Also hand over the texts of samples.jsonl."""
    wait_s: NonNegative = 20.0
    """Most seconds that the end of the run waits for it."""


@dataclass(frozen=True)
class TrackingConfig:
    samples: Whole = 4
    """Groups written to samples.jsonl every step."""
    sinks: tuple[str | SinkConfig, ...] = ()
    """Who else gets the metrics (docs/watching.md): `tensorboard`, `wandb`, `mlflow`, or your own as
    `file.py:Class` or `package.module:Class`; by name, or with options, `{name: wandb, project: mine}`. The
    files are always written."""
    tensorboard: bool = False
    """Short for `sinks: [tensorboard]`: the metrics in RUN/tensorboard, which `tensorboard --logdir runs`
    shows."""
    keep_trajectories: bool = False
    """Keep trajectories in the ledger when every kept checkpoint is past them, so that the run can be
    replayed from its start."""


@dataclass(frozen=True)
class ComputeConfig:
    profile: Literal["cpu", "gpu"] = "cpu"
    """Where the models of learner and engine live and compute; `gpu` is one CUDA device of this machine
    (docs/gpu.md)."""
    threads: Count | None = None
    """Threads of torch, and of the engine unless engine.threads is set; None takes the number that is fastest
    in a short measurement when the run is created, and keeps it; on a GPU torch's own."""
    serialise: bool = False
    """Send every value between boxes through the wire encoding, as a cluster would."""
    memory_gb: Positive | None = None
    """Memory that the run's tensors may take, 10^9 bytes: one that is estimated to need clearly more is
    refused before it loads anything. By default what is free then; set it higher to go on all the same. With
    learner.micro_batch_tokens: auto, what the learner may fill."""


@dataclass(frozen=True)
class StopConfig:
    max_steps: Count | None = None
    """The run ends after so many steps."""
    max_queries: Count | None = None
    """The budget in oracle queries: never passed; the step that spends the last of it is the last step."""
    max_tokens: Count | None = None
    """The budget in tokens, of an oracle that counts them: the most that a question can take is set aside
    when it is asked. A step's questions are asked in waves, so that what answers leave over buys the next
    ones."""
    max_cost: Positive | None = None
    """The budget in money, in the currency of an oracle that counts it; likewise."""
    max_hours: Positive | None = None
    """The run ends at the first step boundary after so many hours of running, over all restarts; of a life
    that was killed, the time up to its last checkpoint counts."""


@dataclass(frozen=True, kw_only=True)
class Config:
    run_dir: str
    """Where the run lives; by default `runs/` and the name of the configuration file."""
    model: ModelConfig
    prompts: PromptsConfig
    sampling: SamplingConfig = SamplingConfig()
    oracle: OracleConfig
    algorithm: Component
    learner: LearnerConfig = LearnerConfig()
    stop: StopConfig
    seed: int = 0
    """Of everything random in the run."""
    render: RenderConfig = RenderConfig()
    engine: Component = Component("torch")
    explorer: Component = Component("none")
    evaluation: EvaluationConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    compute: ComputeConfig = ComputeConfig()
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """When a run says that it collapses, and what follows; the fields stand in
    `oat/config/alarm_settings.py`."""

    @property
    def answering(self) -> EvaluationConfig | None:
        """The section `evaluation`, where held-out prompts are answered and not only pairs measured."""
        return self.evaluation if self.evaluation is not None and self.evaluation.path is not None else None


DEFAULT_PARTS = {f.name: f.default.name for f in fields(Config) if isinstance(f.default, Component)}
"""The part of each section that may be left out."""
