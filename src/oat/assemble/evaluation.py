"""Functions that make the evaluations of a run."""

from dataclasses import replace
from pathlib import Path

from oat import protocols as boxes
from oat.assemble.prompts import pair_columns
from oat.assemble.run_inputs import RunInputs
from oat.config.settings import EvaluationConfig
from oat.evaluation.evaluation import Evaluation, EvaluationOracle, ExtraMetrics
from oat.evaluation.held_out import HeldOutPairs, OnlyPairs, RecordFiles
from oat.evaluation.modes import Mode, Trigger
from oat.ledger.ledger import Ledger
from oat.oracles.extraction import load_extractor
from oat.protocols import Learner
from oat.resolve.resolved import Resolved
from oat.resolve.sampling import plain_sampling
from oat.rollout.recorded import RecordedActor
from oat.seeds import Seeds
from oat.text.turns import Turns
from oat.types import Sampling


def make_evaluation(
    resolved: Resolved,
    run_inputs: RunInputs,
    actor: boxes.Actor,
    ledger: Ledger,
    seeds: Seeds,
    directory: Path,
    pairs: HeldOutPairs | None,
) -> Evaluation | OnlyPairs | None:
    """Make the evaluations of a run. Return None if the run has none.

    Args:
        directory: the run directory, to which the records of evaluations are written.
        pairs: the held-out pairs that evaluations also measure; None: there are none.
    """
    config = resolved.config
    e, held_out = config.evaluation, run_inputs.held_out
    renderer = run_inputs.renderer
    if e is None:
        return None
    trigger = Trigger(e.every, e.every_queries or 0, e.every_hours or 0.0)
    if held_out is None:
        assert pairs is not None, "cross_checks/evaluation.py refuses an evaluation of nothing"
        return OnlyPairs(pairs, trigger)
    names = {"prompt_key": config.prompts.prompt_key, "generator": Path(config.run_dir).name}
    return Evaluation(
        held_out.all(),
        actor,
        ledger,
        _modes(e, plain_sampling(config)),
        [
            EvaluationOracle(purpose, address, oracle.answers, resolved.budgets[purpose])
            for purpose, (address, oracle) in run_inputs.evaluation_oracles.items()
        ],
        slot=e.slot,
        trigger=trigger,
        extra=ExtraMetrics(
            e.kl,
            e.intervals,
            e.pass_at,
            e.success,
            e.majority_at,
            load_extractor(e.answers) if e.answers else None,
            e.online,
        ),
        records=RecordFiles(
            directory / "evaluations", decode=renderer.decode, turns=Turns(renderer), **names
        ),
        seeds=seeds,
        **({} if pairs is None else {"measure": pairs.measure}),
    )


def _modes(e: EvaluationConfig, sampling: Sampling) -> list[Mode]:
    """Return the modes in which held-out prompts are answered.

    Args:
        sampling: the settings of `sampled` responses.
    """
    greedy = Sampling(sampling.max_new_tokens, temperature=0.0, stop=sampling.stop)
    warm = replace(sampling, temperature=e.best_of_temperature)
    return [
        *([Mode("sampled", e.samples, sampling)] if e.samples else []),
        *([Mode("greedy", 1, greedy)] if e.greedy else []),
        *([Mode("best", 1, warm, best_of=e.best_of)] if e.best_of else []),
    ]


def held_out_pairs(
    resolved: Resolved, run_inputs: RunInputs, learner: Learner, seeds: Seeds
) -> HeldOutPairs | None:
    """Make the held-out pairs that evaluations measure. Return None if there are none."""
    if run_inputs.pairs is None:
        return None
    config = resolved.config
    actor = RecordedActor(run_inputs.pairs.fit, pair_columns(config), config.prompts.score_key)
    return HeldOutPairs(resolved.objective, run_inputs.pairs.all(), actor, learner, seeds)
