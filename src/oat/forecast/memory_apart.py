"""The memory of a run whose actors have processes of their own. Each of them has its own copy of the models
with which it samples.

If the learner has a process of its own too, the run's own process fetches from it what it sends to actors,
and what it writes into checkpoints.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from oat.assemble.models import slot_dtypes
from oat.assemble.outline import ModelOutline
from oat.config.compute_settings import ComputeConfig
from oat.config.load import where
from oat.config.settings import Config
from oat.errors import ConfigError
from oat.forecast.estimate import (
    SURE,
    Estimate,
    Lengths,
    cache_bytes,
    ensemble_bytes,
    estimate,
    held_models,
    loads_of,
    outlined_model,
    sampling_bytes,
    saves_in_background,
    sent_bytes,
    slot_copies,
)
from oat.forecast.places import size_of
from oat.learner.limits import GB
from oat.models.outline_errors import NotOutlinedError, not_estimated
from oat.resolve.placement import placement_of
from oat.resolve.resolved import Resolved
from oat.runtime.transfer import BUCKET_BYTES

IMPORTS = 3 * GB // 10
"""Bytes that a process takes after its imports."""
FORKED = GB // 10
"""Bytes of its own that a process takes which was forked after these imports."""
RAY = 4 * GB // 10
"""Bytes of the broker and of the parts of Ray on one machine."""


@dataclass(frozen=True)
class Needs:
    """The estimated memory of a run, by process.

    Attributes:
        learner: of the process that learns, which is the run's own unless `compute.learner` is `actor`.
        actor: of one actor.
        stored: bytes of the weights that are kept for actors that take the place of lost ones.
        fetched: the most bytes of the learner's tensors that the run's own process has at once, if another
            process learns; otherwise 0.
    """

    learner: Estimate
    actor: Estimate
    stored: int
    fetched: int

    def together(self, compute: ComputeConfig) -> tuple[int, str]:
        """Return the bytes that are needed of one memory, and a text about them. The memory is that of this
        machine, if the cluster is started here; on a cluster elsewhere, only this process is counted. With
        GPUs, it is that of the GPU that needs most."""
        learner, actor = self.learner.peak, self.actor.peak
        placed = placement_of(compute)
        if placed is not None and placed.is_shared:
            return (
                learner + actor,
                f"{size_of(learner)} for the learner and {size_of(actor)} for an actor on the same GPU",
            )
        if placed is not None:
            return max(
                learner, actor
            ), f"{size_of(learner)} for the learner, {size_of(actor)} for each actor on its GPU"
        is_apart = compute.learner == "actor"
        others = _others_here(compute)
        if not others:
            own = self.fetched if is_apart else learner
            return own, f"{size_of(own)} for this process"
        further = compute.oracle_clients
        is_forked = compute.runtime == "processes"
        each, base = (FORKED, IMPORTS) if is_forked else (IMPORTS, RAY)
        beside = f", {size_of(each)} for each of {further} without tensors" if further else ""
        own = IMPORTS + self.fetched if is_apart else 0
        this = f", {size_of(own)} for this process" if is_apart else ""
        learns = learner + (each if is_apart else IMPORTS)
        return (
            own + learns + others * (actor + each) + further * each + base + self.stored,
            f"{size_of(learns)} for the learner{this}, {size_of(actor + each)} for each of "
            f"{others} that sample{beside}, {size_of(base)} for {'what they share' if is_forked else 'Ray'}, "
            f"and {size_of(self.stored)} for weights that are kept",
        )

    def refuse_too_large(self, resolved: Resolved, limit: int, has: str) -> None:
        """Refuse a run whose processes together clearly need more memory than there is.

        Args:
            limit: bytes of the memory.
            has: the limit in words, for the message.

        Raises:
            ConfigError: `SURE` times what they need is larger than the limit.
        """
        compute = resolved.config.compute
        total, text = self.together(compute)
        if SURE * total <= limit:
            return
        way = "lower compute.actors or compute.standby, or use a Ray cluster of several machines"
        if compute.gpus:
            way = "take more GPUs without compute.collocate, or a smaller model"
        elif compute.actors + compute.standby == 1:
            way = "set compute.runtime to local, where learner and engine share the weights"
        if compute.learner == "actor" and not compute.gpus:
            way = f"set compute.learner to driver, or {way}"
        if compute.oracle_clients and not compute.gpus:
            way = f"lower compute.oracle_clients, or {way}"
        place = where(("compute", "gpus" if compute.gpus else "actors"), resolved.origins)
        raise ConfigError(
            f"{place}: {has}, and this run needs about {size_of(total)} ({text}): {way}; to go on all the "
            f"same, set compute.memory_gb to {1.1 * total / GB:.3g} or more"
        )


def needs_of(resolved: Resolved, lengths: Lengths, learner: Estimate | None = None) -> Needs:
    """Estimate the memory of each process.

    Args:
        learner: the estimate of the process that learns, if it was made; None: it is made here.

    Raises:
        NotOutlinedError, ConfigError, ModelError: a part cannot be made as configured.
    """
    config, learner = resolved.config, learner or estimate(resolved, lengths)
    policy = outlined_model(resolved, "policy")
    stored = _copies(config) * sent_bytes(resolved, policy)
    fetched = _fetched(resolved, policy, learner.state) if config.compute.learner == "actor" else 0
    return Needs(learner, estimate_actor(resolved, lengths, policy), stored, fetched)


def _fetched(resolved: Resolved, policy: ModelOutline, state: int) -> int:
    """Return the most bytes of tensors that the run's own process has at once, if another process learns.

    It fetches the weights of a model for each transfer, and the learner's state for each checkpoint, in
    shares (`runtime/remote_learner.py`). While a share arrives, the process has the reply and its decoded
    bytes, beside the tensors that are made of them.

    Args:
        state: bytes of the tensors of the learner's state.
    """
    config = resolved.config
    kept = policy.learned if config.learner.sync_every > 1 else 0
    cast = sent_bytes(resolved, policy) if slot_dtypes(resolved.engine) else 0

    def arriving(size: int) -> int:
        return 2 * max(min(BUCKET_BYTES, size), policy.largest)

    copied = state + kept if saves_in_background(config) else 0
    sent = policy.bytes + max(arriving(policy.bytes), cast, kept)
    return kept + copied + max(sent, state + arriving(state))


def estimate_actor(resolved: Resolved, lengths: Lengths, policy: ModelOutline | None = None) -> Estimate:
    """Estimate the memory of an actor in a process of its own, which gets its share of the prompts.

    Args:
        policy: the outline of the policy; None: it is made here.

    Raises:
        NotOutlinedError: the outline of a model does not tell its memory.
        ConfigError, ModelError: a model cannot be made as configured.
    """
    config = resolved.config
    held = held_models(resolved, policy or outlined_model(resolved, "policy"))
    policy = held["policy"].outline
    reads = resolved.features is not None and resolved.features.backbone == "reference"
    needs = {"policy", "reference"} if reads or "reference" in resolved.slots else {"policy"}
    own = {name: held[name].own for name in needs & held.keys()}
    copies = slot_copies(resolved, held)
    networks, _ = ensemble_bytes(resolved, policy)
    if not resolved.engine.capabilities.shares_weights and not reads:
        own = {}  # slots of another precision, and nobody reads the models themselves
    weights = sum(own.values()) + sum(copies.values()) + networks
    loads = loads_of(resolved, lengths, policy, config.compute.actors)
    phases = {"loading": weights + (policy.bytes if not own else 0)}
    phases |= {name: weights + sampling_bytes(resolved, policy, load) for name, load in loads.items()}
    staged = sent_bytes(resolved, policy) if config.compute.profile == "cpu" else 0
    phases["new weights"] = weights + staged
    cached = max((cache_bytes(resolved, policy, load) for load in loads.values()), default=0)
    return Estimate({"weights": weights, "weights on the way": staged, "keys and values": cached}, phases)


def process_lines(resolved: Resolved, lengths: Lengths) -> Iterator[tuple[str, str]]:
    """Yield a line for each kind of process, with the memory that it needs, and one for all of them. If the
    run has no processes beside its own, yield nothing."""
    compute, placed = resolved.config.compute, placement_of(resolved.config.compute)
    if compute.runtime == "local":
        return
    try:
        needs = needs_of(resolved, lengths)
    except NotOutlinedError as error:
        yield "processes", not_estimated(str(error))
        return
    on = "its GPU" if placed else "the machine"
    where_learner = f"; GPU {placed.learner} of the run" if placed else ""
    needed = f"{where_learner}; about {size_of(needs.learner.peak)} for tensors"
    has = [*(["learner"] if compute.learner == "driver" else []), "ledger"]
    has += [] if compute.oracle_clients else ["oracles"]
    fetched = f"{size_of(needs.fetched)} of it for tensors of the learner"
    own = needed if compute.learner == "driver" else f"; about {size_of(IMPORTS + needs.fetched)}, {fetched}"
    yield "this process", f"{', '.join(has)}{own}"
    if compute.learner == "actor":
        yield "for learning", f"1, with {compute.learner_cpus:g} logical CPUs{needed}"
    if compute.oracle_clients:
        each = f"each with {compute.oracle_cpus:g} logical CPUs"
        without = FORKED if compute.runtime == "processes" else IMPORTS
        loaded = f"about {size_of(without)} without tensors, and what their oracles load"
        yield "clients", f"{compute.oracle_clients}, {each}; {loaded}"
    gpus = ""
    if placed is not None:
        half = ", shared with the learner on one" if placed.is_shared else ""
        gpus = f" and a GPU{half}"
    each = f"each with {compute.actor_cpus:g} logical CPUs{gpus}"
    yield "actors", f"{compute.actors}, {each}; about {size_of(needs.actor.peak)} for tensors of one on {on}"
    if compute.standby:
        yield "standbys", f"{compute.standby} with models loaded, which need as much as actors"
    yield (
        "object store" if compute.runtime == "ray" else "shared memory",
        f"about {size_of(needs.stored)} of weights, for actors that take the place of lost ones",
    )
    total, text = needs.together(compute)
    what = "on one GPU" if placed else "on this machine"
    yield "in all", f"about {size_of(total)} {what}: {text}"


def _others_here(compute: ComputeConfig) -> int:
    """Return how many processes share the memory of this machine with the run's own. Nobody knows it of a
    cluster elsewhere, and processes with GPUs need theirs."""
    is_elsewhere = compute.address is not None or compute.profile == "gpu"
    return 0 if compute.runtime == "local" or is_elsewhere else compute.actors + compute.standby


def _copies(config: Config) -> int:
    """Return how many copies of a model's weights the cluster keeps: one for each set of slots that share
    their weights and get new ones."""
    has_late = config.learner.sync_every > 1 and config.answering is not None
    return 1 + has_late + (config.model.reference_update is not None)
