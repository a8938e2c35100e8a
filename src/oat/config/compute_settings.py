"""The settings of the machine, and of the processes in which a run computes."""

from dataclasses import dataclass
from typing import Literal

from oat.config.conditions import CLIENTS_ASK, HAS_CLIENTS, IS_APART, ON_CLUSTER, ONE_A_GPU
from oat.config.fields import setting
from oat.config.ranges import Count, CpuShare, Positive, Whole


@dataclass(frozen=True)
class ComputeConfig:
    profile: Literal["cpu", "gpu"] = "cpu"
    """Device of the models of learner and engine: the CPU (`cpu`), or one CUDA device of this machine (`gpu`;
    docs/gpu.md)."""
    threads: Count | None = setting(None, open=None)
    """Threads of torch. If engine.threads is not set, they are also the engine's. None, on a GPU: torch's
    default. None, on the CPU: the fastest number in a short measurement; it is made when the run is created,
    and its result is kept."""
    runtime: Literal["local", "processes", "ray"] = setting("local", may_change="always")
    """Where responses are sampled: in the run's own process (`local`), in further processes of this machine
    (`processes`), or in processes of a Ray cluster (`ray`)."""
    actors: Count = setting(1, read_if=IS_APART, may_change="always", follows=ONE_A_GPU)
    """Number of processes that sample. Not with runtime: local. With gpus: one for each GPU of the actors."""
    actor_cpus: CpuShare = setting(1.0, read_if=IS_APART, may_change="always")
    """Logical CPUs that each of them takes, of the cluster or of this machine; a fraction shares one."""
    gpus: Count | None = setting(None, read_if=IS_APART, may_change="always")
    """Number of GPUs that the run uses, with profile: gpu and a runtime other than local. One half, and the
    GPU in the middle of an odd number, has actors; the learner has one of the others (docs/gpu.md)."""
    collocate: bool = setting(False, read_if=IS_APART, may_change="always")
    """Every GPU of these has an actor, and the learner shares the first one."""
    oracle_clients: Whole = setting(0, read_if=CLIENTS_ASK, may_change="always")
    """Number of processes that ask the oracles; 0: the run's own process asks them. Not with runtime:
    local."""
    oracle_cpus: CpuShare = setting(1.0, read_if=HAS_CLIENTS, may_change="always")
    """Logical CPUs that each of them takes, of the cluster or of this machine; a fraction shares one."""
    address: str | None = setting(None, read_if=ON_CLUSTER, may_change="always")
    """Address of a running Ray cluster, as host:port. None: a cluster is started on this machine, and ends
    with the run."""
    learner: Literal["driver", "actor"] = setting("driver", read_if=IS_APART, may_change="always")
    """Where the run learns: in its own process (`driver`), or in another one (`actor`). If that
    process ends, the run begins again from its newest checkpoint."""
    learner_cpus: CpuShare = setting(1.0, read_if=IS_APART, may_change="always")
    """Logical CPUs that the learner's process takes. Only with learner: actor."""
    standby: Whole = setting(0, read_if=IS_APART, may_change="always")
    """Number of further processes that wait, with models loaded, until one that samples is lost. Without
    them, a process that takes the place of a lost one has to start first."""
    max_restarts: Whole = setting(10, read_if=IS_APART, may_change="always")
    """How many of these processes may be replaced while a run works. If a further one is lost, the run saves
    its state and ends."""
    deadline_s: Positive = setting(1800.0, read_if=IS_APART, may_change="always")
    """Longest time in seconds that a run waits for a reply of one of these processes. A process that has not
    replied by then counts as lost."""
    serialise: bool = setting(False, may_change="always")
    """Sends every value between boxes through the wire encoding, as other processes would."""
    memory_gb: Positive | None = setting(None, may_change="always")
    """Memory for the run's tensors, 10^9 bytes. None: the memory that is free before any weight is loaded. If
    the estimated need is clearly larger, the run is refused; a larger number here lets it start. If
    learner.micro_batch_tokens is `auto`, this field must be set. The learner's models, optimisers and passes
    are then fitted into this memory, and no estimate is compared with it."""
