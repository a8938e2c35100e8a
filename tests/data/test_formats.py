"""Columns of records: formats, prompts, responses, and columns that are neither.

tests/data/test_trl.py runs every format.
"""

import json

import pytest
from fixtures import make_model, oat, write_jsonl

from oat.blobs import pack, unpack
from oat.data.fit import Fit
from oat.data.formats import Layout, scores_of
from oat.data.messages import conversation_of
from oat.data.prompts import PromptSet, Source, read_prompts
from oat.errors import DataError, OatWarning
from oat.models.loading import load_tokenizer
from oat.text.renderer import Renderer
from oat.types import Group, Message

QUESTION = [{"role": "user", "content": "1+1"}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": "2"}]
CALL = {"role": "assistant", "tool_calls": [{"name": "f"}]}


def read(records, **options):
    return read_prompts(Source(records), **options)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"promt": "a"}],
            r"field 'prompt': expected in every record, got the columns 'promt'; .*did you mean `promt`",
        ),
        (
            [{"question": "a", "answer": "b"}],
            "got the columns 'question', 'answer'; the nearest format is prompt-only",
        ),
        (
            [{"chosen": "a", "reject": "b"}],
            r"the nearest format is preference with an implicit prompt \(chosen, rejected\)",
        ),
        ([{"text": "a"}], "field 'text': expected a prompt, got a whole text; set `prompt_key: text`"),
        (
            [{"chosen": "ab", "rejected": "cd"}],
            "fields 'chosen' and 'rejected': expected texts that begin with a common prompt",
        ),
        (
            [{"chosen": QUESTION, "rejected": [{"role": "user", "content": "2+2"}]}],
            "expected conversations that begin with a common prompt",
        ),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            "field 'messages': expected the last message from user or tool, got none",
        ),
        (
            [{"messages": ANSWERED}, {"messages": ANSWERED[:1]}],
            "2: field 'messages': expected the last message from assistant, as in the first",
        ),
        (
            [{"messages": ANSWERED[:1]}, {"messages": ANSWERED}],
            "2: field 'messages': expected the last message from user or tool, got assistant",
        ),
        (
            [{"messages": ANSWERED}, {"prompt": "a"}],
            "2: field 'messages': expected in every record, got none",
        ),
        (
            [{"messages": [*ANSWERED, {"role": "tool", "tool_calls": [1]}]}],
            "message 3: .*write role and text in these two fields",
        ),
        (
            [{"messages": [{"role": "user", "from": "human", "content": "a", "value": "a"}]}],
            "message 1: .*write role and text in these two fields",
        ),
        (
            [{"messages": [{"role": "assistant", "tool_calls": None}]}],
            "message 1: .*got the fields 'role', 'tool_calls'",
        ),
    ],
)
def test_records_of_no_format(records, message):
    with pytest.raises(DataError, match=message):
        read(records)


@pytest.mark.parametrize(
    ("record", "responses", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            ("chosen", "rejected"),
            "field 'rejected': expected in every record, got none; set `prompts.responses`",
        ),
        (
            {"prompt": "a", "chosen": 5, "rejected": "b"},
            ("chosen", "rejected"),
            "field 'chosen': .*got a number",
        ),
        (
            {"prompt": "a", "chosen": ANSWERED[:1], "rejected": "b"},
            ("chosen", "rejected"),
            "field 'chosen': expected a response, .*got user",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "x"},
            ("completion",),
            "field 'label': expected true or false, got 'x'",
        ),
        ({"text": " "}, ("completion",), "field 'text': expected text, got none"),
        (
            {"messages": [*QUESTION, {**CALL, "content": " ", "tool_calls": []}]},
            ("completion",),
            "field 'completion': expected text in every message",
        ),
        (
            {"messages": [*QUESTION, {**ANSWERED[1], "weight": 0}]},
            ("completion",),
            "field 'completion': expected a message of weight 1",
        ),
        (
            {"prompt": "a", "completion": [ANSWERED[1], ANSWERED[1]]},
            ("completion",),
            "got two of its messages in a row; join them",
        ),
    ],
)
def test_responses_that_are_none(record, responses, message):
    with pytest.raises(DataError, match=message):
        PromptSet(Source([record]), Layout(responses=responses))


def test_scores_from_a_csv_are_numbers(tmp_path):
    """A score in a CSV file is text, and is read as a number. A text that is no finite number is an error."""
    path = tmp_path / "data.csv"
    path.write_text("prompt,completion,score\na,b,0.25\na,b,-3\na,b,True\n")
    prompts = PromptSet(Source(str(path)), Layout(responses=("completion",), score_key="score"))
    assert [scores_of(prompt.columns, ("completion",), "score", "") for prompt in prompts] == [
        [0.25],
        [-3.0],
        [1.0],
    ]
    for wrong in ("much", "", "nan", "inf"):
        path.write_text(f"prompt,completion,score\na,b,1\na,b,{wrong}\n")
        with pytest.raises(DataError, match=r"data.csv:3: field 'score': expected 1 numbers, one a response"):
            PromptSet(Source(str(path)), Layout(responses=("completion",), score_key="score"))


def test_a_conversation_is_learned_beside_a_preference_that_nobody_reads():
    """A record has UltraFeedback's columns, and `prompts.prompt_key` selects its conversation. The columns of
    the preference are ignored."""
    asked, told = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
    pair = {"chosen": [asked, told], "rejected": [asked, {**told, "content": "5"}]}
    record = {
        "prompt": "2+2",
        "prompt_id": "x",
        **pair,
        "messages": [asked, told],
        "score_chosen": 8.0,
        "score_rejected": 3.0,
    }
    prompts = PromptSet(Source([record]), Layout("messages", responses=("completion",)))
    assert prompts[0].columns["completion"] == [told]
    assert [message.content for message in prompts[0].messages] == ["2+2"]


def test_responses_by_hand():
    """Each format gives the prompt and the response that is computed by hand. If a response repeats the
    prompt, the prompt is cut off."""
    chat, plain = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
    wrong = {**plain, "content": "5"}
    pair = ("chosen", "rejected")
    for record, names, prompt, found in (
        ({"chosen": "2+2 is 4", "rejected": "2+2 is 5"}, pair, "2+2 is", (" 4", " 5")),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, pair, "2+2=", ("4", "5")),
        ({"good": [chat, plain], "bad": [chat, wrong]}, ("good", "bad"), "2+2", ([plain], [wrong])),
        (
            {"prompt": "2+2", "chosen": [chat, plain], "rejected": [chat, wrong]},
            pair,
            "2+2",
            ([plain], [wrong]),
        ),
        (
            {"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]},
            ("completion",),
            "2+2",
            ([plain],),
        ),
        ({"messages": [chat, wrong, chat, plain]}, ("answer",), "2+2", ([wrong, chat, plain],)),
        ({"messages": [wrong, chat, plain, chat, wrong]}, ("answer",), "2+2", ([plain, chat, wrong],)),
        ({"prompt": "2+2", "completion": "4"}, ("completion",), "2+2", ("4",)),
    ):
        (prompt_,) = PromptSet(Source([record]), Layout(responses=names))
        assert (prompt_.messages[-1].content, tuple(prompt_.columns[name] for name in names)) == (
            prompt,
            found,
        ), record
        assert prompt_.is_chat == isinstance(found[0], list), record
    assert read([{"messages": [chat, plain]}], reference_key="completion")[0].reference == "4"
    assert (
        read([{"prompt": [chat], "chosen": {"from": "gpt", "value": "4"}}], reference_key="chosen")[
            0
        ].reference
        == "4"
    )
    renamed = read([{"dialog": [chat, plain], "prompt": "other"}], prompt_key="dialog")
    assert (renamed[0].messages, renamed[0].columns) == (
        (Message("user", "2+2"),),
        {"prompt": "other", "completion": [plain]},
    )


def test_a_text_has_no_turns(world, tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "12+a"}] * 4)
    changes = {
        "prompts": {"path": str(path)},
        "algorithm": {"name": "sft", "prompts": 2},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    config = world.config("sft", tmp_path, {**changes, "stop.max_steps": 1})
    assert oat("train", config) == 0
    sample = json.loads((tmp_path / "sft" / "samples.jsonl").read_text().splitlines()[0])
    row = json.loads((tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()[1])
    assert (sample["prompt"], row["response/length"], row["rows/trained"]) == ([], 4, 1), (
        "the first token has nothing before it; the end is learned"
    )
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    assert (
        oat("train", config, "--render.template", tmp_path / "chat.jinja", "--run_dir", tmp_path / "chat")
        == 2
    )
    assert (
        f"{path}:1: field 'text': expected messages, since a chat template is set, got a text"
        in capsys.readouterr().err
    )


def test_what_is_not_rendered_is_counted(tmp_path):
    make_model(tmp_path / "model")
    (tmp_path / "calls.jinja").write_text(
        "{% for m in messages %}{{ m.thinking if is_on }}{{ m.content }}{{ m.tool_calls }}{{ eos_token }}"
        "{% endfor %}"
    )
    fit = Fit(Renderer(load_tokenizer(str(tmp_path / "model")), template=str(tmp_path / "calls.jinja")))
    records = [
        {
            "prompt": [
                QUESTION[0],
                CALL,
                {"role": "tool", "name": "f", "content": "1", "tool_call_id": None},
            ],
            "tests": [{"input": 1}],
        },
        {"prompt": [*QUESTION, {**ANSWERED[1], "thinking": "hm"}, *QUESTION], "tools": []},
        {
            "prompt": [{**QUESTION[0], "name": "Ann"}],
            "tools": ["f"],
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [],
        },
    ]
    found = PromptSet(Source(records), Layout(), fit)
    assert found[0].messages[1:] == (
        Message("assistant", "", {"tool_calls": [{"name": "f"}]}),
        Message("tool", "1", {"name": "f"}),
    )
    said = (
        "`chat_template_kwargs` (1 of 3 records), `name` (2 of 3 records), `thinking` (1 of 3 records), "
        "`tools` (1 of 3 records)"
    )
    assert found.notes[1] == f"records: not rendered: {said}"
    assert found[2].columns["tools"] == ["f"]


def test_parts_of_text_are_joined():
    """A message whose content is a list of text parts, as in the OpenAI format, gives one text. Nulls that
    tables add are removed at every depth."""
    parts = [{"type": "text", "text": "1+", "image_url": None}, {"type": "text", "text": "1"}]
    calls = [{"function": {"name": "f", "arguments": {"x": 1, "y": None}}}]
    said = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "and?"},
    ]
    with pytest.warns(OatWarning, match="arguments that are null"):
        (prompt,) = read([{"messages": said}])
    call = Message("assistant", "", {"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]})
    assert prompt.messages == (Message("user", "1+1"), call, Message("user", "and?"))
    assert unpack(pack([Group(prompt, ())]))[0].prompt.messages == prompt.messages, "they are stored whole"


@pytest.mark.parametrize(
    "empty",
    [
        {"from": "system", "value": ""},
        {"role": "system", "content": " \n"},
        {"role": "system", "content": None},
    ],
)
def test_an_empty_system_message_is_none(empty):
    """An empty system message, as in tables of ShareGPT, is left out."""
    said = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]
    (prompt,) = PromptSet(Source([{"conversations": [empty, *said]}]), Layout(responses=("completion",)))
    assert prompt.messages == (Message("user", "1+1"),)
    assert prompt.columns["completion"] == [{"role": "assistant", "content": "2"}]
    with pytest.raises(
        DataError, match="field 'prompt': expected a prompt, got nothing but an empty system message"
    ):
        read([{"prompt": [empty]}])


THINKS = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.reasoning_content }}{{ m.content }}{{ eos_token }}{% "
    "endfor %}"
)


def test_what_trl_users_have_is_learned(world, tmp_path):
    """A run learns from a record with an empty system message, a tool without a result, and a response of
    reasoning alone."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "weight": 0}
    said = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "1+1"},
        call,
        {"role": "tool", "content": ""},
    ]
    path = write_jsonl(
        tmp_path / "data.jsonl",
        [{"messages": [*said, {"role": "assistant", "content": None, "reasoning_content": "ab"}]}] * 4,
    )
    (tmp_path / "thinks.jinja").write_text(THINKS + "{% if add_generation_prompt %}a{% endif %}")
    changes = {
        "prompts": {"path": str(path)},
        "algorithm": {"name": "sft", "prompts": 2},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    config = world.config(
        "sft", tmp_path, {**changes, "render.template": str(tmp_path / "thinks.jinja"), "stop.max_steps": 1}
    )
    assert oat("train", config) == 0
    sample = json.loads((tmp_path / "sft" / "samples.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in sample["prompt"]] == ["user", "assistant", "tool"]
    row = json.loads((tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()[1])
    assert row["response/length"] == 3, "a, b and the end of the turn"


def test_a_record_whose_fields_differ_is_another():
    one, other, plain = (
        PromptSet(Source([{"prompt": [{**QUESTION[0], **field}]}]), Layout())
        for field in ({"name": "a"}, {"name": "b"}, {})
    )
    assert len({one.digest, other.digest, plain.digest}) == 3


def test_weights_say_which_messages_are_learned():
    """Messages have weights, as in OpenAI's format. The response begins with the first message whose weight
    is not 0. Online, the policy's response replaces the last message."""
    asked = QUESTION[0]
    first = {"role": "assistant", "content": "b"}
    again = {"role": "user", "content": "2"}
    for weights, learned in (
        ((None, None), [0, 1, 2]),
        ((None, 1), [0, 1, 2]),
        ((0, None), [2]),
        ((0, 1), [2]),
        ((1, 0), [0, 1, 2]),
        ((1, 1), [0, 1, 2]),
    ):
        answers = [{**first, "weight": weights[0]}, {**ANSWERED[1], "weight": weights[1]}]
        (prompt,) = PromptSet(
            Source([{"messages": [asked, answers[0], again, answers[1]]}]), Layout(responses=("completion",))
        )
        rest = [answers[0], again, answers[1]]
        expected = [{name: value for name, value in message.items() if value is not None} for message in rest]
        assert prompt.columns["completion"] == [expected[place] for place in learned], weights
        assert len(prompt.messages) == 4 - len(learned)
        (prompt,) = read([{"messages": [asked, answers[0], again, answers[1]]}])
        assert (len(prompt.messages), prompt.columns["completion"]) == (3, expected[2:])


def test_unpaired_preferences_are_learned_where_their_label_is_true(world, tmp_path, capsys):
    records = [
        {"prompt": f"{n}+1=", "completion": "a" if n % 2 else "b", "label": n % 2 == 1} for n in range(6)
    ]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    changes = {
        "prompts": {"path": str(path)},
        "algorithm": {"name": "sft", "prompts": 6},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    config = world.config("sft", tmp_path, {**changes, "stop.max_steps": 1})
    assert oat("train", config) == 2
    assert "sft would learn every response, also those whose label is false" in capsys.readouterr().err
    assert oat("train", config, "--algorithm.threshold", "1") == 0
    row = json.loads((tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()[1])
    assert (row["rows/trained"], row["reward/mean"]) == (3, 0.5)
    assert oat("train", config, "--algorithm.threshold", "0", "--run_dir", tmp_path / "all") == 0
    assert json.loads((tmp_path / "all" / "metrics.jsonl").read_text().splitlines()[1])["rows/trained"] == 6


def test_responses_without_a_label_beside_labelled_ones_are_no_praise(world, tmp_path, capsys):
    """A response without a label is refused if another record of its file, or another source, has labels."""
    records = [{"prompt": f"{n}+1=", "completion": "a", "label": n % 2 == 1} for n in range(6)]
    bare = [{name: record[name] for name in ("prompt", "completion")} for record in records]
    one, other = (
        write_jsonl(tmp_path / "one.jsonl", [*records, bare[0]]),
        write_jsonl(tmp_path / "other.jsonl", bare),
    )
    whole = write_jsonl(tmp_path / "whole.jsonl", records)
    for path, words in {
        str(one): (
            "one.jsonl:7: field 'label': expected in every record, got none; set `prompts.score_key` or "
            "add the field"
        ),
        (str(whole), str(other)): (
            "records have labels, and others that are prompt-completion, whose responses would all be worth 1"
        ),
    }.items():
        changes = {
            "algorithm": {"name": "sft", "prompts": 6, "threshold": 1},
            "oracle.name": "recorded",
            "evaluation": None,
        }
        config = world.config(
            "sft", tmp_path, {**changes, "prompts": {"path": path if isinstance(path, str) else list(path)}}
        )
        assert oat("check", config) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["kto", "sft"])
def test_scores_that_nobody_was_told_of_are_no_praise(world, tmp_path, capsys, algorithm):
    records = [{"prompt": f"{n}+1=", "completion": "a" if n % 2 else "b", "score": n / 6} for n in range(6)]
    changes = {
        "prompts": {"path": str(write_jsonl(tmp_path / "data.jsonl", records))},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    changes |= {"algorithm": {"name": algorithm, "prompts": 6, "threshold": 0.5}, "stop.max_steps": 1}
    config = world.config(algorithm, tmp_path, changes)
    for command in ("check", "train"):
        assert oat(command, config) == 2
        said = capsys.readouterr().err
        assert (
            f"prompts.score_key is not set: {algorithm} would take every response in 'completion' for worth 1"
        ) in said
        assert "set prompts.score_key to the column of their scores (the data have a column 'score')" in said
    assert oat("train", config, "--prompts.score_key", "score") == 0
    row = json.loads((tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()[1])
    assert row["reward/mean"] == pytest.approx(2.5 / 6)


def test_a_response_that_cannot_be_rendered_names_its_record(world, tmp_path, capsys):
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "1", "completion": "a"}] * 4)
    (tmp_path / "thinks.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}{% if "
        "add_generation_prompt %}a<think>{% endif %}"
    )
    changes = {
        "prompts": {"path": str(path), "shuffle": False},
        "algorithm": {"name": "sft", "prompts": 2},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    config = world.config(
        "sft", tmp_path, {**changes, "render.template": str(tmp_path / "thinks.jinja"), "stop.max_steps": 1}
    )
    assert oat("train", config) == 2
    assert (
        "data.jsonl:1: field 'completion': the response cannot be rendered: the template's prompt opens "
        "<think>"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("is_list", [False, True])
def test_calls_of_sharegpt_are_calls(is_list: bool) -> None:
    """They were learned as the text of their JSON, in no form of the template."""
    call = {"name": "find", "arguments": {"q": "cat"}}
    value = json.dumps([call, call] if is_list else call)
    (message,) = conversation_of([{"from": "function_call", "value": value}], "here")
    function = {"type": "function", "function": call}
    calls = [function] * (2 if is_list else 1)
    assert message == Message("assistant", "", {"tool_calls": calls})


@pytest.mark.parametrize(
    "value", ["{'name': 'find'}", "", "find(q='cat')", "[]", '{"q": 1}', "[3]", "[" * 9999]
)
def test_a_call_of_sharegpt_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(DataError, match=r"here, message 1: expected the JSON of a call"):
        conversation_of([{"from": "function_call", "value": value}], "here")
