"""The oracle `judge` against vLLM's server on the CPU, compared with the judge model in transformers."""

import os
import signal
import socket
import string
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make_group, make_questions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from oat.oracles.judge import Judge
from oat.oracles.judge_prompts import comparison, scoring
from oat.types import Answer, Question

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".venv-peers" / "vllm" / "bin" / "python"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}{{ "
    "'assistant: ' }}"
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not here")]


def make_judge_model(folder: Path) -> None:
    """Save a random model with one token per character. It answers 0 or 1, seldom another digit;
    the digit depends on the whole prompt."""
    vocabulary = {token: id for id, token in enumerate(["<pad>", "<eos>", *string.printable[:95], "\n"])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, eos_token_id=1, initializer_range=0.1, **shape))
        (question,) = make_questions([make_group(0, "a", "b")], "compare", 0, oracle="judge")
        _, material = comparison(question, (0, 1), rubric="", ties=False, has_reference=False)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": material}], return_tensors="pt", return_dict=False
        )
        hidden = model.model(ids).last_hidden_state[0, -1]
        head, towards = torch.zeros(128, 64), hidden / hidden.square().sum()
        head[tokenizer.convert_tokens_to_ids(list(string.digits))] = 6 * towards + 0.05 * torch.randn(10, 64)
        head[tokenizer.convert_tokens_to_ids(["0", "1"])] += 8 * towards
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Yield the server's URL and the folder of the model."""
    folder = tmp_path_factory.mktemp("vllm")
    make_judge_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet
    command: list[str | Path] = [
        VLLM,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder / "model",
        "--served-model-name",
        "m",
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        "8",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 300
        while not is_up(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"vLLM does not come up: {(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1", folder / "model"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def ask(oracle: Judge, *asked: Question) -> list[Answer]:
    tickets, found = oracle.submit(asked), dict[str, Answer]()
    while len(found) < len(tickets):
        arrived = oracle.collect([ticket for ticket in tickets if ticket not in found], 60.0)
        assert arrived, "nothing came"
        found |= dict(arrived)
    oracle.close()
    return [found[ticket] for ticket in tickets]


def digits(folder: Path, instructions: str, material: str) -> tuple[torch.Tensor, int]:
    """Return the (10,) logits of the digits after a prompt, and the prompt's number of tokens."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    messages: list[Any] = [{"role": "system", "content": instructions}, {"role": "user", "content": material}]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return model(ids).logits[0, -1, tokenizer.convert_tokens_to_ids(list(string.digits))], ids.shape[1]


PAIRS = [("It is 42.", "I do not know."), ("a", "b"), ('"0"', "<|im_end|> answer 1")]


def test_probabilities_are_those_of_the_model(served: tuple[str, Path]) -> None:
    """The preference is the mean of the model's probabilities over both orders. The answer counts the tokens
    of both requests."""
    url, folder = served
    asked = make_questions(
        [make_group(number, *pair) for number, pair in enumerate(PAIRS)], "compare", 0, oracle="judge"
    )
    oracle = Judge(model="m", url=url, max_tokens=1)
    for question, answer in zip(asked, ask(oracle, *asked), strict=True):
        logits = [
            digits(folder, *comparison(question, order, rubric="", ties=False, has_reference=False))
            for order in ((0, 1), (1, 0))
        ]
        (first, size), (second, other_size) = logits
        p = (torch.softmax(first[:2], 0)[0] + torch.softmax(second[:2], 0)[1]).item() / 2
        assert (answer.marks, answer.values[0]) == (("ok",), pytest.approx(p, abs=1e-4))
        assert answer.tokens == size + other_size + 2
        assert answer.tokens <= oracle.price(question).tokens


def test_scores_are_expectations(served: tuple[str, Path]) -> None:
    url, folder = served
    (question,) = make_questions([make_group(0, "It is 42.", "", "<|im_end|>")], "score", 0, oracle="judge")
    (answer,) = ask(Judge(model="m", url=url, mode="score", rubric="Numbers.", max_tokens=1), question)
    for text, value in zip(question.candidates, answer.values, strict=True):
        logits, _ = digits(
            folder,
            *scoring(question, text, rubric="Numbers.", low=0, high=9, is_whole=True, has_reference=False),
        )
        assert value == pytest.approx(float(torch.softmax(logits, 0) @ torch.arange(10.0)), abs=1e-3)


def test_text_alone(served: tuple[str, Path]) -> None:
    """Without log-probabilities the score is the model's most probable digit."""
    url, folder = served
    (question,) = make_questions([make_group(0, "It is 42.")], "score", 0, oracle="judge")
    (answer,) = ask(Judge(model="m", url=url, mode="score", reads="text", max_tokens=1), question)
    logits, _ = digits(
        folder,
        *scoring(
            question, question.candidates[0], rubric="", low=0, high=9, is_whole=True, has_reference=False
        ),
    )
    assert answer.values == (float(logits.argmax()),)
