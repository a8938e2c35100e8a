"""An exported model is compared, as transformers reads it back, with the model that was written."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import World, forked, logged, oat
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCAB_ROWS, build_config, build_tokenizer, save_model
from transformers import AutoModelForCausalLM, YoutuConfig

from oat.models.loading import load_lm, save_module
from oat.models.read_back import Compared, Facts, compare, facts

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def youtu(rows: int = VOCAB_ROWS, **changes: Any) -> YoutuConfig:
    """Return a model of which transformers loads the padding id's row of the embeddings as zeros."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    more = {"num_key_value_heads": 2, "v_head_dim": 8, "max_position_embeddings": 64}
    return YoutuConfig(vocab_size=rows, **{**shape, **heads, **ids, **more, **changes})


def read(folder: Path) -> tuple[Any, Mapping[str, torch.Tensor]]:
    module = AutoModelForCausalLM.from_pretrained(folder)
    return module, module.state_dict()


def written(module: Any, folder: Path) -> Facts:
    """Move all weights away from where a new model has them, and write the model."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
    noted = facts(module)
    save_module(module, build_tokenizer(), str(folder))
    return noted


def compared(noted: Facts, folder: Path, free_bytes: int | None = None) -> Compared:
    return compare(noted, [folder / WEIGHTS], partial(read, folder), free_bytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_reads_back_as_it_was(family: str, dtype: str, tmp_path: Path) -> None:
    lm = load_lm(save_model(tmp_path / "start", build_config(family)), dtype=dtype)
    noted = written(lm.module, tmp_path / "out")
    found = compared(noted, tmp_path / "out")
    assert (found.lost, found.misread, found.no_pass) == ([], {}, "")
    assert found.count == found.total == len(lm.module.state_dict())
    assert found.gap is not None
    assert not found.is_other
    short = compared(noted, tmp_path / "out", free_bytes=noted.bytes)
    in_both = lm.module.state_dict().keys() & load_file(tmp_path / "out" / WEIGHTS).keys()
    tied = {name for name, names in noted.aliases.items() if in_both & {*names}}
    assert (short.lost, short.gap, short.count) == ([], None, len(in_both | tied))
    assert f"{noted.bytes:,} are free" in short.no_pass


def one_bit(tensors: Tensors) -> None:
    name = sorted(tensors)[-1]
    tensors[name].view(torch.uint8).reshape(-1)[0] ^= 1


def one_missing(tensors: Tensors) -> None:
    tensors.pop(sorted(tensors)[-1])


def another_shape(tensors: Tensors) -> None:
    name = next(name for name in sorted(tensors) if tensors[name].ndim == 1)
    tensors[name] = tensors[name][:-1].clone()


def another_type(tensors: Tensors) -> None:
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].half()


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("harm", [one_bit, one_missing, another_shape, another_type])
def test_a_tensor_that_the_files_do_not_hold_is_lost(
    harm: Callable[[Tensors], None], is_short: bool, tmp_path: Path
) -> None:
    """It is found where the model is read, and from the files alone. Reading may also fail, or convert."""
    lm = load_lm(save_model(tmp_path / "start", build_config("llama")))
    noted, out = written(lm.module, tmp_path / "out"), tmp_path / "out"
    tensors = load_file(out / WEIGHTS)
    harm(tensors)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    try:
        found = compared(noted, out, free_bytes=0 if is_short else None)
    except Exception:
        assert harm is another_shape
        return
    if harm is one_missing and is_short:
        assert found.count == found.total - 1
    elif harm is another_type and not is_short:
        assert found.is_other or found.lost, "rounded to half precision"
    else:
        assert len(found.lost) == 1


def test_another_configuration_makes_another_pass(tmp_path: Path) -> None:
    lm = load_lm(save_model(tmp_path / "start", build_config("llama")))
    noted, out = written(lm.module, tmp_path / "out"), tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    (out / "config.json").write_text(json.dumps(config))
    found = compared(noted, out)
    assert (found.lost, found.misread) == ([], {})
    assert found.is_other


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_transformers_reads_wrongly_is_no_loss(is_tied: bool, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_config(youtu(tie_word_embeddings=is_tied)).eval()
    found = compared(written(module, tmp_path), tmp_path)
    assert found.lost == []
    head = {"lm_head.weight"} if is_tied else set()
    assert found.misread.keys() == {"model.embed_tokens.weight", *head}
    row = module.get_input_embeddings().weight[0].abs().max().item()
    assert found.misread["model.embed_tokens.weight"] == pytest.approx(row)


def test_an_export_that_transformers_reads_wrongly_is_said(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    rows = json.loads((world.folder / "model" / "config.json").read_text())["vocab_size"]
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(world.folder / "model").save_pretrained(start)
    torch.manual_seed(0)  # of some weights, no response has the padding id, whose row then does not learn
    AutoModelForCausalLM.from_config(youtu(rows)).save_pretrained(start)
    changes = {"model.path": str(start), "evaluation": None, "stop.max_steps": 1}
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    capsys.readouterr()
    with pytest.warns(
        UserWarning, match=r"reads lm_head.weight by .*, model.embed_tokens.weight by .* otherwise"
    ):
        assert oat("export", tmp_path / "grpo", tmp_path / "out") == 0
    said = capsys.readouterr().out.splitlines()[-1].removeprefix("oat export: ")
    assert "2 of them in the files only" in said
    assert said in (tmp_path / "out" / "README.md").read_text()
    held = load_file(tmp_path / "out" / WEIGHTS)["model.embed_tokens.weight"]
    assert held[0].abs().max() > 0


def test_a_file_that_changes_before_it_is_read_back_ends_the_export(world: World, tmp_path: Path) -> None:
    """A bit of the written weights turns round, as on a bad disk. Nothing is left under the final name."""
    config = world.config("dpo", tmp_path, {"evaluation": None, "stop.max_steps": 1})
    assert logged(tmp_path / "log", "train", config) == 0
    turned = []

    def turn(event: str, arguments: tuple[Any, ...]) -> None:
        if turned or event != "open" or not str(arguments[0]).endswith("/new/config.json"):
            return
        file = Path(str(arguments[0])).with_name(WEIGHTS)
        if arguments[1] == "r" and file.exists():
            turned.append(file)
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)

    def action() -> int:
        sys.addaudithook(turn)
        code = oat("export", tmp_path / "dpo", tmp_path / "out")
        assert turned
        return code

    log = tmp_path / "export.log"
    assert forked(action, log) == 1
    assert "does not read back as it was" in log.read_text()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".oat-*"))
