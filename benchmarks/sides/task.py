"""What both sides of a benchmark work on: the model, the prompts, and the lines in which a side is asked and
answers.

Imported by every side in its own environment, so it needs numpy and torch, and transformers only to make the
model.
"""

import ctypes
import gc
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np

END = 2
"""Id of the end-of-text."""
RATE = 1e-7
"""Learning rate at which the weights, and with them the lengths of responses, stay what they are."""
SIZES = {"5M": (4096, 256, 4), "50M": (16384, 512, 10), "tiny": (256, 32, 2), "150k": (151_936, 256, 4)}
"""Vocabulary, width and layers. Phi's architecture: its head has a bias, and all sides have it."""


def make_model(size: str, directory: Path, vocabulary: int | None = None) -> None:
    """Random weights, and an end-of-text whose probability is 1 / 32 at every step but for a few thousandths:
    its row of the head is zero, its bias makes up for the mean logsumexp of the others."""
    import torch
    from transformers import PhiConfig, PhiForCausalLM

    rows, width, layers = SIZES[size]
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=vocabulary or rows,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=2048,
        hidden_act="gelu",
        bos_token_id=1,
        eos_token_id=END,
        tie_word_embeddings=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_dropout=0.0,
    )
    model = PhiForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[END] = 0
        model.lm_head.bias.zero_()
        logits = model(torch.randint(3, vocabulary or rows, (16, 48))).logits
        logits[..., END] = -math.inf
        model.lm_head.bias[END] = logits.logsumexp(-1).mean() - math.log(31)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocabulary or rows)


def prompts(count: int, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts of 16 to 64 random tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocabulary, generator.integers(16, 65)) for _ in range(count)]


def ragged(
    rows: int, vocabulary: int, *, mean: int = 128, cap: int = 1024, seed: int = 0
) -> list[np.ndarray]:
    """Responses of geometric lengths."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, vocabulary, min(int(generator.geometric(1 / mean)), cap)) for _ in range(rows)
    ]


def pairs(
    count: int, vocabulary: int, *, mean: int = 128, cap: int = 1024, seed: int = 0
) -> list[dict[str, str]]:
    """Recorded preferences: prompts, and two responses of geometric lengths to each, as texts that go on from
    their prompt."""
    responses = ragged(2 * count, vocabulary, mean=mean, cap=cap, seed=seed)
    return [
        {
            "prompt": text(prompt),
            "chosen": " " + text(responses[2 * number]),
            "rejected": " " + text(responses[2 * number + 1]),
        }
        for number, prompt in enumerate(prompts(count, vocabulary, seed))
    ]


def digest(rows: Iterable[Sequence[int]]) -> str:
    """Of token ids, in any order of the rows: both sides learn from the same tokens where these are equal."""
    lines = sorted(" ".join(str(int(number)) for number in ids) for ids in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Token i from 3 on is the word `t` and i; nothing is added to a text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unknown>", "<end>", *(f"t{number}" for number in range(3, vocabulary))]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<unknown>", "eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def text(ids: np.ndarray) -> str:
    return " ".join(f"t{number}" for number in ids)


def reward(response: str) -> float:
    """Of a response's text, for both sides."""
    return len(response) % 7 / 7


class Memory:
    """The memory of this process when the object is made, and the most of it since the newest such object was
    made; 10^9 bytes."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = memory("VmRSS") / 1e9

    def peak_above(self, level: "Memory | None" = None) -> float:
        """Most memory since, beyond what was held at the level; None: at this one."""
        return memory("VmHWM") / 1e9 - (level or self).before


def touch(module: Any) -> None:
    """Read every weight, so that a file that is mapped is in memory and counts as loaded."""
    for parameter in module.parameters():
        parameter.detach().sum()


def memory(name: str) -> int:
    """A line of this process's memory status, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


class Paced:
    """Work in a thread of its own that waits at every turn until it is asked on.

    Args:
        work: is called with `turn`, which it calls before its first piece and after each.
    """

    def __init__(self, work: Callable[[Callable[[], None]], object]):
        self.go, self.done = Queue(), Queue()
        self.thread = Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()
        self._wait()

    def step(self) -> float:
        """Seconds of one more piece."""
        begin = time.perf_counter()
        self.go.put(True)
        self._wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the work where it waits."""
        self.go.put(False)
        self.thread.join()

    def _wait(self) -> None:
        error = self.done.get()
        if error is not None:
            raise error

    def _run(self, work: Callable[[Callable[[], None]], object]) -> None:
        try:
            work(self._turn)
        except BaseException as error:
            self.done.put(error)

    def _turn(self) -> None:
        self.done.put(None)
        if not self.go.get():
            raise SystemExit


def serve(verbs: dict[str, Callable[..., Any]]) -> None:
    """Answer each line {"verb": ..., ...} of the standard input with a line of JSON, until it ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(verbs[command.pop("verb")](**command)) + "\n")
        answers.flush()
