"""`oat generate`, `oat chat` and the table of `oat eval`: the responses of a run's policy, or of a model, to
given prompts."""

import fcntl
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fixtures import World, forked, kill_at, oat, write_jsonl
from terminal import in_a_terminal
from tiny_models import build_config, build_tokenizer, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from oat.answering.speaker import GenerationOptions, load_speaker
from oat.commands.chat import _certain
from oat.engines.decoding import Decoding
from oat.errors import ConfigError
from oat.reports.terminal import numbers_table
from oat.types import Message

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of GRPO, a run with an adapter, the exports of both, a run of a chat model,
    and that model."""
    folder = tmp_path_factory.mktemp("generate")
    common = {"learner.learning_rate": 0.05, "render.special_tokens": "keep"}
    assert oat("train", world.config("grpo", folder, common)) == 0
    adapter = {
        **common,
        "run_dir": str(folder / "lora"),
        "model.lora": {"rank": 4},
        "evaluation": None,
        "stop.max_steps": 1,
    }
    assert oat("train", world.config("dpo", folder, adapter)) == 0
    assert oat("export", folder / "grpo", folder / "exported") == 0
    assert oat("export", folder / "lora", folder / "adapter", "--adapter") == 0
    save_model(folder / "chatty", build_config("llama", context=256))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "chatty")
    write_jsonl(
        folder / "prompts.jsonl", [{"prompt": f"{a}+1=", "answer": "ab", "note": a} for a in range(6)]
    )
    return folder


@pytest.fixture
def generated(runs: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, object]]]:
    def run(model: str, *flags: object, prompts: Path | None = None) -> list[dict[str, object]]:
        capsys.readouterr()
        assert oat("generate", runs / model, "--prompts", prompts or runs / "prompts.jsonl", *flags) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def texts(rows: list[dict[str, object]]) -> list[object]:
    return [row["responses"] for row in rows]


def greedy(model: Path, prompt: str) -> str:
    """Return the greedy response of transformers itself."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = lm.generate(
        ids,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=[len(tokenizer), len(tokenizer) + 1],
    )
    ends = set(np.ravel(lm.generation_config.eos_token_id).tolist())
    return str(tokenizer.decode([id for id in found[0, ids.shape[1] :].tolist() if id not in ends]))


def test_a_run_says_what_its_exported_model_says(
    runs: Path, generated: Callable[..., list[dict[str, object]]]
) -> None:
    """`oat generate` samples the newest policy of a run, or the policy of a given step, with the settings of
    training. The responses equal those of the exported model and differ from those of the start model."""
    rows = generated("grpo", "--n", 3)
    assert [row["prompt"] for row in rows] == [f"{a}+1=" for a in range(6)]
    assert all(len(row["responses"]) == len(row["finish"]) == 3 for row in rows)
    assert {end for row in rows for end in row["finish"]} == {"stop", "length"}
    assert [(row["reference"], row["columns"]) for row in rows] == [
        ("ab", {"answer": "ab", "note": a}) for a in range(6)
    ]
    said = [text.replace("<pad>", ".") for row in rows for text in row["responses"]]
    assert max(map(len, said)) == 4, "sampling.max_new_tokens of the run"
    assert texts(rows) == texts(generated("exported", "--n", 3, "--max-new-tokens", 4))
    assert texts(rows) != texts(generated("grpo", "--n", 3, "--step", 2))
    assert texts(generated("lora")) == texts(generated("adapter", "--max-new-tokens", 4))


def test_greedy_is_what_transformers_says(
    runs: Path, generated: Callable[..., list[dict[str, object]]]
) -> None:
    said = [row["responses"] for row in generated("grpo", "--temperature", 0)]
    assert said == [[greedy(runs / "exported", f"{a}+1=")] for a in range(6)]


def test_the_seed_decides(generated: Callable[..., list[dict[str, object]]]) -> None:
    first, again, other = (generated("grpo", "--n", 2, "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert texts(first) != texts(other)


def test_a_file_is_there_whole_or_not_at_all(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "generate",
        runs / "grpo",
        "--prompts",
        runs / "prompts.jsonl",
        "--out",
        tmp_path / "new" / "out.jsonl",
    )

    def told_to_end() -> int:
        kill_at(Decoding, "step", 2, signals=(signal.SIGTERM,))
        return oat(*command)

    assert forked(told_to_end, tmp_path / "log") == 75
    assert "SIGTERM ended it; the same command begins anew" in (tmp_path / "log").read_text()
    assert [*(tmp_path / "new").iterdir()] == []
    assert oat(*command) == 0
    assert "1 responses to each of 6 prompts are in" in capsys.readouterr().out
    before = (tmp_path / "new" / "out.jsonl").read_bytes()
    assert len(before.splitlines()) == 6
    assert oat(*command) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert [path.read_bytes() for path in (tmp_path / "new").iterdir()] == [before]


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "a file": (
            ["generate", "{runs}/prompts.jsonl", "--prompts", "{runs}/prompts.jsonl"],
            "is a file; give a run directory",
        ),
        "no model": (["generate", "{runs}/none", "--prompts", "{runs}/prompts.jsonl"], "none"),
        "no prompts": (["generate", "{runs}/exported", "--prompts", "{runs}/none.jsonl"], "none.jsonl"),
        "no responses": (
            ["generate", "{runs}/exported", "--prompts", "{runs}/prompts.jsonl", "--n", "0"],
            "--n is 0",
        ),
        "a temperature": (
            ["generate", "{runs}/exported", "--prompts", "{runs}/prompts.jsonl", "--temperature", "nan"],
            "--temperature is nan",
        ),
        "a step of a model": (
            ["generate", "{runs}/exported", "--prompts", "{runs}/prompts.jsonl", "--step", "2"],
            "is no run",
        ),
        "another step": (
            ["generate", "{runs}/grpo", "--prompts", "{runs}/prompts.jsonl", "--step", "3"],
            "3",
        ),
        "a precision": (["chat", "{runs}/grpo", "--dtype", "bfloat16"], "has a precision of its own"),
        "a system message": (
            ["chat", "{runs}/grpo", "--template", "none", "--system", "a"],
            "--system is given",
        ),
        "no template": (
            ["chat", "{runs}/exported"],
            "has no chat template, so nothing says where a turn ends; with --template none",
        ),
        "nor of a run": (["chat", "{runs}/grpo"], "with --template none it continues what you type"),
    }.values(),
)
def test_what_cannot_be_is_one_message(
    words: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert oat(*(word.format(runs=runs) for word in words)) in (1, 2)
    found = capsys.readouterr()
    assert said in found.err
    assert (found.out, found.err.count("Traceback")) == ("", 0)


def test_a_reward_model_answers_nothing(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    write_jsonl(pairs, [{"prompt": f"{a}+1=", "chosen": "ab", "rejected": "b"} for a in range(8)])
    changes = {
        "prompts": {"path": str(pairs), "responses": ["chosen", "rejected"]},
        "oracle": {"name": "recorded"},
        "evaluation": None,
    }
    changes |= {"algorithm": {"name": "reward_model", "prompts": 4}, "stop.max_steps": 1, "sampling": None}
    assert oat("train", world.config("reward_model", tmp_path, changes)) == 0
    assert oat("chat", tmp_path / "reward_model") == 2
    assert "trained a reward model, which answers nothing" in capsys.readouterr().err


def test_a_prompt_that_leaves_no_room_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "long.jsonl", [{"prompt": "1"}, {"prompt": "1" * 64}])
    assert oat("generate", runs / "exported", "--prompts", tmp_path / "long.jsonl") == 2
    assert "record 2: the prompt has 64 tokens, and the model's context holds 64" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_it_quietly(runs: Path, tmp_path: Path) -> None:
    """The reader closes the pipe early, as `| head -1` does, and the pipe holds less than the output. The
    command ends without an error message."""
    write_jsonl(tmp_path / "many.jsonl", [{"prompt": f"{a}"} for a in range(100)])
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    lines = list[str]()

    def read() -> None:
        with os.fdopen(reading) as pipe:
            lines.append(pipe.readline())

    def child() -> int:
        os.close(reading)
        os.dup2(writing, 1)
        sys.stdout = os.fdopen(1, "w")
        return oat("generate", runs / "exported", "--prompts", tmp_path / "many.jsonl", "--max-new-tokens", 2)

    reader = threading.Thread(target=read)
    reader.start()
    code = forked(child, tmp_path / "log")
    os.close(writing)
    reader.join()
    assert json.loads(lines[0])["prompt"] == "0"
    assert (code, (tmp_path / "log").read_text()) == (141, "")


@pytest.fixture
def chatted(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Return a function that gives the output lines of `oat chat` for given input bytes."""

    def run(typed: bytes, *flags: object, code: int = 0, model: str = "chatty") -> list[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
        capsys.readouterr()
        assert oat("chat", runs / model, *flags) == code
        return (capsys.readouterr().err if code else capsys.readouterr().out).splitlines()

    return run


def test_a_pipe_has_lines_in_and_answers_out(runs: Path, chatted: Callable[..., list[str]]) -> None:
    """`oat chat` reads lines from a pipe. Each answer is the model's response to the conversation so far,
    rendered by the model's template."""
    speaker = load_speaker(str(runs / "chatty"), GenerationOptions(max_new_tokens=6))
    messages: list[Message] = []
    expected = []
    for turn, line in enumerate(("how are you", "why")):
        messages.append(Message("user", line))
        *_, last = speaker.answer(messages, turn)
        expected.append(speaker.renderer.text(last.ids))
        messages.append(Message("assistant", expected[-1]))
    said = chatted(b"\xef\xbb\xbfhow are you\r\n\n  \nwhy\n/exit\nnever\n", "--max-new-tokens", 6)
    assert said == expected
    assert chatted(b"how are you\nwhy", "--max-new-tokens", 6) == expected, "the end of the input ends it too"
    assert chatted(b"how are you\nwhy", "--max-new-tokens", 6, "--seed", 1) != expected
    assert chatted(b"how are you\n/new\nwhy", "--max-new-tokens", 6)[1] != expected[1]


def test_plain_text_is_continued_where_that_is_asked_for(
    runs: Path, chatted: Callable[..., list[str]]
) -> None:
    said = chatted(b"1+1=\n2+1=\n1+1=", "--template", "none", "--temperature", 0, model="grpo")
    assert said == [greedy(runs / "exported", prompt) for prompt in ("1+1=", "2+1=", "1+1=")]


def test_a_long_conversation_drops_its_first_turns(runs: Path, chatted: Callable[..., list[str]]) -> None:
    assert len(chatted(b"how are you\n" * 5, "--max-new-tokens", 60)) == 5
    assert "its context holds 256; say less" in chatted(b"a" * 300, code=2)[0]
    assert "line 2: expected UTF-8" in " ".join(chatted(b"a\n\xff\n", code=2))


def test_a_growing_text_holds_back_what_may_change() -> None:
    assert _certain("caf\ufffd", ()) == "caf"
    assert _certain("so END", ("END OF",)) == "so "
    assert _certain("so EN E", ("END",)) == "so EN "
    assert _certain("so be it", ("END",)) == "so be it"


def test_a_stream_ends_as_a_request_does(runs: Path) -> None:
    """A streamed response has one more id at each step, and ends with the ids of a normal request, with fixed
    batches and without."""
    for model in ("chatty", "grpo"):
        speaker = load_speaker(str(runs / model), GenerationOptions(max_new_tokens=5))
        messages = [Message("user", "1+1=")]
        *parts, last = speaker.answer(messages, 0)
        assert [len(part.ids) for part in parts] == list(range(1, len(last.ids)))
        assert all(
            part.finish_reason == "aborted" and (part.ids == last.ids[: len(part.ids)]).all()
            for part in parts
        )
        assert last.finish_reason in ("stop", "length")


def type_in(text: bytes) -> None:
    """Give this process, a forked child, a terminal in which `text` was typed."""
    master, slave = os.openpty()
    os.write(master, text)
    os.dup2(slave, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8")


def test_a_terminal_is_asked_and_sees_the_answer(runs: Path) -> None:
    def child() -> int:
        type_in(b"how are you\n/exit\n")
        return oat("chat", runs / "chatty", "--max-new-tokens", 6, "--temperature", 0)

    seen = in_a_terminal(child)
    assert seen.code == 0, seen.raw
    assert "chatty answers, and remembers; /exit ends, /new begins anew, Ctrl-C cuts an answer" in " ".join(
        seen.lines
    )
    speaker = load_speaker(str(runs / "chatty"), GenerationOptions(max_new_tokens=6, temperature=0.0))
    *_, last = speaker.answer([Message("user", "how are you")], 0)
    assert any(speaker.renderer.text(last.ids) in line for line in seen.lines)


def test_ctrl_c_cuts_an_answer_and_not_the_conversation(runs: Path) -> None:
    def child() -> int:
        type_in(b"how\nare\n/exit\n")
        kill_at(Decoding, "step", 3, signals=(signal.SIGINT,))
        return oat("chat", runs / "chatty", "--max-new-tokens", 8)

    seen = in_a_terminal(child)
    assert seen.code == 0, seen.raw
    speaker = load_speaker(str(runs / "chatty"), GenerationOptions(max_new_tokens=8))
    asked = [Message("user", "how")]
    cut = speaker.renderer.text([*speaker.answer(asked, 0)][1].ids)
    *_, last = speaker.answer([*asked, Message("assistant", cut), Message("user", "are")], 1)
    *_, first, second, end = [line for line in seen.lines if line.startswith(">")]
    assert (first, end) == (f"> {cut}".rstrip(), ">"), "two tokens, before the third is drawn"
    assert second.startswith(f"> {speaker.renderer.text(last.ids)}".rstrip())


@pytest.mark.slow(
    instead="tests/evaluation/test_evaluate.py::test_a_run_and_a_configuration_can_be_evaluated_alone",
    seconds=1.0,
)
def test_eval_prints_a_table_in_a_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    flags = ("--evaluation.intervals", "true")
    assert oat("eval", runs / "grpo", *flags) == 0
    piped = json.loads(capsys.readouterr().out)
    lines = in_a_terminal(lambda: oat("eval", runs / "grpo", *flags)).lines
    assert f"{runs / 'grpo'} after 4 steps" in "".join(lines)
    (row,) = [line.split() for line in lines if line.startswith("eval/sampled ")]
    ends = [f"{piped[f'eval/sampled_{end}']:.4g}" for end in ("low", "high")]
    assert row == ["eval/sampled", f"{piped['eval/sampled']:.4g}", ends[0], "to", ends[1]]
    against = in_a_terminal(lambda: oat("eval", runs / "grpo", "--against", runs / "exported")).lines
    assert any(line.startswith("sampled_win_rate ") for line in against)
    assert not any("{" in line for line in [*lines, *against])


def test_a_table_of_numbers() -> None:
    found = {"a": 1.0, "a_low": 0.5, "a_high": 1.25, "b_low": 12345.678}
    assert numbers_table("so", found).split("\n") == [
        "so",
        "           value  95 % interval",
        "a              1  0.5 to 1.25",
        "b_low  1.235e+04",
    ]


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="give"):
        GenerationOptions(**{name: -1.0})
