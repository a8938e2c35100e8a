"""A tiny model of about twenty thousand random weights, and a real run that trains it in seconds.

The run is started through the command line, so it reads its settings as a user's run does.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oat.errors import ContractError
from oat.rundir.mark import is_run
from oat.rundir.rows import read_metrics

END = "<end>"


def write_tiny_model(folder: Path, characters: str, *, seed: int = 0, width: int = 32) -> None:
    """Write a Llama with random weights and its tokenizer into a folder. The tokenizer has one token per
    character, and one for the end of text. A sequence may have at most 128 tokens.

    Args:
        characters: all characters that prompts and responses may have.
        width: the hidden size, a multiple of 16.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: id for id, token in enumerate([END, *dict.fromkeys(characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    shape = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "max_position_embeddings": 128,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(
            LlamaConfig(vocab_size=len(vocabulary), eos_token_id=vocabulary[END], **shape)
        ).save_pretrained(folder)


def tiny_run(
    config: str,
    prompts: Iterable[str | Mapping[str, Any]],
    *,
    characters: str = "",
    flags: Sequence[str] = (),
    folder: Path | None = None,
) -> list[dict[str, float]]:
    """Train a tiny model with random weights by `oat train`, on one thread. A test can use this to show that
    a run can use a part, and that the model learns with it.

    Args:
        config: the text of a YAML file without `model`, `prompts.path` and `run_dir`.
        prompts: texts, or records with a `prompt`. Oracles get the further columns of a record.
        characters: characters that a response may have in addition to the characters of the prompts.
        flags: flags of the command line, which override the configuration.
        folder: the folder to which `model`, `prompts.jsonl`, `config.yaml` and `run` are written; None: a new
            temporary folder, which is not removed. If the folder has a run in `run`, it is continued.

    Returns:
        The rows of the run's `metrics.jsonl`. The first row describes the model before the first step.

    Raises:
        ContractError: the run ended with an error, which it printed; or the folder has other files of these
            names, which are not replaced.
    """
    from oat.cli import main

    folder = Path(tempfile.mkdtemp(prefix="oat-")) if folder is None else folder
    there = [name for name in ("model", "prompts.jsonl", "config.yaml") if (folder / name).exists()]
    if there and not is_run(folder / "run"):
        raise ContractError(f"{folder} has {', '.join(there)}, which would be replaced; give an empty folder")
    records = [{"prompt": prompt} if isinstance(prompt, str) else dict(prompt) for prompt in prompts]
    write_tiny_model(folder / "model", "".join(str(record["prompt"]) for record in records) + characters)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    places = {
        "model.path": folder / "model",
        "prompts.path": folder / "prompts.jsonl",
        "run_dir": folder / "run",
    }
    own = [
        word
        for name, value in {**places, "compute.threads": 1, "engine.threads": 1}.items()
        for word in (f"--{name}", str(value))
    ]
    code = main(["train", str(folder / "config.yaml"), *own, *flags])
    if code != 0:
        raise ContractError(
            f"the run in {folder} ended with exit code {code} (docs/exit-codes.md); do what its message "
            "above says"
        )
    return read_metrics(folder / "run" / "metrics.jsonl")
