"""Runs with tools: their parser and the chat template must fit, and no tool ends a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from call_templates import template
from chats import save_byte_level
from fixtures import oat

from oat.rundir.rows import read_metrics

ENVIRONMENT = """
from oat.environments.base import Turn
from oat.environments.tools import ToolCall, Tools, bracket_calls, json_calls, template_calls


def total(numbers: list[int]) -> int:
    return sum(numbers)


def broken(numbers: str) -> int:
    if len(numbers) % 2:
        raise SystemExit(numbers)
    return numbers + 1


def own(text):
    return []


def every(text):
    return [ToolCall("total", {"numbers": text}), ToolCall("broken", {"numbers": text})]


class Total:
    def __init__(self, parse=None):
        chosen = {"parse": globals()[parse]} if parse else {}
        self.tools = Tools([total, broken], role="user", **chosen)

    def reset(self, prompt, generator):
        return {"left": 1}

    def step(self, state, response):
        if not state["left"]:
            return Turn(state, None, reward=float(len(response) % 3))
        answered = self.tools.answer(response)
        return Turn({"left": 0}, answered.message if answered else None, reward=float(len(response) % 2))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = save_byte_level(folder, specials=["<|endoftext|>", "<u>", "<a>", "<e>"])
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape)
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes the configuration of a run with `Total` and a template, and returns its
    path."""
    monkeypatch.chdir(tmp_path)
    Path("total.py").write_text(ENVIRONMENT)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abcdefgh"))

    def write(source: str, parse: str | None = None) -> Path:
        Path("chat.jinja").write_text(source)
        settings: dict[str, Any] = {
            "run_dir": "run",
            "model": {"path": str(model)},
            "prompts": {"path": "prompts.jsonl"},
            "render": {"template": "chat.jinja"},
            "sampling": {"max_new_tokens": 4, "environment": {"name": "total.py:Total"}},
            "oracle": {"name": "environment"},
            "algorithm": {"name": "grpo", "prompts": 2, "samples": 4},
            "compute": {"threads": 1},
            "stop": {"max_steps": 1},
        }
        if parse is not None:
            settings["sampling"]["environment"]["parse"] = parse
        Path("run.yaml").write_text(yaml.safe_dump(settings))
        return Path("run.yaml")

    return write


UNKNOWN = template("hermes").replace("tool_call>", "calling>")
"""A template that writes calls in a form of nobody's."""
LATER = "{% elif loop.index > 1 %}"
SILENT = template("hermes").replace("{% else %}", LATER + "{% else %}")
"""A template that does not write a message behind a response."""
WRITES = "the chat template writes a call of a tool as '<call"


@pytest.mark.parametrize(
    ("source", "parse", "code", "words"),
    [
        (template("hermes"), None, 0, ""),
        (template("mistral 11"), None, 0, ""),
        (template("hermes"), "json_calls", 0, ""),
        (UNKNOWN.replace("tool_calls", "no_calls"), None, 0, ""),
        (UNKNOWN, None, 2, f"sampling.environment is 'total.py:Total': {WRITES}"),
        (UNKNOWN, "own", 0, f"reads calls by own, and {WRITES}"),
        (template("mistral 11"), "json_calls", 0, "does not read; template_calls reads it"),
        (SILENT, None, 2, "results are messages of the role user, and the chat template writes nothing"),
    ],
)
def test_a_template_and_a_parser_that_do_not_fit_are_told(
    config: Callable[..., Path],
    capsys: Any,
    recwarn: pytest.WarningsRecorder,
    source: str,
    parse: str | None,
    code: int,
    words: str,
) -> None:
    assert oat("check", config(source, parse)) == code
    said = " ".join([capsys.readouterr().err, *(str(each.message) for each in recwarn)])
    assert words in said
    assert words or "writes a call of a tool" not in said


@pytest.mark.parametrize(("form", "code"), [("hermes", 2), ("kimi", 0)])
def test_results_by_id_need_calls_with_ids(
    config: Callable[..., Path], capsys: Any, form: str, code: int
) -> None:
    """A template writes the id of a call beside its result, and it would be empty."""
    by_id = "{% elif m.role == 'tool' %}<u>{{ m.tool_call_id }}: {{ m.content }}<e>{% else %}"
    path = config(template(form).replace("{% else %}", by_id))
    Path("total.py").write_text(ENVIRONMENT.replace('role="user"', 'role="tool"'))
    assert oat("check", path) == code
    assert ("(`tool_call_id`)" in capsys.readouterr().err) == (code == 2)


@pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")
def test_a_run_goes_on_whatever_tools_get_and_do(config: Callable[..., Path]) -> None:
    """Each response calls a tool with text where it takes a list, and one that fails by a fault of its own.
    A second, equal run has equal metrics. It goes on although a new run would now be refused."""
    rows = []
    for run in ("run", "again"):
        assert oat("train", config(UNKNOWN, "every"), "--run_dir", run) == 0
        rows.append(read_metrics(Path(run) / "metrics.jsonl")[-1])
    assert [row["episode/broken_calls"] for row in rows] == [8.0, 8.0]
    same = [{name: row[name] for name in row if not name.startswith(("time/", "roofline/"))} for row in rows]
    assert same[0] == same[1]
    Path("total.py").write_text(ENVIRONMENT.replace("globals()[parse]", "template_calls"))
    assert oat("check", "run.yaml", "--run_dir", "new") == 2
    assert oat("check", "run.yaml", "--stop.max_steps", "2", "--accept-changed", "reward") == 0
