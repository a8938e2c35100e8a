"""The highest cost of a question, of a step and of the run, compared with the budget before anything is
sampled.

The oracle states prices by its method `price`. At most 1,024 prompts, spread over the data, are priced:
* If responses are recorded, each prompt is priced with its own responses.
* Otherwise each prompt is first priced with empty responses. Then the most expensive prompts are priced with
  the longest possible responses. Each of these repeats a token with a long text `sampling.max_new_tokens`
  times.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from oat.assemble.run_inputs import RunInputs, recorded_actor
from oat.config.load import where
from oat.data.prompts import Prompts
from oat.errors import ConfigError, plural, warn
from oat.forecast.rows import Row
from oat.oracles.base import Oracle
from oat.oracles.builtin import BUILTIN
from oat.resolve.resolved import Resolved
from oat.text.renderer import Renderer
from oat.types import Key, Price, Prompt, Question
from oat.types.questions import Budget

_PROMPTS = 1024
"""Largest number of prompts whose questions are priced first, with empty responses."""
_DEAREST = 3
"""This number of prompts with the most queries is priced again with the longest responses. So is this number
with the most tokens, and this number with the highest cost in money."""
_TOKENS = 512
"""Number of tokens whose texts `longest_responses` compares. They have the longest names in the
vocabulary."""
_LONGEST = 3
"""Number of tokens that `longest_responses` chooses by each measure of their texts, such as characters."""
_UNITS = ("queries", "tokens", "cost")


def highest_price(resolved: Resolved, run_inputs: RunInputs) -> Price:
    """Return the highest cost of a question of training: the most queries, the most tokens and the most
    money, which may come from different questions. If no oracle is asked, all three are 0.

    Raises:
        OracleError: the oracle's `price` fails, or returns no price.
    """
    config = resolved.config
    if config.oracle.name in BUILTIN:
        return Price()
    name, oracle = run_inputs.training_oracle
    kind = resolved.requires.feedback
    samples = len(config.prompts.responses) or (2 if kind == "compare" else resolved.plan.most_candidates)
    blank = Question(Key("train", 0, 0, 0), kind, (), ("",) * samples, tuple(range(samples)), oracle=name)
    if not oracle.names_price and not oracle.sources:
        return oracle.price(blank)
    prompts = run_inputs.prompts.spread(_PROMPTS)
    if config.prompts.responses:
        return _most(oracle.price(_recorded(resolved, run_inputs, prompt, name)) for prompt in prompts)
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


def queries_of_a_response(oracle: Oracle, address: str, purpose: str, prompts: Prompts) -> int:
    """Return the largest number of queries that an evaluation may pay for a response.

    Args:
        oracle: the oracle that judges the evaluation, asked as `address`.
        prompts: the prompts of the evaluation.

    Raises:
        OracleError: the oracle's `price` fails, or returns no price.
    """
    if not oracle.sources:
        return 1
    blank = Question(Key(purpose, 0, 0, 0), "score", (), ("",), (0,), oracle=address)
    return _most(oracle.price(_about(each, blank, ("",))) for each in prompts.spread(_PROMPTS)).queries


def cost_rows(
    resolved: Resolved, run_inputs: RunInputs, one: Price, questions: int, steps: int | None
) -> Iterator[Row]:
    """Yield rows for `oat check`: the highest cost of a question, of a step and of all steps that are left.
    If the oracle states no price, yield nothing.

    Args:
        one: the highest cost of a question, as `dearest_question` returns it.
        questions: largest number of questions of a step.
        steps: largest number of steps that are left; None: only a budget or a clock ends the run.
    """
    _, oracle = run_inputs.training_oracle
    if resolved.config.oracle.name in BUILTIN or not oracle.names_price:
        return
    step, budget = _times(one, questions), resolved.budgets["train"]
    costs = {"a question": one, "a step": step}
    if steps is not None:
        costs["all steps left"] = budget.within(_times(step, steps))
    elif budget != Budget():
        costs["the run"] = _whole(budget)
    for what, price in costs.items():
        for unit in _UNITS:
            if most := getattr(price, unit):
                name = "money" if unit == "cost" else unit
                yield Row(f"cost of {what}, most", most, name, "stop" if what == "the run" else "oracle.name")


def refuse_small_budget(resolved: Resolved, one: Price, *, is_begun: bool) -> None:
    """Refuse the run if the budget of training is smaller than the highest cost of one question or, with
    `sampling.refill_rounds` or branches, of one step in all of its rounds. Otherwise warn if the budget is
    smaller than the highest cost of a step.

    Args:
        one: the highest cost of a question, as `dearest_question` returns it.
        is_begun: True if the run has begun. Then every case gives only a warning.

    Raises:
        ConfigError: the budget is too small, and the run has not begun.
    """
    budget, rounds, branching = resolved.budgets["train"], resolved.most_rounds, resolved.plan.branching
    questions = resolved.widened.questions * rounds
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
        if each.allows(one) and rounds == 1 and branching is None:
            waves = ", so its questions are asked in waves (docs/ledger.md)" if budget.is_known_late else ""
            warn(
                f"{field} is {limit:g}, and a step of {questions} questions can cost "
                f"{questions * most:,.6g}{waves}"
            )
            continue
        place = where(("stop", f"max_{unit}"), resolved.origins)
        if each.allows(one):
            what = (
                f"{field} is {limit:g}, and one step can cost {questions * most:,.6g}, with {questions} "
                f"questions in {plural(rounds, 'round')}"
            )
            fewer = [] if rounds == 1 else ["sampling.refill_rounds"]
            remedy = f"raise it, or lower {' or '.join([*fewer, *_of_branches(resolved)])}"
        else:
            what = (
                f"{field} is {limit:g}, and one question can cost {most:,.6g} ({resolved.config.oracle.name} "
                f"{_in_words(one)}), so that it might not be asked"
            )
            lower = ", ".join([*_of_branches(resolved), "sampling.max_new_tokens"])
            remedy = (
                f"raise it, or lower what a question can cost: {lower}, or the oracle's options (of a judge "
                "`tries` and `orders`)"
            )
        if not is_begun:
            raise ConfigError(f"{place}: {what}; {remedy}")
        warn(what)


def _of_branches(resolved: Resolved) -> list[str]:
    """Return the settings that lower the number of branches; none if the run has no branches."""
    names = ("samples", "vine.branches", "vine.most_steps")
    return [f"algorithm.{name}" for name in names] if resolved.plan.branching is not None else []


def longest_responses(renderer: Renderer, size: int) -> list[str]:
    """Return texts of responses. Each text repeats one token `size` times. The tokens are those whose texts
    have the most characters, those with the most bytes, and those with the most characters when escaped."""
    tokens: dict[str, int] = renderer.tokenizer.get_vocab()
    longest = sorted(
        (id for id in tokens.values() if id not in renderer.stop_ids),
        key=_name_lengths(tokens).__getitem__,
        reverse=True,
    )[:_TOKENS]
    texts = {renderer.text([id], after=[id]): id for id in longest}
    measures = (len, lambda text: len(text.encode("utf-8", "surrogatepass")), lambda text: len(repr(text)))
    chosen = {text for measure in measures for text in sorted(texts, key=measure, reverse=True)[:_LONGEST]}
    return sorted(renderer.text(np.full(size, texts[text]), after=[texts[text]]) for text in chosen)


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


def _recorded(resolved: Resolved, run_inputs: RunInputs, prompt: Prompt, oracle: str) -> Question:
    actor = recorded_actor(resolved, run_inputs)
    assert actor is not None, "the prompts have responses"
    (group,) = actor.sample([prompt], {}, ())
    key, picks = Key("train", 0, 0, prompt.occurrence), tuple(range(len(group.trajectories)))
    return Question.about(group, key, resolved.requires.feedback, picks, oracle)


def _most(prices: Iterator[Price]) -> Price:
    found = list(prices)
    return Price(max(p.queries for p in found), max(p.tokens for p in found), max(p.cost for p in found))


def _times(price: Price, count: int) -> Price:
    return Price(price.queries * count, price.tokens * count, price.cost * count)


def _whole(budget: Budget) -> Price:
    """Return the limits of a budget as a price. A limit that is not set becomes 0."""
    return Price(budget.queries or 0, budget.tokens or 0, budget.cost or 0.0)


def _in_words(price: Price) -> str:
    parts = [f"{price.queries:,} {'query' if price.queries == 1 else 'queries'}"] if price.queries else []
    parts += [f"{price.tokens:,} tokens"] if price.tokens else []
    parts += [f"{price.cost:,.4g} in money"] if price.cost else []
    return "at most " + ", ".join(parts)
