"""docs/names.md: made from the tables of names, with a script of TRL's that is ported as they say."""

import ast
import contextlib
import re
from typing import Any

import names_page

from oat.config.peers.copied import tree_of
from oat.config.peers.theirs import trl_fields
from oat.config.peers.translated import settings_of, translated
from oat.config.yaml_text import Loader

KINDS = ("py", "python", "yaml")
LEARNED_BY_DEFAULT = (
    ("TrainingArguments", "lr_scheduler_type"),
    ("TrainingArguments", "adam_beta2"),
    ("GRPOConfig", "loss_type"),
)


def keywords(code: str, call: str) -> dict[str, Any]:
    """Return the arguments of a call that are literals."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (found,) = (each for each in calls if ast.unparse(each.func).endswith(call))
    given = {}
    for keyword in found.keywords:
        with contextlib.suppress(ValueError):
            given[keyword.arg] = ast.literal_eval(keyword.value)
    return given


def test_the_page_of_names_is_made_from_the_tables() -> None:
    assert names_page.PAGE.read_text(encoding="utf-8") == names_page.page(), "run: python tests/names_page.py"


def test_the_ported_script_is_what_the_tables_say() -> None:
    """The settings of TRL's script on the page, and TRL's defaults beside them, are those of both of ours."""
    page = names_page.PAGE.read_text(encoding="utf-8")
    theirs, python, file = (re.search(rf"^```{kind}\n(.*?)^```", page, re.S | re.M)[1] for kind in KINDS)
    fields = trl_fields()
    given = keywords(theirs, "GRPOConfig")
    defaults = {name: fields[cls][name]["default"] for cls, name in LEARNED_BY_DEFAULT}
    ours = settings_of([((name,), value) for name, value in {**defaults, **given}.items()], "grpo")
    expected = tree_of(ours)
    written = keywords(python, "oat.Trainer")
    assert {name: written[name] for name in expected} == expected
    assert written["model"] == {"path": "quickstart/start", "lora": {"rank": 8, "alpha": 16}}
    as_file = Loader(file).get_data()
    assert {name: as_file[name] for name in expected} == expected
    assert as_file["model"] == written["model"]
    said = translated("run.yaml:1", [(("beta",), 0.1), (("delta",), 1.0)], "grpo")
    (anchor,) = re.findall(r"names\.md#(\S+)", said)
    heads = re.findall(r"^## (.*)$", page, re.M)
    assert anchor in [re.sub(r"[^a-z -]", "", head.lower()).replace(" ", "-") for head in heads]
