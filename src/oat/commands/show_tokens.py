"""What `oat check --show-tokens` prints: prompts as the model sees them, and what it does after them.

This part of `oat check` loads the weights, since nothing but the model can say what it does after a prompt. A
greedy response that spells the end of text before it stops counts too: some tokenizers of small models have
learned to spell it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oat.build.models import load_policy
from oat.build.resolved import Resolved
from oat.build.run_inputs import RunInputs, recorded_actor
from oat.errors import TemplateError
from oat.models.causal_lm import CausalLM
from oat.reports.terminal import many
from oat.text.renderer import Renderer
from oat.types import Prompt, Segment, Trajectory

_ENDS_SEEN = 16
"""Prompts whose ends are shown to the model."""
_SOON = 8
_MUCH = 0.25
_LIKELIEST = 4
_END_SHOWN = 6
_SPACE = "\u2423"


def token_lines(resolved: Resolved, run_inputs: RunInputs) -> list[str]:
    """What is learned from the first prompt of the run, token by token: where responses are sampled, the
    reference stands for one, and the model itself is asked how it goes on."""
    prompts, renderer = run_inputs.prompts.take(_ENDS_SEEN), run_inputs.renderer
    prompt = prompts[0]
    recorded = recorded_actor(resolved, run_inputs)
    if recorded is not None:
        rows = recorded.sample([prompt], {}, ())[0].trajectories
        names = [f"the response {name!r}" for name in recorded.columns]
    else:
        response = _stand_in(renderer, prompt.reference or "")
        rows = (
            Trajectory(
                "sampler", (Segment("context", renderer.prompt(prompt.messages)), *response), "stop", ""
            ),
        )
        names = [
            "the reference stands for a response" if prompt.reference else "a response that ends at once"
        ]
    lines = []
    for row, name in zip(rows, names, strict=True):
        lines += [
            f"example: row {prompt.row} of the prompts, {name}",
            "  place      id  author   trained  text",
        ]
        place = 0
        for segment in row.segments:
            masks = segment.mask if segment.mask is not None else [False] * len(segment.ids)
            for id, is_trained in zip(segment.ids, masks, strict=True):
                lines.append(
                    f"  {place:>5} {int(id):>7}  {segment.author:<8} {'yes' if is_trained else '-':<8} "
                    f"{_seen(renderer.decode([int(id)]))}"
                )
                place += 1
    ends = ", ".join(f"{id} {renderer.decode([id])!r}" for id in sorted(renderer.stop_ids)) or "none"
    strings = f"; or the text {', '.join(map(repr, renderer.stop))}" if renderer.stop else ""
    lines.append(f"stop ids: {ends}{strings}")
    return lines if recorded else [*lines, *_after_prompts(load_policy(resolved), renderer, prompts)]


@dataclass(frozen=True)
class _GoesOn:
    """How a model goes on after a prompt.

    Attributes:
        at_once: probability of a stop id as the first token.
        likeliest: the first tokens with their probabilities, likeliest first.
        greedy: its greedy response, of at most `_SOON` tokens.
        is_ended: whether that ends with a stop id.
        probability: of that response, all its tokens.
    """

    prompt: Prompt
    at_once: float
    likeliest: list[tuple[int, float]]
    greedy: list[int]
    is_ended: bool
    probability: float

    @property
    def ends(self) -> float:
        """Probability of ending at once, or as the greedy response does."""
        return min(1.0, self.at_once + (self.probability if self.is_ended and len(self.greedy) > 1 else 0.0))


@torch.no_grad()
def _goes_on(lm: CausalLM, renderer: Renderer, prompt: Prompt) -> _GoesOn:
    stop_ids = sorted(renderer.stop_ids)
    response = list[int]()
    firsts = list[torch.Tensor]()
    probability = 1.0
    while len(response) < _SOON and not (response and response[-1] in stop_ids):
        ids = np.concatenate([renderer.prompt(prompt.messages), response]).astype(np.int64)
        probabilities_V = (
            lm.head(lm.hidden(torch.as_tensor(ids, device=lm.device)[None])[0, -1]).float().softmax(-1)
        )
        firsts = firsts or [probabilities_V]
        response.append(int(probabilities_V.argmax()))
        probability *= float(probabilities_V[response[-1]])
    likeliest = firsts[0].argsort(descending=True)[:_LIKELIEST].tolist()
    shares = [(id, float(firsts[0][id])) for id in likeliest]
    return _GoesOn(
        prompt, float(firsts[0][stop_ids].sum()), shares, response, response[-1] in stop_ids, probability
    )


def _after_prompts(lm: CausalLM, renderer: Renderer, prompts: Sequence[Prompt]) -> list[str]:
    """What a model does with the ends of prompts: an end that its tokens never have leads it astray, or ends
    the response at once."""
    seen = [_goes_on(lm, renderer, prompt) for prompt in prompts]
    at_once, soon = np.mean([one.at_once for one in seen]), [one for one in seen if one.is_ended]
    worst = max(seen, key=lambda one: one.ends)
    tokens = ", ".join(f"{_seen(renderer.decode([id]))} {share:.3f}" for id, share in worst.likeliest)
    end = renderer.decode(renderer.prompt(worst.prompt.messages)[-_END_SHOWN:].tolist())
    how = "and ends" if worst.is_ended else "and goes on"
    share = sum(one.probability for one in soon) / len(seen)
    remedy = (
        "end prompts as the model's own texts go on (with a blank, or without one), or set render.template"
    )
    return [
        (
            "after the prompt, by the model itself at temperature 1, mean over the first "
            f"{many(len(seen), 'prompt')}:"
        ),
        f"  ends at once         {at_once:.3f} of the probability is on the stop ids",
        (
            f"  ends soon            {share:.3f} of it is on greedy responses that end within "
            f"{many(_SOON, 'token')}, {len(soon)} of {len(seen)}"
        ),
        f"  most of it, row {worst.prompt.row:<5}{_seen(end)} -> {tokens}",
        (
            f"                       greedy: {_seen(renderer.decode(worst.greedy))} {how}, with probability "
            f"{worst.probability:.3f}"
        ),
        *(
            [f"  otherwise            if responses should be longer: {remedy}"]
            if at_once > _MUCH or share > _MUCH
            else []
        ),
    ]


def _seen(text: str) -> str:
    """A token's text; one of nothing but spaces is seen, too."""
    return repr(text.replace(" ", _SPACE) if text and not text.strip(" ") else text)


def _stand_in(renderer: Renderer, text: str) -> tuple[Segment, ...]:
    try:
        ids = renderer.response(text)
    except TemplateError:  # a template that opens its reasoning, which the text does not close
        return ()
    return (Segment("model", ids, mask=ids == ids),)
