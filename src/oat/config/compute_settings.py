"""The settings of the machine, and of the processes in which a run computes."""

from dataclasses import dataclass
from typing import Literal

from oat.config.ranges import Count, CpuShare, Positive, Whole


@dataclass(frozen=True)
class ComputeConfig:
    profile: Literal["cpu", "gpu"] = "cpu"
    """Device of the models of learner and engine: the CPU (`cpu`), or one CUDA device of this machine (`gpu`;
    docs/gpu.md)."""
    threads: Count | None = None
    """Threads of torch. If engine.threads is not set, they are also the engine's. None, on a GPU: torch's
    default. None, on the CPU: the fastest number in a short measurement; it is made when the run is created,
    and its result is kept."""
    runtime: Literal["local", "ray"] = "local"
    """Where responses are sampled: in the run's own process (`local`), or in processes of a Ray cluster
    (`ray`)."""
    actors: Count = 1
    """Number of processes that sample. Only with runtime: ray. With gpus: one for each GPU of the actors."""
    actor_cpus: CpuShare = 1.0
    """Logical CPUs of the cluster that each of them takes; a fraction shares one."""
    gpus: Count | None = None
    """Number of GPUs of the cluster that the run uses, with runtime: ray and profile: gpu. One half, and the
    GPU in the middle of an odd number, has actors; the learner has one of the others (docs/gpu.md)."""
    collocate: bool = False
    """Every GPU of these has an actor, and the learner shares the first one."""
    oracle_clients: Whole = 0
    """Number of processes of the cluster that ask the oracles; 0: the run's own process asks them. Only with
    runtime: ray."""
    oracle_cpus: CpuShare = 1.0
    """Logical CPUs of the cluster that each of them takes; a fraction shares one."""
    address: str | None = None
    """Address of a running Ray cluster, as host:port. None: a cluster is started on this machine, and ends
    with the run."""
    learner: Literal["driver", "actor"] = "driver"
    """Where the run learns: in its own process (`driver`), or in a process of the cluster (`actor`). If that
    process ends, the run begins again from its newest checkpoint."""
    learner_cpus: CpuShare = 1.0
    """Logical CPUs of the cluster that the learner's process takes. Only with learner: actor."""
    standby: Whole = 0
    """Number of further processes that wait, with models loaded, until one that samples is lost. Without
    them, a process that takes the place of a lost one has to start first."""
    max_restarts: Whole = 10
    """How many of these processes may be replaced while a run works. If a further one is lost, the run saves
    its state and ends."""
    deadline_s: Positive = 1800.0
    """Longest time in seconds that a run waits for a reply of one of these processes. A process that has not
    replied by then counts as lost."""
    serialise: bool = False
    """Sends every value between boxes through the wire encoding, as a cluster would."""
    memory_gb: Positive | None = None
    """Memory for the run's tensors, 10^9 bytes. None: the memory that is free before any weight is loaded. If
    the estimated need is clearly larger, the run is refused; a larger number here lets it start. If
    learner.micro_batch_tokens is `auto`, this field must be set. The learner's models, optimisers and passes
    are then fitted into this memory, and no estimate is compared with it."""
