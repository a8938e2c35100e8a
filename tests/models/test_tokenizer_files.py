"""Of a tokenizer's files, one chat template and one end-of-text are used. The others are said, and files for
other versions of transformers are refused. Nothing that is left from a tokenizer's training is used."""

import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tokenizer
from tokenizers_of_all_kinds import save_kind

from oat.errors import ModelError, OatWarning, TemplateError
from oat.models.beside import has_dropout, other_ids
from oat.models.identity import are_same, tokenizer_identity
from oat.models.loading import load_tokenizer
from oat.text.chat_template import load_template

TEMPLATES: Mapping[str, tuple[Any, str, bool]] = {
    "the same": ("one", "one", False),
    "another": ("two", "one", True),
    "the same, in a list": ([{"name": "default", "template": "one"}], "one", False),
    "another, in a list": ([{"name": "default", "template": "two"}], "one", True),
    "one for tools": (
        [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}],
        "",
        True,
    ),
    "none by default": (
        [{"name": "rag", "template": "one"}, {"name": "tool_use", "template": "two"}],
        "",
        False,
    ),
    "a file for tools": ("one", "tool_use", True),
    "a file for processors": ("one", "chat_template.json", True),
}
"""Of each case: the field `chat_template`; the text of chat_template.jinja, or the name of a further file;
whether a template is said not to be used."""


@pytest.mark.parametrize("case", TEMPLATES)
def test_chat_templates_that_are_not_used_are_said(tmp_path: Path, case: str) -> None:
    field, more, is_said = TEMPLATES[case]
    build_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": field}))
    (tmp_path / "additional_chat_templates").mkdir()
    if more == "tool_use":
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    if more == "chat_template.json":
        (tmp_path / more).write_text(json.dumps({"chat_template": "two"}))
    if more in ("one", "tool_use"):
        (tmp_path / "chat_template.jinja").write_text("one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = load_tokenizer(str(tmp_path))
    assert any(each.category is OatWarning for each in caught) == is_said
    if case == "none by default":
        with pytest.raises(TemplateError, match=r"rag, tool_use"):
            load_template("tokenizer", made)
    else:
        assert load_template("tokenizer", made) == "one"


def test_a_tokenizer_for_other_versions_is_refused(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "tokenizer.4.0.0.json")
    file = tmp_path / "tokenizer_config.json"
    for names, is_refused in ((["tokenizer.json"], False), (["tokenizer.4.0.0.json"], True)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "fast_tokenizer_files": names}))
        with pytest.raises(ModelError, match="fast_tokenizer_files") if is_refused else nullcontext():
            load_tokenizer(str(tmp_path))


def rewrite(file: Path, **fields: Any) -> None:
    """Change fields of a file of JSON; those that are None are removed."""
    found = {**(json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}), **fields}
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def warned(folder: Path) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = load_tokenizer(str(folder))
    return tokenizer, [str(each.message) for each in caught if each.category is OatWarning]


@pytest.mark.parametrize("kind", ["byte-level", "Metaspace first, split"])
@pytest.mark.parametrize("dropout", [0.0, 0.5, 1.0])
def test_a_text_has_the_same_ids_each_time(tmp_path: Path, kind: str, dropout: float) -> None:
    text = "the sky is blue, and the cat is on the mat " * 8
    save_kind(kind, tmp_path)
    plain, _ = warned(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    rewrite(tmp_path / "tokenizer.json", model={**model, "dropout": dropout})
    made, said = warned(tmp_path)
    assert {tuple(made(text)["input_ids"]) for _ in range(4)} == {tuple(plain(text)["input_ids"])}
    assert len(said) == has_dropout(str(tmp_path)) == (dropout > 0)
    recorded = tokenizer_identity(plain)
    recorded["tokenizer.json"]["model.dropout"] = dropout
    assert are_same(recorded, tokenizer_identity(made)), "a run that was begun with it goes on"


ENDS: Mapping[str, tuple[Any, Any, Any, bool]] = {
    "the same": ("</s>", "</s>", "</s>", False),
    "a dict": ({"content": "</s>"}, "</s>", "</s>", False),
    "no file": (None, "</s>", "</s>", False),
    "another": ("<|user|>", "</s>", "</s>", True),
    "another, in a dict": ({"content": "<|user|>"}, {"content": "</s>"}, "</s>", True),
    "another than the model's": ("<|user|>", None, "</s>", True),
    "one of the model's": ("<|user|>", None, ["</s>", "<|user|>"], False),
    "no model": ("<|user|>", None, None, False),
    "the tokenizer's own": ("<|user|>", "<|user|>", "</s>", False),
}
"""Of each case: `eos_token` in special_tokens_map.json and in tokenizer_config.json; the end-of-text
by config.json; whether it is said that they contradict each other."""


@pytest.mark.parametrize("case", ENDS)
def test_an_end_of_text_that_is_left_over_is_said(tmp_path: Path, case: str) -> None:
    of_map, of_tokenizer, of_model, is_said = ENDS[case]
    made = save_kind("byte-level", tmp_path)
    ends = None if of_model is None else made.convert_tokens_to_ids(of_model)
    rewrite(tmp_path / "tokenizer_config.json", eos_token=of_tokenizer, added_tokens_decoder=None)
    rewrite(tmp_path / "special_tokens_map.json", eos_token=of_map)
    rewrite(tmp_path / "config.json", model_type="llama", eos_token_id=ends)
    _, said = warned(tmp_path)
    assert [("eos_token" in text, "</s>" in text, "<|user|>" in text) for text in said] == [
        (True,) * 3
    ] * is_said


@pytest.mark.parametrize(
    ("name", "is_other"),
    [(None, False), ("PreTrainedTokenizerFast", False), ("GPT2Tokenizer", False), ("Qwen2Tokenizer", True)],
)
def test_a_class_that_encodes_otherwise_is_found(tmp_path: Path, name: str | None, is_other: bool) -> None:
    save_kind("byte-level", tmp_path, begins=False)
    rewrite(tmp_path / "tokenizer_config.json", tokenizer_class=name, backend=None)
    found = other_ids(load_tokenizer(str(tmp_path)))
    assert bool(found) == is_other
    assert all(ids != theirs for _, ids, theirs in found)
