"""Of a tokenizer's files, one chat template is used. The others are said, and files for other versions of
transformers are refused."""

import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tiny_models import build_tokenizer

from oat.errors import ModelError, OatWarning, TemplateError
from oat.models.loading import load_tokenizer
from oat.text.templates import load_template

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
