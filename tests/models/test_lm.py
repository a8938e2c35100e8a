import json
import shutil

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT, FAMILIES, NUM_TOKENS, VOCAB_ROWS, build_config, build_tokenizer, save_model
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    PhimoeConfig,
    T5Config,
)

from oat.engines.cache_trial import page_bytes_of
from oat.errors import ModelError
from oat.models.causal_lm import checkpointing
from oat.models.loading import load_lm, load_tokenizer, save_lm


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {family: save_model(tmp_path_factory.mktemp(family), build_config(family)) for family in FAMILIES}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_hidden_is_the_model(paths, family):
    lm = load_lm(paths[family])
    ids = torch.randint(0, VOCAB_ROWS, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            lm.head(lm.hidden(ids)), lm.module(input_ids=ids).logits, atol=1e-6, rtol=0
        )
    assert (lm.vocab_rows, lm.context_length, lm.model_type, lm.device) == (
        VOCAB_ROWS,
        CONTEXT,
        family,
        torch.device("cpu"),
    )
    assert not lm.module.training
    assert {parameter.dtype for parameter in lm.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_has_no_dropout_and_gradients(paths, family):
    lm = load_lm(paths[family])
    ids = torch.randint(0, VOCAB_ROWS, (2, 7))
    evaluated = lm.hidden(ids)
    lm.module.train()
    trained = lm.hidden(ids)
    assert torch.equal(trained, evaluated)
    lm.head(trained).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in lm.module.parameters())


def phimoe(**noise):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": VOCAB_ROWS}
    return PhimoeConfig(**shape, sliding_window=None, attention_dropout=0.3, **noise)


def mixtral(**noise):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=4, vocab_size=VOCAB_ROWS, **noise)


@pytest.mark.parametrize("make", [phimoe, mixtral])
def test_experts_are_chosen_as_in_evaluation_also_with_checkpointed_gradients(tmp_path, make):
    """PhiMoE's `router_jitter_noise` is a threshold in evaluation mode too. In training mode its routers draw
    experts at random, and Mixtral's move their inputs at random; no router is ever in this mode."""
    lm = load_lm(save_model(tmp_path, make(router_jitter_noise=0.4), scale=20.0))
    ids = torch.randint(0, VOCAB_ROWS, (1, 24))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=ids).logits[0]

    def passed():
        hidden_TD, _ = lm.hidden_of([ids[0].numpy()])
        logits = lm.head(hidden_TD)
        logits.logsumexp(-1).sum().backward()
        found = [parameter.grad.clone() for parameter in lm.module.parameters()]
        lm.module.zero_grad()
        return [logits.detach(), *found]

    plain = passed()
    torch.testing.assert_close(plain[0], theirs.detach(), atol=1e-4, rtol=1e-4)
    lm.checkpoint_gradients()
    with checkpointing([lm.module]):
        training = [module for module in lm.module.modules() if module.training]
        assert len(training) == 2, "the layers, and nothing in them"
        checkpointed = passed()
    assert not any(module.training for module in lm.module.modules())
    for one, other in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("takes_layouts", [True, False])
def test_sequences_together_are_sequences_alone(paths, family, takes_layouts):
    lm = load_lm(paths[family])
    assert lm.takes_layouts
    lm.takes_layouts = takes_layouts
    sequences = [np.random.default_rng(length).integers(0, VOCAB_ROWS, length) for length in (6, 1, 9, 6)]
    hidden_TD, places = lm.hidden_of(sequences)
    assert len(hidden_TD) == (22 if takes_layouts else 36)
    for sequence, place in zip(sequences, places, strict=True):
        alone = lm.hidden(torch.from_numpy(sequence)[None])[0]
        torch.testing.assert_close(hidden_TD[place], alone, atol=2e-5, rtol=0)
        hidden_TD[place].square().sum().backward(retain_graph=True)
        found = [parameter.grad.clone() for parameter in lm.module.parameters() if parameter.grad is not None]
        lm.module.zero_grad()
        alone.square().sum().backward()
        expected = [
            parameter.grad.clone() for parameter in lm.module.parameters() if parameter.grad is not None
        ]
        lm.module.zero_grad()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_common_beginning_is_computed_once(paths, family):
    """Sequences with a common prefix are computed together, and values and gradients equal those of separate
    sequences. One sequence has no prefix, and one has a prefix of its own."""
    lm, generator = load_lm(paths[family]), np.random.default_rng(3)
    prompts = [generator.integers(0, VOCAB_ROWS, length) for length in (7, 4)]
    ends = [generator.integers(0, VOCAB_ROWS, length) for length in (3, 1, 5, 2, 6)]
    sequences = [
        np.concatenate([prompt, end])
        for prompt, end in zip([prompts[0], prompts[0], prompts[1], prompts[0]], ends, strict=False)
    ] + ends[4:]
    results = []
    for prefixes in ([7, 7, 4, 7, 0], None):
        hidden_TD, places = lm.hidden_of(sequences, prefixes)
        assert len(hidden_TD) == (7 + 4 + 17 if prefixes else 3 * 7 + 4 + 17)
        hidden = torch.cat([hidden_TD[place] for place in places])
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        results.append(
            (hidden, [parameter.grad for parameter in lm.module.parameters() if parameter.grad is not None])
        )
        lm.module.zero_grad()
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=0)
    for found, expected in zip(results[0][1], results[1][1], strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm() + 1e-7


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_read_by_transformers(paths, family, tmp_path):
    lm, tokenizer = load_lm(paths[family]), load_tokenizer(paths[family])
    with torch.no_grad():
        for parameter in lm.module.parameters():
            parameter.mul_(1.1)
    save_lm(lm, tokenizer, str(tmp_path))
    assert list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.bin"))
    ids = torch.randint(0, VOCAB_ROWS, (2, 9))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits.log_softmax(-1)
        torch.testing.assert_close(lm.head(lm.hidden(ids)).log_softmax(-1), theirs, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("hello") == tokenizer.encode("hello")


def test_tensors_are_the_parameters_with_tied_ones_once(paths):
    untied, tied = load_lm(paths["llama"]).tensors(), load_lm(paths["qwen3"]).tensors()
    assert "lm_head.weight" in untied
    assert "lm_head.weight" not in tied
    assert "model.embed_tokens.weight" in tied


def test_tokenizer_round_trip(paths):
    tokenizer = load_tokenizer(paths["llama"])
    assert len(tokenizer) == NUM_TOKENS
    assert tokenizer.decode(tokenizer.encode("so, what is 12?")) == "so, what is 12?"


def test_bfloat16(paths):
    lm = load_lm(paths["qwen3"], dtype="bfloat16")
    assert lm.head(lm.hidden(torch.tensor([[1, 2]]))).dtype == torch.bfloat16
    with pytest.raises(ModelError, match="did you mean `bfloat16`"):
        load_lm(paths["qwen3"], dtype="bfloat1")


def test_context_is_cut_to_a_sliding_window(tmp_path):
    config = MistralConfig(
        vocab_size=VOCAB_ROWS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=CONTEXT,
        sliding_window=16,
    )
    lm = load_lm(save_model(tmp_path, config))
    assert lm.context_length == 16
    ids = torch.randint(0, VOCAB_ROWS, (1, 16))
    with torch.no_grad():
        torch.testing.assert_close(
            lm.head(lm.hidden_of([ids[0].numpy()])[0]), lm.module(input_ids=ids).logits[0], atol=2e-5, rtol=0
        )


def test_a_model_without_sdpa_falls_back_to_eager(tmp_path):
    lm = load_lm(
        save_model(
            tmp_path, MptConfig(vocab_size=VOCAB_ROWS, d_model=32, n_layers=1, n_heads=4, max_seq_len=CONTEXT)
        )
    )
    assert lm.module.config._attn_implementation == "eager"
    assert not lm.takes_layouts
    assert len(lm.hidden_of([np.arange(5), np.arange(2)])[0]) == 10


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    config = CohereConfig(
        vocab_size=VOCAB_ROWS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    with pytest.raises(ModelError, match="logits of a `cohere` are not its head"):
        load_lm(save_model(tmp_path, config))


def test_weights_that_are_not_finite_are_refused(paths, tmp_path):
    lm = load_lm(paths["llama"])
    lm.module.get_output_embeddings().weight.data[3, 3] = torch.nan
    save_lm(lm, build_tokenizer(), str(tmp_path))
    with pytest.raises(ModelError, match="not finite"):
        load_lm(str(tmp_path))


@pytest.mark.parametrize("load", [load_lm, load_tokenizer])
class TestRefusals:
    def test_a_path_that_is_neither_directory_nor_hub_id(self, load, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for path in ("/no/such/place", "no-such-place", "a/b/c", "../x"):
            with pytest.raises(ModelError, match="give a local directory, or a hub id"):
                load(path)

    def test_a_file(self, load, paths):
        with pytest.raises(ModelError, match=r"is a file; give the directory"):
            load(paths["llama"] + "/config.json")

    @pytest.mark.usefixtures("offline")
    def test_a_hub_id_that_cannot_be_reached(self, load):
        with pytest.raises(
            ModelError, match=r"download it where there is a network .* HF_HOME .* HF_HUB_OFFLINE=1"
        ):
            load("no-such-org/no-such-model")

    def test_an_empty_directory(self, load, tmp_path):
        with pytest.raises(ModelError, match="save_pretrained"):
            load(str(tmp_path))

    def test_a_broken_config(self, load, tmp_path):
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ModelError, match=str(tmp_path)):
            load(str(tmp_path))


def edit_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def copied(paths, tmp_path):
    return shutil.copytree(paths["llama"], tmp_path / "model")


def test_a_directory_without_safetensors_is_refused(copied):
    weights = load_lm(str(copied)).module.state_dict()
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_lm(str(copied))
    torch.save(weights, copied / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_lm(str(copied))


def test_cut_weights_are_refused(copied):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        load_lm(str(copied))


def test_missing_tensors_are_refused(copied):
    edit_config(copied, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"lack 9 tensors, for example `model\.layers\.2"):
        load_lm(str(copied))


def test_weights_of_another_shape_are_refused(copied):
    edit_config(copied, intermediate_size=64)
    with pytest.raises(ModelError, match="has the shape"):
        load_lm(str(copied))


def test_code_that_comes_with_a_model_is_not_run(copied, tmp_path):
    mark = tmp_path / "ran"
    (copied / "custom.py").write_text(f"open({str(mark)!r}, 'w')")
    edit_config(
        copied,
        model_type="custom",
        auto_map={"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"},
    )
    with pytest.raises(ModelError):
        load_lm(str(copied))
    assert not mark.exists()


def test_another_kind_of_model_is_refused(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="`t5`, which is no causal language model"):
        load_lm(str(tmp_path))


def passes(do):
    """Count the passes through the backbone while `do` works."""
    seen = []
    handle = register_module_forward_hook(lambda part, *_: seen.append(type(part).__name__))
    try:
        do()
    finally:
        handle.remove()
    return seen.count("LlamaModel")


def test_what_the_code_can_do_is_tried_once_and_not_by_weights_of_0(tmp_path, monkeypatch):
    monkeypatch.setattr("oat.models.compatibility._takes_layouts", known := {})
    monkeypatch.setattr("oat.engines.cache_trial._page_bytes", pages := {})
    config = build_config("llama")

    def load(folder):
        lm = load_lm(folder)
        assert lm.takes_layouts
        assert page_bytes_of(lm) == page_bytes_of(lm) > 0

    blank = save_model(tmp_path / "blank", config)
    module = AutoModelForCausalLM.from_pretrained(blank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.save_pretrained(blank)
    load(blank)
    assert (known, pages) == ({}, {}), "with weights of 0, all ways give the same"

    real, other = save_model(tmp_path / "real", config), save_model(tmp_path / "other", config)
    first = passes(lambda: load(real))
    again = passes(lambda: load(other))
    assert (list(known.values()), again < first) == ([True], True)
    config.num_hidden_layers += 1
    assert passes(lambda: load(save_model(tmp_path / "deeper", config))) == first
    assert len(known) == len(pages) == 2


def test_weights_that_are_not_finite_are_refused_whatever_was_tried_before(tmp_path):
    path = save_model(tmp_path, build_config("llama"))
    load_lm(path)
    module = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    module.save_pretrained(path)
    with pytest.raises(ModelError, match="weights are not finite"):
        load_lm(path)
