"""The order of prompts, the mixture of several sources, and the cursor."""

import heapq
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fixtures import World, oat, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oat.data.prompts import Prompts, Source, interleave
from oat.errors import DataError
from oat.seeds import Seeds, uniforms
from oat.text.renderer import Renderer

SETTINGS = settings(derandomize=True, deadline=None, max_examples=30)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    """Return a renderer of plain prompts with one token per character. Other characters than these have no
    token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    built = Tokenizer(models.WordLevel({character: i for i, character in enumerate("0123456789+=abcdefghx")}))
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


@pytest.mark.inventory(104)
@SETTINGS
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    limit=st.integers(1, 12),
    shuffle=st.booleans(),
)
def test_references_stay_with_their_prompts_after_drops(tmp_path_factory, renderer, lengths, limit, shuffle):
    records = [
        {"prompt": "x" * length, "answer": f"{row}/{length}"} for row, length in enumerate(lengths, start=1)
    ]
    path = write(tmp_path_factory.mktemp("data"), records)
    kept = [length for length in lengths if length <= limit]
    if not kept:
        with pytest.raises(DataError, match=f"longer than {limit} tokens"):
            Prompts(path, renderer, Seeds(0), reference_key="answer", max_tokens=limit)
        return
    prompts = Prompts(path, renderer, Seeds(0), reference_key="answer", max_tokens=limit, shuffle=shuffle)
    dropped = len(lengths) - len(kept)
    assert (prompts.size, prompts.dropped) == (len(kept), dropped)
    left_out = f"{path}: {dropped} of {len(lengths)} prompts are longer than {limit} tokens and left out"
    assert prompts.notes == (
        f"{path}: read as prompt-only (prompt); further columns, for the reward: answer",
        *([left_out] if dropped else []),
    )
    for taken in (prompts.take(prompts.size), prompts.all()):
        assert sorted(len(prompt.messages[0].content) for prompt in taken) == sorted(kept)
        assert all(prompt.reference == f"{prompt.row}/{len(prompt.messages[0].content)}" for prompt in taken)
        assert all(prompt.columns == {"answer": prompt.reference} for prompt in taken)


@SETTINGS
@given(
    size=st.integers(1, 9),
    takes=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    epochs=st.sampled_from([None, 1, 3]),
)
def test_the_cursor_resumes_at_any_cut(tmp_path_factory, renderer, size, takes, cut, epochs):
    path = sums(tmp_path_factory.mktemp("data"), size)

    def build():
        return Prompts(path, renderer, Seeds(5), reference_key="answer", epochs=epochs)

    unbroken = build()
    expected = [prompt for n in takes for prompt in unbroken.take(n)]
    first, second = build(), build()
    taken = [prompt for n in takes[:cut] for prompt in first.take(n)]
    assert first.state["taken"] == len(taken)
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
    assert prompts.state["taken"] == 6


def test_all_numbers_the_kept_prompts_and_leaves_the_cursor(tmp_path, renderer):
    path = write(tmp_path, [{"prompt": "x"}, {"prompt": "xxxx"}, {"prompt": "xx"}])
    prompts = Prompts(path, renderer, Seeds(0), max_tokens=2)
    assert [(prompt.row, prompt.occurrence) for prompt in prompts.all()] == [(1, 0), (3, 1)]
    assert prompts.state["taken"] == 0
    assert prompts.dropped == 1


def test_a_prompt_that_cannot_be_rendered_names_its_line(tmp_path, renderer):
    path = write(
        tmp_path,
        [
            {"prompt": "x"},
            {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "x"}]},
        ],
    )
    for limit in (5, None):
        with pytest.raises(
            DataError,
            match=r"data\.jsonl:2: field 'prompt': the prompt cannot be rendered: .*needs a chat template",
        ):
            Prompts(path, renderer, Seeds(0), max_tokens=limit)
    other = write(tmp_path, [{"question": "x"}, {"question": "y"}])
    with pytest.raises(
        DataError,
        match=(
            r"data\.jsonl:2: field 'question': .*the tokenizer of .* cannot encode 'y' .*another model "
            r"\(`model\.path`\)"
        ),
    ):
        Prompts(other, renderer, Seeds(0), prompt_key="question")


def test_a_prompt_that_has_no_room_is_refused_with_its_place(tmp_path, renderer):
    path = write(tmp_path, [{"prompt": "x" * size} for size in (3, 7, 5, 6, 9)])
    assert Prompts(path, renderer, Seeds(0), room=9).size == 5
    message = (
        rf"^{path}:2: the prompt has 7 tokens, .* room for 5; 3 of 5 prompts are too long; drop longer "
        r"ones \(prompts\.max_tokens: 5\)"
    )
    with pytest.raises(DataError, match=message):
        Prompts(path, renderer, Seeds(0), room=5)
    kept = Prompts(path, renderer, Seeds(0), room=5, max_tokens=5)
    assert (kept.size, kept.dropped) == (2, 3)
    with pytest.raises(DataError, match=rf"{path}:4: the prompt has 6 tokens, .*1 of 3 prompts"):
        Prompts([Source([{"prompt": "x"}]), Source(path)], renderer, Seeds(0), room=5, max_tokens=6)
    with pytest.raises(
        DataError, match=r"room for 0; 5 of 5 prompts are too long; lower sampling\.max_new_tokens"
    ):
        Prompts(path, renderer, Seeds(0), room=-2)


def letters(letter, size):
    """Return records with the prompts `letter`0, `letter`1 and so on."""
    return [{"prompt": f"{letter}{n}"} for n in range(size)]


def mixture(renderer, sizes, weights, **options):
    sources = [
        Source(letters("abcdefgh"[n], size), weight)
        for n, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    return Prompts(sources, renderer, Seeds(options.pop("seed", 0)), **options)


WEIGHTS = st.lists(st.sampled_from([0.01, 0.3, 1.0, 1.0, 2.0, 7.5]), min_size=1, max_size=5)


@SETTINGS
@given(weights=WEIGHTS, n=st.integers(0, 400), seed=st.integers(0, 3))
def test_interleaving_equals_a_merge_one_by_one_and_is_balanced_all_along(weights, n, seed):
    seeds, shares = Seeds(seed), [weight / sum(weights) for weight in weights]

    def place(number, turn):
        drawn = uniforms(np.array([seeds.key("mixture", number)], dtype=np.uint64), np.array([turn]))[0]
        return (turn + drawn) / shares[number], number, turn

    waiting = [place(number, 0) for number in range(len(weights))]
    heapq.heapify(waiting)
    expected = []
    for _ in range(n):
        _, number, turn = heapq.heappop(waiting)
        expected.append((number, turn))
        heapq.heappush(waiting, place(number, turn + 1))
    numbers, turns = interleave(weights, n, seeds)
    assert list(zip(numbers.tolist(), turns.tolist(), strict=True)) == expected
    for number, share in enumerate(shares):
        count = np.cumsum(numbers == number)
        assert np.all(np.abs(count - share * np.arange(1, n + 1)) <= 1 + share * len(weights))


def test_interleaving_is_seeded_and_without_a_pattern():
    orders = [interleave([1, 1], 400, Seeds(seed))[0] for seed in range(5)]
    assert len({tuple(order) for order in orders}) == 5
    for order in orders:
        assert 0.35 < order[::2].mean() < 0.65, "every second prompt comes from both sources"


@SETTINGS
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.2, 1.0, 3.0]), min_size=4, max_size=4),
    takes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    epochs=st.sampled_from([None, 1, 3]),
)
def test_a_mixture_is_one_order_that_resumes_at_any_cut(renderer, sizes, weights, takes, cut, epochs):
    def build():
        return mixture(renderer, sizes, weights[: len(sizes)], epochs=epochs)

    expected = build().take(sum(takes))
    first, second = build(), build()
    taken = [prompt for n in takes[:cut] for prompt in first.take(n)]
    second.load_state(json.loads(json.dumps(first.state)))
    taken += [prompt for n in takes[cut:] for prompt in second.take(n)]
    assert taken == expected
    assert [prompt.occurrence for prompt in taken] == list(range(len(taken)))
    assert len(taken) == (sum(takes) if epochs is None else min(sum(takes), epochs * sum(sizes)))


def test_every_source_of_a_mixture_goes_through_its_own_epochs(renderer):
    prompts = mixture(renderer, [4, 40], [1, 3])
    assert prompts.size == 44
    taken = contents(prompts.take(400))
    by_source = {letter: [text for text in taken if text[0] == letter] for letter in "ab"}
    assert abs(len(by_source["a"]) - 100) <= 2
    for letter, size in (("a", 4), ("b", 40)):
        passes = [by_source[letter][start : start + size] for start in range(0, 80, size)]
        assert all(sorted(one) == sorted(letters_of(letter, size)) for one in passes)
        assert len({tuple(one) for one in passes}) > 1
    assert [contents(mixture(renderer, [4], [1]).take(8))] == [by_source["a"][:8]], (
        "adding a source leaves the order of the first one"
    )
    in_order = contents(mixture(renderer, [4, 40], [1, 3], shuffle=False).take(40))
    assert [text for text in in_order if text[0] == "a"][:6] == ["a0", "a1", "a2", "a3", "a0", "a1"]


def letters_of(letter, size):
    return [record["prompt"] for record in letters(letter, size)]


def test_all_of_a_mixture_are_its_sources_one_after_the_other(renderer):
    prompts = mixture(renderer, [2, 3], [1, 5])
    assert contents(prompts.all()) == ["a0", "a1", "b0", "b1", "b2"]
    assert [prompt.occurrence for prompt in prompts.all()] == [0, 1, 2, 3, 4]


def test_limits_hold_for_each_source_of_a_mixture(renderer):
    sources = [
        Source([{"prompt": "x" * n} for n in (1, 5, 2, 1)]),
        Source([{"prompt": "1"}, {"prompt": "2"}]),
    ]
    prompts = Prompts(sources, renderer, Seeds(0), max_prompts=3, max_tokens=4)
    assert contents(prompts.all()) == ["x", "xx", "1", "2"]
    assert (prompts.size, prompts.dropped) == (4, 1)
    read = "records: read as prompt-only (prompt)"
    assert prompts.notes == (read, "records: 1 of 3 prompts are longer than 4 tokens and left out", read)
    with pytest.raises(DataError, match="empty list"):
        Prompts([], renderer, Seeds(0))


@pytest.mark.inventory(107)
@SETTINGS
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 4),
    takes=st.lists(st.integers(0, 6), max_size=6),
    epochs=st.sampled_from([None, 1, 2]),
)
def test_shards_are_disjoint_and_together_the_one_order(renderer, seed, count, takes, epochs):
    whole = mixture(renderer, [7, 4], [2, 1], seed=seed, epochs=epochs)
    shards = [
        mixture(renderer, [7, 4], [2, 1], seed=seed, epochs=epochs, shard=(rank, count))
        for rank in range(count)
    ]
    taken = [[prompt for n in takes for prompt in shard.take(n)] for shard in shards]
    together = sorted((prompt for part in taken for prompt in part), key=lambda prompt: prompt.occurrence)
    assert together == whole.take(count * sum(takes))
    for rank, (shard, part) in enumerate(zip(shards, taken, strict=True)):
        assert [prompt.occurrence for prompt in part] == [rank + count * place for place in range(len(part))]
        again = mixture(renderer, [7, 4], [2, 1], seed=seed, epochs=epochs, shard=(rank, count))
        again.load_state(shard.state)
        assert again.take(3) == shard.take(3)


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_is_none(renderer, shard):
    with pytest.raises(DataError, match="no shard"):
        mixture(renderer, [2], [1], shard=shard)


def test_a_run_mixes_its_sources_and_says_what_it_leaves_out(world, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text("def records():\n    return [{'prompt': f'{n}+a=', 'answer': n} for n in range(20)]\n")
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "1+1+1+1+1=", "answer": 5}\n{"prompt": "1=", "answer": 1}\n')
    sources = [{"path": f"{mine}:records", "weight": 3}, str(world.folder / "train.jsonl")]
    changes = {
        "prompts.path": sources,
        "prompts.max_tokens": 4,
        "evaluation.path": str(long),
        "tracking.samples": 4,
        "stop.max_steps": 2,
    }
    config = world.config("grpo", tmp_path, changes)
    assert oat("train", config) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("oat train: 2 steps in ")
    further = "; further columns, for the reward: answer"
    assert shown[1:6] == [
        f"oat train: {mine}:records: read as prompt-only (prompt){further}",
        f"oat train: {mine}:records: 10 of 20 prompts are longer than 4 tokens and left out",
        f"oat train: {world.folder / 'train.jsonl'}: read as prompt-only (prompt){further}",
        f"oat train: {long}: read as prompt-only (prompt){further}",
        f"oat train: {long}: 1 of 2 prompts are longer than 4 tokens and left out",
    ]
    samples = [json.loads(line) for line in (tmp_path / "grpo" / "samples.jsonl").read_text().splitlines()]
    first, *others = (
        json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()
    )
    assert first["prompts/dropped"] == 11, "of training and of evaluation"
    assert all("prompts/dropped" not in row for row in others)
    drawn = Counter("a" in sample["prompt"][0]["content"] for sample in samples)
    assert sum(drawn.values()) == 8
    assert abs(drawn[True] - 6) <= 2
    assert oat("train", config, "--stop.max_steps", 3) == 0, (
        "the resolved configuration reads as the one that was written"
    )


def test_settings_of_sources_that_nothing_reads(world, tmp_path, capsys):
    for changes, message in (
        ({"prompts.path": ["a.jsonl"], "prompts.split": "test"}, "nothing reads prompts.split"),
        ({"prompts.path": [{"path": "a.jsonl", "wieght": 2}]}, "did you mean `weight`"),
        ({"prompts.path": [{"weight": 2}]}, "`prompts.path.0.path` is missing"),
        ({"prompts.path": [{"path": "a.jsonl", "weight": 0}]}, "`prompts.path.0.weight` is 0"),
        ({"prompts.path": []}, "no source of prompts"),
        ({"prompts.split": "test"}, "expected a dataset, which has splits"),
    ):
        assert oat("train", world.config("grpo", tmp_path, changes)) == 2
        assert message in capsys.readouterr().err


@pytest.mark.sample("prompts.path", seconds=1.3)
@pytest.mark.parametrize("section", ["prompts.path", "evaluation.path"])
def test_what_is_wrong_with_a_prompt_is_said_before_the_run_and_its_remedies_work(
    world, tmp_path, capsys, section
):
    """A prompt is too long for the context of 64 tokens with responses of 4. The error comes before the run,
    and each remedy that it names works."""
    records = [{"prompt": f"{n % 10}+1=", "answer": "ab"} for n in range(20)]
    long = write_jsonl(tmp_path / "long.jsonl", [*records, {"prompt": "1" * 61, "answer": "a"}])
    config = world.config("grpo", tmp_path, {section: str(long), "stop.max_steps": 1})
    assert oat("train", config) == 2
    shown = capsys.readouterr()
    room = "60 (64 tokens less sampling.max_new_tokens: 4)"
    assert (
        f"{long}:21: the prompt has 61 tokens, and the model's context leaves room for {room}; 1 of 21 "
        "prompts are too long"
    ) in shown.err
    assert "step 0" not in shown.out
    for remedy in (
        ("--prompts.max_tokens", 60),
        ("--sampling.overflow", "cut"),
        ("--sampling.max_new_tokens", 3),
    ):
        assert oat("train", config, *remedy, "--run_dir", tmp_path / remedy[0]) == 0
    assert oat("train", config, "--prompts.max_tokens", 60) == 0, "nothing was begun that could contradict it"
    chat = write_jsonl(
        tmp_path / "chat.jsonl",
        [
            *records,
            {"prompt": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], "answer": "a"},
        ],
    )
    assert oat("train", config, f"--{section}", chat, "--run_dir", tmp_path / "chat") == 2
    assert (
        f"{chat}:21: field 'prompt': the prompt cannot be rendered: a conversation of system, user needs a"
        in capsys.readouterr().err
    )


def test_a_prompt_as_long_as_the_context(world, tmp_path, capsys):
    for size, code in ((64, 0), (65, 2)):
        path = write_jsonl(
            tmp_path / f"{size}.jsonl",
            [{"prompt": "1" * size, "answer": "ab"}, {"prompt": "1=", "answer": "ab"}],
        )
        changes = {
            "prompts.path": str(path),
            "sampling.overflow": "cut",
            "stop.max_steps": 1,
            "evaluation": None,
        }
        assert (
            oat("train", world.config("grpo", tmp_path, changes), "--run_dir", tmp_path / str(size)) == code
        )
    assert (
        "65.jsonl:1: the prompt has 65 tokens, and the model's context leaves room for 64; 1 of 2"
        in capsys.readouterr().err
    )


def test_recorded_responses_leave_their_prompts_the_whole_context(world, tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "1" * 61, "good": "a", "bad": "b"}] * 8)
    changes = {
        "prompts": {"path": str(path), "responses": ["good", "bad"]},
        "oracle.name": "recorded",
        "stop.max_steps": 1,
        "evaluation": None,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0


def test_recorded_responses_have_to_fit_the_context(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt with its responses must fit the context of 64 tokens. Too long records are dropped and
    counted, or the first of them is named in an error."""
    records = [{"prompt": "1+1=", "chosen": "a" * (40 * number), "rejected": "b"} for number in (1, 2, 1, 3)]
    data = write_jsonl(tmp_path / "pairs.jsonl", records)
    changes = {
        "prompts": {"path": str(data)},
        "oracle": {"name": "recorded"},
        "evaluation": None,
        "stop.max_steps": 1,
        "sampling": None,
    }
    config = world.config("dpo", tmp_path, changes)
    for command in ("check", "train"):
        assert oat(command, config) == 2
        said = capsys.readouterr().err
        assert f"{data}:2: the prompt and its longest response have 8" in said
        assert "(2 of 4 records are too long); drop longer ones (prompts.max_tokens: 64)" in said
    assert oat("train", config, "--prompts.max_tokens", 64) == 0
    first = json.loads((tmp_path / "dpo" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["prompts/dropped"] == 2
