"""What asking can cost at most, before anything is sampled: a question, a step and the run, held against the
budget.

The oracle says it itself (`price`), of questions about prompts of the run with the longest responses that
there can be: as many tokens as `sampling.max_new_tokens` allows, of those tokens that make the longest texts;
recorded responses are as they are. Of many prompts those count that are dearest by themselves among 1,024
spread over the data.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs
from oat.config.load import where
from oat.config.settings import Config
from oat.errors import ConfigError, warn
from oat.oracles.builtin import BUILTIN
from oat.rollout.recorded import RecordedActor
from oat.text.renderer import Renderer
from oat.types import Key, Kind, Price, Prompt, Question
from oat.types.budget import Budget

_PROMPTS, _DEAREST = 1024, 3
"""Prompts that are looked at, and those of them whose questions are priced with the longest responses."""
_TOKENS, _LONGEST = 512, 3
"""Tokens whose text is looked at, by what the tokenizer calls them; and those that make the longest
responses, by each measure."""
_UNITS = ("queries", "tokens", "cost")


def dearest_question(resolved: Resolved, run_inputs: RunInputs) -> Price:
    """The most that a question of training can cost, in each unit by itself. Nothing where nobody is asked.

    Raises:
        OracleError: the oracle's `price` fails, or returns no price.
    """
    config = resolved.config
    if config.oracle.name in BUILTIN:
        return Price()
    name, oracle = run_inputs.training_oracle
    kind = resolved.requires.feedback
    samples = len(config.prompts.responses) or (
        2 if kind == "compare" else sum(resolved.plan.samples.values())
    )
    blank = Question(Key("train", 0, 0, 0), kind, (), ("",) * samples, tuple(range(samples)), oracle=name)
    if not oracle.names_price:
        return oracle.price(blank)
    prompts = run_inputs.prompts.spread(_PROMPTS)
    if config.prompts.responses:
        return _most(oracle.price(_recorded(config, run_inputs, prompt, kind, name)) for prompt in prompts)
    plain = [(prompt, _about(prompt, blank, ("",) * samples)) for prompt in prompts]
    prices = [oracle.price(question) for _, question in plain]
    chosen = {
        place
        for unit in _UNITS
        for place in sorted(range(len(prices)), key=lambda place: -getattr(prices[place], unit))[:_DEAREST]
    }
    texts = longest_responses(run_inputs.renderer, config.sampling.max_new_tokens)
    return _most(
        oracle.price(replace(plain[place][1], candidates=(text,) * samples))
        for place in sorted(chosen)
        for text in texts
    )


def lines_of_costs(
    resolved: Resolved, run_inputs: RunInputs, one: Price, questions: int, steps: int | None
) -> Iterator[str]:
    """For `oat check`: the most that a question, a step and all steps that are left can cost, of an oracle
    that says it.

    Args:
        one: as `dearest_question` has it.
        questions: of a step.
        steps: that are left; None: until a budget ends the run.
    """
    _, oracle = run_inputs.training_oracle
    if resolved.config.oracle.name in BUILTIN or not oracle.names_price:
        return
    step, budget = _times(one, questions), resolved.budgets["train"]
    if steps is not None:
        run = f"; all steps {_in_words(budget.within(_times(step, steps)))}"
    else:
        run = f"; the run {_in_words(_whole(budget))}, its budget" if budget != Budget() else ""
    yield f"a question {_in_words(one)}; a step {_in_words(step)}{run}"


def refuse_small_budget(resolved: Resolved, one: Price, *, is_begun: bool) -> None:
    """Hold the budget of training against the most that a question, and a step, can cost. Of a run that is
    begun it is only said.

    Args:
        one: as `dearest_question` has it.

    Raises:
        ConfigError: it may be that no question can be asked.
    """
    budget, questions = resolved.budgets["train"], resolved.plan.questions
    alone = {
        "queries": Budget(queries=budget.queries),
        "tokens": Budget(tokens=budget.tokens),
        "cost": Budget(cost=budget.cost),
    }
    for unit, each in alone.items():
        most = getattr(one, unit)
        limit = getattr(budget, unit)
        field = f"stop.max_{unit}"
        if each.allows(_times(one, questions)):
            continue
        if each.allows(one):
            waves = ", so its questions are asked in waves (docs/ledger.md)" if budget.is_known_late else ""
            warn(
                f"{field} is {limit:g}, and a step of {questions} questions can cost "
                f"{questions * most:,.6g}{waves}"
            )
            continue
        what = (
            f"{field} is {limit:g}, and one question can cost {most:,.6g} ({resolved.config.oracle.name} "
            f"{_in_words(one)}), so that it might not be asked"
        )
        if is_begun:
            warn(what)
            continue
        place = where(("stop", f"max_{unit}"), resolved.origins)
        options = "the oracle's options (of a judge `tries` and `orders`)"
        raise ConfigError(
            f"{place}: {what}; raise it, or lower what a question can cost: sampling.max_new_tokens, or "
            f"{options}"
        )


def longest_responses(renderer: Renderer, size: int) -> list[str]:
    """Texts of responses of so many tokens: one token each, again and again, of those with the longest text
    by one measure or another."""
    tokens: dict[str, int] = renderer.tokenizer.get_vocab()
    longest = sorted(
        (id for id in tokens.values() if id not in renderer.stop_ids),
        key=_name_lengths(tokens).__getitem__,
        reverse=True,
    )[:_TOKENS]
    texts = {renderer.text(np.array([id])): id for id in longest}
    measures = (len, lambda text: len(text.encode("utf-8", "surrogatepass")), lambda text: len(repr(text)))
    chosen = {text for measure in measures for text in sorted(texts, key=measure, reverse=True)[:_LONGEST]}
    return sorted(renderer.text(np.full(size, texts[text])) for text in chosen)


def _name_lengths(tokens: dict[str, int]) -> dict[int, int]:
    return {id: len(name) for name, id in tokens.items()}


def _about(prompt: Prompt, question: Question, candidates: tuple[str, ...]) -> Question:
    columns, reference = dict(prompt.columns), prompt.reference
    return replace(
        question,
        messages=prompt.messages,
        candidates=candidates,
        columns=columns,
        reference=reference,
        is_chat=prompt.is_chat,
    )


def _recorded(config: Config, run_inputs: RunInputs, prompt: Prompt, kind: Kind, oracle: str) -> Question:
    actor = RecordedActor(run_inputs.prompts.fit, config.prompts.responses, config.prompts.score_key)
    (group,) = actor.sample([prompt], {}, ())
    return Question.about(
        group, Key("train", 0, 0, prompt.occurrence), kind, tuple(range(len(group.trajectories))), oracle
    )


def _most(prices: Iterator[Price]) -> Price:
    found = list(prices)
    return Price(max(p.queries for p in found), max(p.tokens for p in found), max(p.cost for p in found))


def _times(price: Price, count: int) -> Price:
    return Price(price.queries * count, price.tokens * count, price.cost * count)


def _whole(budget: Budget) -> Price:
    """What a budget allows, where it says."""
    return Price(budget.queries or 0, budget.tokens or 0, budget.cost or 0.0)


def _in_words(price: Price) -> str:
    parts = [f"{price.queries:,} {'query' if price.queries == 1 else 'queries'}"] if price.queries else []
    parts += [f"{price.tokens:,} tokens"] if price.tokens else []
    parts += [f"{price.cost:,.4g} in money"] if price.cost else []
    return "at most " + ", ".join(parts)
