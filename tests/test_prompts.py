"""Prompt files, their order and the cursor."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat import wire
from oat.errors import DataError
from oat.prompts import Prompts, read_jsonl
from oat.render import Renderer
from oat.seeds import Seeds
from oat.types import Message

SETTINGS = settings(derandomize=True, deadline=None, max_examples=30)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    """Plain prompts, one token a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    built = Tokenizer(models.WordLevel({character: i for i, character in enumerate("0123456789+=x")}))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(folder)
    return Renderer(AutoTokenizer.from_pretrained(folder), template=None)


def write(folder, records):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def sums(folder, size):
    return write(folder, [{"prompt": f"{i}+{i}=", "answer": 2 * i, "level": i % 3} for i in range(size)])


def contents(prompts):
    return [prompt.messages[0].content for prompt in prompts]


def test_a_record_by_hand(tmp_path):
    path = write(
        tmp_path,
        [
            {"question": "2+2=", "answer": 4, "level": {"easy": True}},
            {"question": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}], "answer": "2", "level": None},
        ],
    )
    first, second = read_jsonl(path, prompt_key="question", reference_key="answer")
    assert (first.row, first.occurrence, first.messages, first.reference) == (1, 0, (Message("user", "2+2="),), "4")
    assert first.columns == {"answer": 4, "level": {"easy": True}}
    assert (second.row, second.occurrence) == (2, 1)
    assert second.messages == (Message("system", "add"), Message("user", "1+1="))
    assert wire.roundtrip(first) == first
    assert read_jsonl(path, prompt_key="question")[0].reference is None


def test_byte_order_mark_crlf_blank_lines_and_line_separators(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes("\ufeff".encode() + b'{"prompt": "a"}\r\n\r\n' + '{"prompt": "b\u2028c\u0085d"}'.encode())
    assert [(prompt.row, prompt.messages[0].content) for prompt in read_jsonl(path)] == [(1, "a"), (3, "b\u2028c\u0085d")]


MALFORMED = [
    (b'{"prompt": "a"', "invalid JSON"),
    (b'{"prompt": "a"} {"prompt": "b"}', "invalid JSON"),
    (b'{"prompt": "a", "x": NaN}', "NaN is not JSON"),
    (b'{"prompt": "a", "x": 1e999}', "field 'x'.*too large"),
    (b'{"prompt": "a", "x": 36893488147419103232}', "field 'x'.*64 bits"),
    (b"[" * 100_000, "invalid JSON"),
    (b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "field 'x'.*nested deeper"),
    (b'["prompt"]', "expected a JSON object, got a list"),
    (b"null", "expected a JSON object, got null"),
    (b'{"promt": "a"}', "field 'prompt'.*did you mean `promt`"),
    (b'{"prompt": 5}', "field 'prompt': expected a string or a list of messages, got a number"),
    (b'{"prompt": null}', "got null"),
    (b'{"prompt": ""}', "got an empty message"),
    (b'{"prompt": " \\n "}', "got an empty message"),
    (b'{"prompt": []}', "got an empty list"),
    (b'{"prompt": ["a"]}', "message 1: expected .*got a string"),
    (b'{"prompt": [{"from": "human", "value": "a"}]}', "message 1: .*got the fields 'from', 'value'"),
    (b'{"prompt": [{"role": "user", "content": "a", "name": "b"}]}', "write exactly these two fields"),
    (b'{"prompt": [{"role": "human", "content": "a"}]}', "expected a role, got 'human'"),
    (b'{"prompt": [{"role": ["user"], "content": "a"}]}', "expected a role"),
    (b'{"prompt": [{"role": "user", "content": ["a"]}]}', "expected a string as content, got a list"),
    (b'{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "got assistant; end the prompt with"),
    (b'{"prompt": "a\\ud800"}', r"field 'prompt'.*lone surrogate U\+D800"),
    (b'{"prompt": "a", "x": [{"\\udfff": 1}]}', r"field 'x'.*lone surrogate U\+DFFF"),
    (b'{"prompt": "a\\u0000b"}', "field 'prompt'.*NUL"),
    (b'{"prompt": "a\xff"}', "expected UTF-8, got byte 0xff at 13"),
]


@pytest.mark.parametrize(("line", "message"), MALFORMED)
def test_malformed_records(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as seen:
        read_jsonl(path)
    assert str(seen.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "field 'answer'.*set `reference_key`"),
        ({"prompt": "a", "answer": None}, "field 'answer': expected a string or a number, got null"),
        ({"prompt": "a", "answer": True}, "got true or false"),
        ({"prompt": "a", "answer": ["4"]}, "got a list"),
    ],
)
def test_malformed_references(tmp_path, record, message):
    path = write(tmp_path, [{"prompt": "a", "answer": 4}, record])
    with pytest.raises(DataError, match=message) as seen:
        read_jsonl(path, reference_key="answer")
    assert f"{path}:2" in str(seen.value)


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="empty file"):
        read_jsonl(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="directory"):
        read_jsonl(tmp_path)


@SETTINGS
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20), limit=st.integers(1, 12), shuffle=st.booleans())
def test_references_stay_with_their_prompts_after_drops(tmp_path_factory, renderer, lengths, limit, shuffle):
    records = [{"prompt": "x" * length, "answer": f"{row}/{length}"} for row, length in enumerate(lengths, start=1)]
    path = write(tmp_path_factory.mktemp("data"), records)
    kept = [length for length in lengths if length <= limit]
    if not kept:
        with pytest.raises(DataError, match=f"longer than {limit} tokens"):
            Prompts(path, renderer, Seeds(0), reference_key="answer", max_tokens=limit)
        return
    prompts = Prompts(path, renderer, Seeds(0), reference_key="answer", max_tokens=limit, shuffle=shuffle)
    assert (prompts.size, prompts.dropped) == (len(kept), len(lengths) - len(kept))
    for taken in (prompts.take(prompts.size), prompts.all()):
        assert sorted(len(prompt.messages[0].content) for prompt in taken) == sorted(kept)
        assert all(prompt.reference == f"{prompt.row}/{len(prompt.messages[0].content)}" for prompt in taken)
        assert all(prompt.columns == {"answer": prompt.reference} for prompt in taken)


@SETTINGS
@given(size=st.integers(1, 9), takes=st.lists(st.integers(0, 7), min_size=1, max_size=8), cut=st.integers(0, 8), epochs=st.sampled_from([None, 1, 3]))
def test_the_cursor_resumes_at_any_cut(tmp_path_factory, renderer, size, takes, cut, epochs):
    path = sums(tmp_path_factory.mktemp("data"), size)

    def build():
        return Prompts(path, renderer, Seeds(5), reference_key="answer", epochs=epochs)

    unbroken = build()
    expected = [prompt for n in takes for prompt in unbroken.take(n)]
    first, second = build(), build()
    taken = [prompt for n in takes[:cut] for prompt in first.take(n)]
    assert first.state == {"taken": len(taken)}
    second.load_state(json.loads(json.dumps(first.state)))
    taken += [prompt for n in takes[cut:] for prompt in second.take(n)]
    assert taken == expected
    assert [prompt.occurrence for prompt in taken] == list(range(len(taken)))
    assert second.state == unbroken.state
    assert len(taken) == (sum(takes) if epochs is None else min(sum(takes), epochs * size))


def test_every_epoch_is_a_seeded_permutation_of_the_file(tmp_path, renderer):
    path = sums(tmp_path, 50)
    prompts = Prompts(path, renderer, Seeds(1), reference_key="answer")
    file_order = contents(prompts.all())
    first, second = contents(prompts.take(50)), contents(prompts.take(50))
    assert sorted(first) == sorted(second) == sorted(file_order)
    assert len({tuple(first), tuple(second), tuple(file_order)}) == 3
    assert first == [file_order[i] for i in Seeds(1).at("prompts", 0).permutation(50)]
    assert contents(Prompts(path, renderer, Seeds(2)).take(50)) != first
    plain = Prompts(path, renderer, Seeds(1), shuffle=False)
    assert contents(plain.take(100)) == file_order * 2


def test_used_up_epochs_give_fewer_and_then_none(tmp_path, renderer):
    prompts = Prompts(sums(tmp_path, 3), renderer, Seeds(0), epochs=2)
    assert [len(prompts.take(4)) for _ in range(3)] == [4, 2, 0]
    assert prompts.state == {"taken": 6}


def test_all_numbers_the_kept_prompts_and_leaves_the_cursor(tmp_path, renderer):
    path = write(tmp_path, [{"prompt": "x"}, {"prompt": "xxxx"}, {"prompt": "xx"}])
    prompts = Prompts(path, renderer, Seeds(0), max_tokens=2)
    assert [(prompt.row, prompt.occurrence) for prompt in prompts.all()] == [(1, 0), (3, 1)]
    assert prompts.state == {"taken": 0}
    assert prompts.dropped == 1


def test_a_prompt_that_cannot_be_rendered_names_its_line(tmp_path, renderer):
    path = write(tmp_path, [{"prompt": "x"}, {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "x"}]}])
    with pytest.raises(DataError, match=r"data.jsonl:2: the prompt cannot be rendered: .*needs a chat template"):
        Prompts(path, renderer, Seeds(0), max_tokens=5)
