"""`oat check --show-tokens`: show a prompt and its responses token by token, and how the model continues
prompts.

If the run samples responses, `--show-tokens` loads the weights, to see how the model continues a prompt. A
response ends at once if its first token is a stop id. It ends soon if a stop id follows within a few tokens.
Some small models' responses end soon, since these models first write the name of their end-of-text token in
ordinary tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oat.assemble.models import load_policy
from oat.assemble.run_inputs import RunInputs, recorded_actor
from oat.errors import TemplateError, plural
from oat.models.causal_lm import CausalLM
from oat.resolve.resolved import Resolved
from oat.text.renderer import Renderer
from oat.types import Message, Prompt, Segment, Trajectory

_ENDS_SEEN = 16
"""Largest number of prompts that the model continues."""
_SOON = 8
"""A response with at most this number of tokens counts as one that ends soon."""
_MUCH = 0.25
"""Limit of two means over the prompts: the probability of an empty response, and the probability of the
greedy response (0 if the response does not end soon). If a mean is above the limit, a line names a remedy."""
_LIKELIEST = 4
"""Number of the most probable first tokens that are shown."""
_END_SHOWN = 6
"""Number of tokens at the end of a prompt that are shown."""
_SPACE = "\u2423"


def token_lines(resolved: Resolved, run_inputs: RunInputs) -> list[str]:
    """Return lines that show the run's first prompt and its responses token by token, and say which tokens
    are trained.

    If responses are recorded, the lines show the recorded responses. If responses are sampled, the lines show
    the data's reference as the response; without a reference, they show a response that ends at once. Further
    lines then describe how the model continues prompts.
    """
    prompts = run_inputs.prompts.take(_ENDS_SEEN)
    renderer = run_inputs.renderer
    prompt = prompts[0]
    recorded = recorded_actor(resolved, run_inputs)
    if recorded is not None:
        rows = recorded.sample([prompt], {}, ())[0].trajectories
        names = [f"the response {name!r}" for name in recorded.columns]
    else:
        response = _stand_in(renderer, prompt.messages, prompt.reference or "")
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
        place, before = 0, list[int]()
        for segment in row.segments:
            masks = segment.mask if segment.mask is not None else [False] * len(segment.ids)
            for id, is_trained in zip(segment.ids, masks, strict=True):
                lines.append(
                    f"  {place:>5} {int(id):>7}  {segment.author:<8} {'yes' if is_trained else '-':<8} "
                    f"{_quoted(renderer.decode([int(id)], before))}"
                )
                place, before = place + 1, [int(id)]
    ends = ", ".join(f"{id} {renderer.decode([id])!r}" for id in sorted(renderer.stop_ids)) or "none"
    strings = f"; or the text {', '.join(map(repr, renderer.stop))}" if renderer.stop else ""
    lines.append(f"stop ids: {ends}{strings}")
    return lines if recorded else [*lines, *_after_prompts(load_policy(resolved), renderer, prompts)]


@dataclass(frozen=True)
class _Continuation:
    """The tokens with which a model continues a prompt, and their probabilities at temperature 1.

    Attributes:
        at_once: probability that the first token is a stop id.
        likeliest: the most probable first tokens with their probabilities, in descending order.
        greedy: the first ids of the greedy response, at most `_SOON`.
        is_ended: True if `greedy` ends with a stop id.
        probability: probability of `greedy`, the product over its tokens.
    """

    prompt: Prompt
    at_once: float
    likeliest: list[tuple[int, float]]
    greedy: list[int]
    is_ended: bool
    probability: float

    @property
    def ends(self) -> float:
        """Probability that the response is empty. If the greedy response ends within `_SOON` tokens, its
        probability is added."""
        return min(1.0, self.at_once + (self.probability if self.is_ended and len(self.greedy) > 1 else 0.0))


@torch.no_grad()
def _continuation(lm: CausalLM, renderer: Renderer, prompt: Prompt) -> _Continuation:
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
    return _Continuation(
        prompt,
        at_once=float(firsts[0][stop_ids].sum()),
        likeliest=[(id, float(firsts[0][id])) for id in likeliest],
        greedy=response,
        is_ended=response[-1] in stop_ids,
        probability=probability,
    )


def _after_prompts(lm: CausalLM, renderer: Renderer, prompts: Sequence[Prompt]) -> list[str]:
    """Return lines that describe how the model continues prompts. If the end of a prompt is unusual for the
    model, the model may answer badly, or end the response at once."""
    found = [_continuation(lm, renderer, prompt) for prompt in prompts]
    at_once = np.mean([one.at_once for one in found])
    soon = [one for one in found if one.is_ended]
    soon_share = sum(one.probability for one in soon) / len(found)
    ending = f"greedy responses that end within {plural(_SOON, 'token')}, {len(soon)} of {len(found)}"
    worst = max(found, key=lambda one: one.ends)
    prompt = renderer.prompt(worst.prompt.messages)
    tokens = ", ".join(
        f"{_quoted(renderer.decode([id], prompt))} {share:.3f}" for id, share in worst.likeliest
    )
    end = renderer.decode(prompt[-_END_SHOWN:].tolist(), prompt[:-_END_SHOWN])
    how = "and ends" if worst.is_ended else "and goes on"
    greedy = (
        f"{_quoted(renderer.decode(worst.greedy, prompt))} {how}, with probability {worst.probability:.3f}"
    )
    mean = f"mean over the first {plural(len(found), 'prompt')}"
    lines = [
        f"after the prompt, by the model itself at temperature 1, {mean}:",
        f"  ends at once         {at_once:.3f} of the probability is on the stop ids",
        f"  ends soon            {soon_share:.3f} of it is on {ending}",
        f"  most of it, row {worst.prompt.row:<5}{_quoted(end)} -> {tokens}",
        f"                       greedy: {greedy}",
    ]
    if at_once > _MUCH or soon_share > _MUCH:
        lines.append(
            "  otherwise            if responses should be longer: end prompts as the model's own texts go "
            "on (with a blank, or without one), or set render.template"
        )
    return lines


def _quoted(text: str) -> str:
    """Return a text in quotes. If it consists only of spaces, replace each space by a visible character."""
    return repr(text.replace(" ", _SPACE) if text and not text.strip(" ") else text)


def _stand_in(renderer: Renderer, messages: Sequence[Message], text: str) -> tuple[Segment, ...]:
    try:
        ids = renderer.response(text, messages)
    except TemplateError:  # the template begins the reasoning of a response, and this text does not end it
        return ()
    return (Segment("model", ids, mask=ids == ids),)
