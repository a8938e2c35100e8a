"""The conditions under which a run reads a setting (`ReadIf`), and the values that open settings get from
others (`Follows`), each with the words that messages and docs/settings.md have for it."""

from typing import Any

from oat.config.fields import Follows, Reader, ReadIf

CONSTANT = "constant"
RECORDED = "recorded"


def _samples(run: Reader) -> bool:
    return not run.config.prompts.responses or run.config.answering is not None


def _draws(run: Reader) -> bool:
    e = run.config.answering
    return not run.config.prompts.responses or (e is not None and e.samples > 0)


def _schedules(run: Reader) -> set[str]:
    learner = run.config.learner
    critic = (learner.critic_schedule or learner.schedule) if run.has_critic else CONSTANT
    return {learner.schedule, critic}


def _critic_falls(run: Reader) -> bool:
    learner = run.config.learner
    return run.has_critic and (learner.critic_schedule or learner.schedule) != CONSTANT


def _may_be_late(run: Reader) -> bool:
    oracle = run.config.oracle
    return oracle.name != RECORDED and (oracle.max_wait_s is not None or oracle.max_outstanding != 0)


def _has_pairs(run: Reader) -> bool:
    return run.config.evaluation is not None and run.config.evaluation.pairs is not None


def _rolls_back(run: Reader) -> bool:
    alarms = vars(run.config.alarms).values()
    return any(getattr(alarm, "action", None) == "roll_back" for alarm in alarms)


HAS_CRITIC = ReadIf("the algorithm has a critic", lambda run: run.has_critic)
HAS_REFERENCE = ReadIf("the run has a reference", lambda run: run.has_reference)
LEARNS_WITH_REFERENCE = ReadIf("the algorithm has a reference", lambda run: run.learns_with_reference)
LEARNS_PAIRS = ReadIf("the algorithm learns from pairs", lambda run: run.learns_pairs)
IS_RECORDED = ReadIf(
    "prompts.responses names recorded responses", lambda run: bool(run.config.prompts.responses)
)
HAS_RECORDED = ReadIf(
    "there are recorded responses (prompts.responses, or evaluation.pairs)",
    lambda run: bool(run.config.prompts.responses) or _has_pairs(run),
)
ONE_SOURCE = ReadIf(
    "prompts.path is one source, no list", lambda run: isinstance(run.config.prompts.path, str)
)
SAMPLES = ReadIf("the run samples responses", _samples)
DRAWS = ReadIf("the run draws responses, in training or in evaluations with samples", _draws)
SYNCS = ReadIf("the policy samples and learns", lambda run: _samples(run) and not run.learns_reward)
WAITS_FOR_ENVIRONMENT = ReadIf("a method of the environment is async", lambda run: run.waits_for_environment)
READS_DATE = ReadIf(
    "render.template is the tokenizer's or a file",
    lambda run: run.config.render.template not in (None, "chatml"),
)
ASKS = ReadIf("training asks an oracle that is not built in", lambda run: run.config.oracle.name in run.asked)
ASKS_ANY = ReadIf(
    "training or an evaluation asks an oracle that is not built in", lambda run: bool(run.asked)
)
ASKS_AHEAD = ReadIf("the oracle is not `recorded`", lambda run: run.config.oracle.name != RECORDED)
MAY_BE_LATE = ReadIf("oracle.max_wait_s or oracle.max_outstanding is set", _may_be_late)
SHOWS_GROUPS = ReadIf("a reward function may read groups", lambda run: run.shows_groups)
FALLS = ReadIf("a schedule is not constant", lambda run: _schedules(run) != {CONSTANT})
CRITIC_FALLS = ReadIf("there is a critic, and its schedule is not constant", _critic_falls)
SKIPS = ReadIf("learner.on_nonfinite is skip", lambda run: run.config.learner.on_nonfinite == "skip")
HAS_PROMPTS = ReadIf("evaluation.path is set", lambda run: run.config.answering is not None)
PASSES = ReadIf("evaluation.pass_at is set", lambda run: bool(run.config.evaluation.pass_at))
VOTES = ReadIf("evaluation.majority_at is set", lambda run: bool(run.config.evaluation.majority_at))
TAKES_BEST = ReadIf("evaluation.best_of is set", lambda run: bool(run.config.evaluation.best_of))
KEEPS_BEST = ReadIf("checkpoint.keep_best is above 0", lambda run: run.config.checkpoint.keep_best > 0)
ROLLS_BACK = ReadIf("the action of an alarm is roll_back", _rolls_back)
IS_APART = ReadIf("compute.runtime is processes or ray", lambda run: run.config.compute.runtime != "local")
ON_CLUSTER = ReadIf("compute.runtime is ray", lambda run: run.config.compute.runtime == "ray")
CLIENTS_ASK = ReadIf(
    "compute.runtime is processes or ray, and an oracle is asked that is not built in",
    lambda run: run.config.compute.runtime != "local" and bool(run.asked),
)
HAS_CLIENTS = ReadIf(
    "compute.oracle_clients is above 0",
    lambda run: run.config.compute.runtime != "local" and run.config.compute.oracle_clients > 0,
)


def as_policy(name: str) -> Follows:
    """Return the default of a setting of the critic: the policy's, which is `learner.NAME`."""

    def value(run: Reader) -> Any:
        return getattr(run.config.learner, name) if run.has_critic else None

    return Follows(lambda _: f"as learner.{name}", value)


def _threads(run: Reader) -> int | None:
    compute = run.config.compute
    return compute.threads if compute.profile == "cpu" and ("compute", "threads") in run.origins else None


def _columns(run: Reader) -> tuple[str, ...] | None:
    if run.config.oracle.name != RECORDED:
        return None
    return ("chosen", "rejected") if run.learns_pairs else ("completion",)


def _all_steps(run: Reader) -> str:
    alone = run.config.learner.critic_only_steps
    left = f", without {alone} of learner.critic_only_steps" if alone else ""
    return f"the optimiser steps of stop.max_steps {run.config.stop.max_steps}{left}"


def _critics_steps(run: Reader) -> str:
    if ("learner", "schedule_steps") in run.origins:
        return "as learner.schedule_steps"
    return f"the optimiser steps of stop.max_steps {run.config.stop.max_steps}"


_START = "the policy's start"
REFERENCE_START = Follows(lambda _: "as model.path", lambda run: _START if run.has_reference else None)
CRITIC_START = Follows(lambda _: "as model.path", lambda run: _START if run.has_critic else None)
AS_DTYPE = Follows(
    lambda _: "as model.dtype", lambda run: run.config.model.dtype if run.has_own_reference else None
)
TRL_COLUMNS = Follows(lambda _: "what oracle.name recorded reads", _columns, "first")
NEXT_QUESTION = Follows(
    lambda run: f"where a question of render.question {run.config.render.question} begins",
    lambda run: run.question_stop,
    "first",
)
ONE_A_GPU = Follows(lambda _: "one for each GPU of the actors", lambda run: run.placed_actors, "first")
ALL_STEPS = Follows(_all_steps, lambda run: run.policy_steps, "last")
CRITIC_STEPS = Follows(_critics_steps, lambda run: run.critic_steps, "last")
EIGHT_ROWS = Follows(
    lambda _: "since learner.micro_batch_tokens is not set",
    lambda run: 8 if run.config.learner.micro_batch_tokens is None else None,
    "last",
)
TRAINING_ORACLE = Follows(
    lambda _: "as oracle.name, with its options",
    lambda run: run.config.oracle.name if run.config.evaluation else None,
)
AS_COMPUTE_THREADS = Follows(lambda _: "as compute.threads", _threads)
