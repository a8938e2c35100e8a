"""The task of the quickstart: two-digit sums that need a carry. A teacher demonstrates them, and mostly
leaves out the carry.

* The tokenizer has one token per character.
* The start is a small Llama that learned from the teacher's demonstrations. Like the teacher, it mostly
  answers without the carry. Alignment learns the right answers from the rule oracle.
* Sums are held out as unordered pairs of numbers: if 37+48 is held out, training contains neither 37+48 nor
  48+37.

The teacher leaves out the carry in 75 of 100 sums. With 65 of 100, the start gave nearly equal probability to
the answers with and without the carry, and floating-point rounding changed many greedy answers. The runs end
after 40 steps, because the accuracy then no longer rises, and a control drifts at random as long as it runs.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oat.files import write_atomically
from oat.models.causal_lm import CausalLM
from oat.quickstart import refuse_changed
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.types import Message

CHARACTERS = "0123456789+="
PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
MAX_NEW_TOKENS = 4
"""Number of tokens in the longest answer: three digits and the end of text."""
BATCH = 128
"""Number of demonstrations in one step of supervised learning."""
FORGETS = 0.75
"""Probability that a demonstration lacks the carry. The head of this file gives the reason for 0.75."""


@dataclass(frozen=True)
class Sum:
    """A sum, with its prompt, its right answer, and its answer without the carry."""

    first: int
    second: int

    @property
    def prompt(self) -> str:
        return f"{self.first}+{self.second}="

    @property
    def right(self) -> str:
        return str(self.first + self.second)

    @property
    def forgotten(self) -> str:
        """The answer without the carry from the ones to the tens."""
        return str(self.first + self.second - 10)


@dataclass(frozen=True)
class Task:
    """The data of the quickstart.

    Attributes:
        train: sums for training, with both orders of each pair of numbers.
        heldout: held-out sums, with one order of each pair of numbers.
        demonstrations: sums with the teacher's answers, in the order in which the model `start` learns them.
    """

    train: tuple[Sum, ...]
    heldout: tuple[Sum, ...]
    demonstrations: tuple[tuple[Sum, str], ...]

    def write(self, folder: Path) -> None:
        """Write three JSONL files of {"prompt", "answer"}: train, heldout, demonstrations."""
        write_records(folder / "train.jsonl", ((s.prompt, s.right) for s in self.train))
        write_records(folder / "heldout.jsonl", ((s.prompt, s.right) for s in self.heldout))
        write_records(
            folder / "demonstrations.jsonl", ((s.prompt, shown) for s, shown in self.demonstrations)
        )


def build_task(seed: int, *, heldout: int = 520, demonstrations: int = 51_200) -> Task:
    """Make the data for a seed.

    Args:
        heldout: number of held-out pairs of numbers. In all, 1,845 pairs of two-digit numbers need a carry.
        demonstrations: number of demonstrations. Their sums are drawn with replacement from `Task.train`.
    """
    seeds = Seeds(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 >= 10]
    generator = seeds.at("quickstart", "split")
    shuffled = [pairs[i] for i in generator.permutation(len(pairs))]
    held = tuple(
        Sum(b, a) if swap else Sum(a, b)
        for (a, b), swap in zip(shuffled[:heldout], generator.random(heldout) < 0.5, strict=True)
    )
    train = tuple(Sum(*order) for a, b in shuffled[heldout:] for order in dict.fromkeys([(a, b), (b, a)]))
    generator = seeds.at("quickstart", "demonstrations")
    drawn = [train[i] for i in generator.integers(len(train), size=demonstrations)]
    wrong = generator.random(demonstrations) < FORGETS
    return Task(
        train,
        held,
        tuple((s, s.forgotten if is_wrong else s.right) for s, is_wrong in zip(drawn, wrong, strict=True)),
    )


def write_records(path: Path, records: Iterable[tuple[str, str]]) -> None:
    """Write records into a file.

    Raises:
        ConfigError: the file exists, and has something else.
    """
    text = "".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in records)
    refuse_changed(path, text)
    write_atomically(path, text)


def build_tokenizer() -> Any:
    """Make a tokenizer with one token per character. Prompts begin with <bos>."""
    vocabulary = {token: index for index, token in enumerate([*CHARACTERS, PAD, BOS, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def build_model(tokenizer: Any, seed: int, *, hidden: int = 128, layers: int = 4) -> CausalLM:
    """Make a Llama with random weights. By default, it has 0.66 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CausalLM(LlamaForCausalLM(config))


def supervise(
    lm: CausalLM,
    tokenizer: Any,
    demonstrations: Sequence[tuple[Sum, str]],
    *,
    batch_size: int = BATCH,
    learning_rate: float = 2e-3,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Make one pass of supervised learning over the demonstrations, in their order, with AdamW. The learning
    rate rises during the first 20 steps and falls during the last 30 % of the steps.

    Args:
        report: called with (step, loss) after each step. The loss is the mean over the tokens of the
            demonstrated responses, in nats.
    """
    prompts, answers, mask = _token_ids(tokenizer, demonstrations)
    steps = len(demonstrations) // batch_size
    optimiser = torch.optim.AdamW(
        lm.module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        rows = slice(step * batch_size, (step + 1) * batch_size)
        inputs = torch.cat([prompts[rows], answers[rows]], dim=1)[:, :-1]
        logits = lm.head(lm.hidden(inputs)[:, prompts.shape[1] - 1 :])
        loss = torch.nn.functional.cross_entropy(logits[mask[rows]], answers[rows][mask[rows]])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.module.parameters(), 1.0)
        optimiser.step()
        report(step + 1, loss.item())


def _token_ids(
    tokenizer: Any, demonstrations: Sequence[tuple[Sum, str]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three tensors with one row per demonstration: the ids of the prompt; the ids of the answer and
    its end of text, padded on the right; and a mask that is True for an answer's tokens, False for padding.
    All prompts have equal lengths."""
    renderer = Renderer(tokenizer, template=None)
    prompt_ids = {s.prompt: renderer.prompt([Message("user", s.prompt)]).tolist() for s, _ in demonstrations}
    answer_ids = {shown: renderer.response(shown).tolist() for _, shown in demonstrations}
    padded = {
        shown: ids + [tokenizer.pad_token_id] * (MAX_NEW_TOKENS - len(ids))
        for shown, ids in answer_ids.items()
    }
    prompts = torch.tensor([prompt_ids[s.prompt] for s, _ in demonstrations])
    answers = torch.tensor([padded[shown] for _, shown in demonstrations])
    return prompts, answers, answers != tokenizer.pad_token_id
