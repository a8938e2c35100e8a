"""The common code of all sides of a benchmark: the model, the prompts, and the lines in which a side is asked
and answers.

Every side imports this file in its own environment, so the file needs only numpy, torch and transformers.
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
"""Learning rate. It is so small that the lengths of responses do not change."""
SIZES = {"5M": (4096, 256, 4), "50M": (16384, 512, 10), "tiny": (256, 32, 2), "150k": (151_936, 256, 4)}
SIZES["500M"] = (32_768, 1280, 20)
"""Vocabulary, width and number of layers by size. The architecture is Phi: it has a bias on its head, and all
sides support it."""


def make_model(size: str, directory: Path, vocabulary: int | None = None, *, mean: int = 32) -> None:
    """Save a model with random weights and its tokenizer. The end-of-text has probability 1 / `mean` at every
    token, with an error of a few thousandths: its row of the head is zero, and its bias is computed from the
    mean logsumexp of the other tokens."""
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
        model.lm_head.bias[END] = logits.logsumexp(-1).mean() - math.log(mean - 1)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocabulary or rows)


def make_judge(folder: Path) -> None:
    """Save a sequence classifier in `folder/judge`: the backbone of the model in `folder/start`, with a
    random head of one label. It is a reward model, and the start of a critic."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "start", num_labels=1, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")


def prompts(count: int, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    """Return prompts of 16 to 64 random tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocabulary, generator.integers(16, 65)) for _ in range(count)]


def ragged(
    rows: int, vocabulary: int, *, mean: int = 128, cap: int = 1024, seed: int = 0
) -> list[np.ndarray]:
    """Return responses of geometric lengths."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, vocabulary, min(int(generator.geometric(1 / mean)), cap)) for _ in range(rows)
    ]


def pairs(
    count: int, vocabulary: int, *, mean: int = 128, cap: int = 1024, seed: int = 0
) -> list[dict[str, str]]:
    """Return recorded preferences as texts. Each prompt has two responses of geometric lengths; a response
    begins with a blank and continues its prompt."""
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
    """Return a digest of rows of token ids, which does not depend on the order of the rows. If the digests of
    both sides are equal, they learn from the same tokens."""
    lines = sorted(" ".join(str(int(number)) for number in ids) for ids in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer in which the token with id 3 or higher is the word `t` followed by the id, such as
    `t17`. The tokenizer adds no tokens to a text."""
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
    """Return the reward of a response's text. All sides use this reward."""
    return len(response) % 7 / 7


class Memory:
    """A measurement of this process's memory, in 10^9 bytes. A new object resets the peak.

    Attributes:
        before: resident memory when this object was made.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = memory("VmRSS") / 1e9

    def peak_above(self, level: "Memory | None" = None) -> float:
        """Return the peak of memory since the last reset, minus the level.

        Args:
            level: object that gives the level; None: this object.
        """
        return memory("VmHWM") / 1e9 - (level or self).before


def touch(module: Any) -> None:
    """Read every weight. Afterwards, a memory-mapped file of weights is in memory."""
    for parameter in module.parameters():
        parameter.detach().sum()


def memory(name: str) -> int:
    """Return a field of /proc/self/status in bytes, such as "VmRSS"."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


class Paced:
    """Work in a thread that pauses after each piece, until `step` asks for the next piece.

    Args:
        work: a function that does the work. It gets a function `turn`, and must call it before the first
            piece and after each piece.
    """

    def __init__(self, work: Callable[[Callable[[], None]], object]):
        self.go = Queue()
        self.done = Queue()
        self.thread = Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()
        self._wait()

    def step(self) -> float:
        """Let the thread do one piece of work, and return the seconds that the piece took."""
        begin = time.perf_counter()
        self.go.put(True)
        self._wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the thread at its present pause."""
        self.go.put(False)
        self.thread.join()

    def finish(self) -> None:
        """Let the thread do its last work, after its last piece."""
        self.go.put(True)
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
    """Answer each line of the standard input with a line of JSON, until the input ends.

    Args:
        verbs: function for each value of the field `verb` of a line; the other fields are its arguments.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(verbs[command.pop("verb")](**command)) + "\n")
        answers.flush()
