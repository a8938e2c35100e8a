"""The results of an evaluation: its records, the numbers made of them, and a gold oracle."""

import itertools
import json
import re
import signal
import statistics
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluations import evaluated, killed_and_continued, records, rows
from fixtures import World, forked, kill_at, make_model, named, oat, write_jsonl
from transformers import AutoTokenizer

from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.errors import ConfigError, OracleError
from oat.ledger.audit import contradictions
from oat.ledger.store import Store
from oat.metrics import NAMES, Metrics
from oat.oracles.extraction import load_extractor
from oat.resolve.resolve import resolve
from oat.types import Price


@pytest.mark.inventory(98)
def test_a_record_has_the_five_keys(world: World, tmp_path: Path) -> None:
    """If the data call the prompt `question`, the record has it under `question`, and the text that the model
    read under `format_question`."""
    turns = ["<|im_start|>", "<|im_end|>"]
    make_model(tmp_path / "model", tokens=["\n", *"abcdefghijklmnopqrstuvwxyz0123456789+=", *turns])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": turns})
    tokenizer.save_pretrained(tmp_path / "model")
    path = str(
        write_jsonl(tmp_path / "asked.jsonl", [{"question": f"{a}+1=", "answer": "b"} for a in range(3)])
    )
    prompts = {"path": path, "prompt_key": "question", "reference_key": "answer"}
    changes = {
        "model.path": str(tmp_path / "model"),
        "render": {"template": "chatml"},
        "prompts": prompts,
        "evaluation.path": path,
    }
    assert oat("train", world.config("grpo", tmp_path, {**changes, "stop.max_steps": 1})) == 0
    found = records(tmp_path / "grpo", 1)
    assert len(found) == 3 * 2 + 3
    for record, (mode, a, sample) in zip(
        found,
        [
            *(("sampled", a, sample) for a in range(3) for sample in range(2)),
            *(("greedy", a, 0) for a in range(3)),
        ],
        strict=True,
    ):
        assert record["question"] == f"{a}+1="
        assert record["format_question"] == f"<|im_start|>user\n{a}+1=<|im_end|>\n<|im_start|>assistant\n"
        assert (record["reference"], record["generator"]) == ("b", "grpo")
        assert record["value"] == pytest.approx(
            record["output"].count("a") + 0.1 * record["output"].count("b")
        )
        assert (record["mode"], record["sample"], record["mark"]) == (mode, sample, "ok")
        assert record.keys() == {
            "question",
            "format_question",
            "output",
            "reference",
            "generator",
            "mode",
            "sample",
            "value",
            "mark",
        }


def test_a_conversation_is_recorded_as_messages(world: World, tmp_path: Path) -> None:
    turns = ["<|im_start|>", "<|im_end|>"]
    make_model(tmp_path / "model", tokens=["\n", *"abcdefghijklmnopqrstuvwxyz", *turns])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": turns})
    tokenizer.save_pretrained(tmp_path / "model")
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "kind"}]
    path = str(write_jsonl(tmp_path / "asked.jsonl", [{"prompt": talk}]))
    (tmp_path / "one.py").write_text(
        "def one(prompts, completions, **columns):\n    return [1.0] * len(completions)\n", encoding="utf-8"
    )
    changes = {
        "model.path": str(tmp_path / "model"),
        "render": {"template": "chatml"},
        "prompts": {"path": path},
        "evaluation.path": path,
    }
    assert (
        oat(
            "train",
            world.config(
                "grpo",
                tmp_path,
                {**changes, "oracle.name": f"{tmp_path / 'one.py'}:one", "stop.max_steps": 1},
            ),
        )
        == 0
    )
    assert records(tmp_path / "grpo", 0)[0]["prompt"] == talk


@pytest.mark.sample("2", seconds=0.6)
@pytest.mark.inventory(98)
@pytest.mark.parametrize("call", [1, 2])
def test_a_record_file_is_whole_or_not_there(world: World, tmp_path: Path, call: int) -> None:
    """A run is killed while it writes an evaluation's file: before the sync of its content, or of its name.
    The file is complete or missing."""
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1})

    def action() -> int:
        from oat.evaluation.records import RecordFiles

        write = RecordFiles.write

        def armed(self: RecordFiles, step: int, lines: Any) -> None:
            kill_at(*named("oat.files:sync_to_disk"), call)
            write(self, step, lines)

        RecordFiles.write = armed  # type: ignore[method-assign]
        return oat("train", config)

    assert forked(action, tmp_path / "log") == -signal.SIGKILL
    file = tmp_path / "grpo" / "evaluations" / "step_00000000.jsonl"
    assert file.exists() == (call == 2)
    assert not file.exists() or len(records(tmp_path / "grpo", 0)) == 12
    assert oat("train", config) == 0
    assert len(records(tmp_path / "grpo", 0)) == 12


@pytest.mark.inventory(99)
def test_an_oracle_that_always_says_three_quarters(world: World, tmp_path: Path, judges: str) -> None:
    own = {"name": f"{judges}:Constant", "value": 0.75, "answers": "compare"}
    assert (
        oat(
            "train",
            world.config(
                "dpo", tmp_path, {"evaluation.oracle": own, "evaluation.intervals": True, "stop.max_steps": 1}
            ),
        )
        == 0
    )
    for row in rows(tmp_path / "dpo"):
        for mode in ("sampled", "greedy"):
            assert [row[f"eval/{mode}{end}"] for end in ("", "_low", "_high")] == [0.75] * 3
            assert [row[f"eval/{mode}_win_rate{end}"] for end in ("", "_low", "_high")] == [1.0] * 3
            assert row[f"eval/{mode}_win_rate_lc"] == pytest.approx(1.0, abs=1e-6)


def test_numbers_are_those_of_the_records(world: World, tmp_path: Path, judges: str) -> None:
    """The reported numbers equal counts over the evaluation's file of records."""
    wanted = {
        "samples": 5,
        "pass_at": [1, 3],
        "majority_at": [3],
        "answers": f"{judges}:first_letter",
        "intervals": True,
        "oracle": f"{judges}:has_a",
    }
    changes = {f"evaluation.{name}": value for name, value in wanted.items()}
    assert oat("train", world.config("grpo", tmp_path, {**changes, "stop.max_steps": 1})) == 0
    row, found = rows(tmp_path / "grpo")[1], records(tmp_path / "grpo", 1)
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        assert record["answer"] == (record["output"][:1] or None)
        if record["mode"] == "sampled":
            by_prompt.setdefault(record["prompt"], []).append(record)
    for k in (1, 3):
        shares = [
            statistics.fmean(max(r["value"] for r in drawn) for drawn in itertools.combinations(each, k))
            for each in by_prompt.values()
        ]
        assert row[f"eval/pass@{k}"] == pytest.approx(statistics.fmean(shares))
    voted = []
    for each in by_prompt.values():
        votes = Counter(record["answer"] for record in each[:3] if record["answer"] is not None)
        best = [answer for answer, count in votes.items() if count == max(votes.values())]
        worth = [statistics.fmean(r["value"] for r in each[:3] if r["answer"] == answer) for answer in best]
        voted.append(statistics.fmean(worth) if worth else statistics.fmean(r["value"] for r in each[:3]))
    assert row["eval/majority@3"] == pytest.approx(statistics.fmean(voted))
    means = [statistics.fmean(record["value"] for record in each) for each in by_prompt.values()]
    assert row["eval/sampled"] == pytest.approx(statistics.fmean(means))
    assert (
        min(means) <= row["eval/sampled_low"] <= row["eval/sampled"] <= row["eval/sampled_high"] <= max(means)
    )
    assert 0 <= row["eval/sampled_length"] <= 4
    assert "eval/sampled_win_rate" not in row


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("last_number", "7 or 72.0", Decimal(72)),
        ("last_number", "none", None),
        ("marked_number", "1 #### 1,000 of 3", Decimal(1000)),
        ("tagged_answer", "<answer>1</answer> <answer> 1 + 2 </answer>", "1 + 2"),
        ("tagged_answer", "<answer>1", None),
        ("JUDGES:first_letter", "ab", "a"),
    ],
)
def test_answers_by_name(judges: str, name: str, text: str, answer: object) -> None:
    assert load_extractor(name.replace("JUDGES", judges))(text) == answer


def test_answers_that_no_vote_can_count(judges: str) -> None:
    with pytest.raises(
        OracleError,
        match=r"judges.py:broken raised ValueError: no answer at all \(line \d+ of judges\.py\), asked",
    ):
        load_extractor(f"{judges}:broken")("ab")
    with pytest.raises(OracleError, match=r"judges.py:listed raised TypeError: unhashable"):
        load_extractor(f"{judges}:listed")("ab")
    with pytest.raises(ConfigError, match=r"judges.py:NUMBER is int, no function"):
        load_extractor(f"{judges}:NUMBER")


def test_length_is_taken_out_of_a_win_rate(world: World, tmp_path: Path, judges: str) -> None:
    """The oracle prefers the longer response. The plain win rate is high, and the length-controlled one is
    about 0.5."""
    changes = {
        "evaluation.oracle": f"{judges}:longer",
        "evaluation.samples": 64,
        "evaluation.greedy": False,
        "stop.max_steps": 1,
    }
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    row = rows(tmp_path / "dpo")[0]
    assert row["eval/sampled_win_rate"] > 0.62
    assert row["eval/sampled_win_rate_lc"] == pytest.approx(0.5, abs=0.1)


def test_a_second_opinion(world: World, tmp_path: Path, judges: str) -> None:
    """The gold oracle is asked about the same responses as the other oracle, here in another kind of
    question. It has its own account, and training does not change."""
    changes = {
        "evaluation.oracle": f"{judges}:letters",
        "evaluation.gold": f"{judges}:longer",
        "evaluation.samples": 6,
        "oracle.repeats": 0,
        "stop.max_steps": 2,
    }
    assert oat("train", world.config("grpo", tmp_path, changes)) == 0
    row, found = rows(tmp_path / "grpo")[2], records(tmp_path / "grpo", 2)
    for record in found:
        size = len(record["output"])
        assert record["gold"] == (0.9 if size > 2 else 0.5 if size == 2 else 0.2)
        assert (record["value"], record["gold_mark"]) == (record["output"].count("a"), "ok")
    for mode in ("sampled", "greedy"):
        assert row[f"eval/gold_{mode}"] == pytest.approx(
            statistics.fmean(record["gold"] for record in found if record["mode"] == mode)
        )
    orders = []
    for one, two in itertools.combinations(found, 2):
        product = (one["value"] - two["value"]) * (one["gold"] - two["gold"])
        if one["prompt"] == two["prompt"] and product:
            orders.append(product > 0)
    assert row["eval/gold_agreement"] == pytest.approx(statistics.fmean(orders))
    with closing(Store(tmp_path / "grpo" / "ledger.sqlite")) as store:
        assert store.spent("eval") == store.spent("gold") == Price(2 * 4 * 7)
        assert contradictions(store) == []


def test_a_second_opinion_of_the_contrary(world: World, tmp_path: Path, judges: str) -> None:
    changes = {
        "evaluation.oracle": f"{judges}:letters",
        "evaluation.gold": f"{judges}:fewer_letters",
        "evaluation.samples": 6,
    }
    assert oat("train", world.config("grpo", tmp_path, {**changes, "stop.max_steps": 1})) == 0
    row = rows(tmp_path / "grpo")[0]
    assert (row["eval/gold_agreement"], row["eval/gold_sampled"]) == (0.0, -row["eval/sampled"])


def test_a_second_opinion_that_fails_or_has_no_budget(world: World, tmp_path: Path, judges: str) -> None:
    """If the gold oracle fails or has no budget left, the numbers of the evaluation's other oracle are
    reported."""
    for gold, name in (
        ({"fails": "collect"}, "eval/gold_failed"),
        ({"max_queries": 24}, "eval/gold_skipped"),
    ):
        folder = tmp_path / name.rpartition("/")[2]
        folder.mkdir()
        config = world.config(
            "grpo", folder, {"evaluation.gold": {"name": f"{judges}:Constant", **gold}, "oracle.repeats": 0}
        )
        with pytest.warns(
            UserWarning,
            match="second opinion after 0 steps failed.*down"
            if "fails" in gold
            else r"24 of 24 are spent \(evaluation.gold.max_",
        ):
            assert oat("train", config) == 0
        assert evaluated(folder / "grpo").keys() == {0, 2, 4}
        assert evaluated(folder / "grpo", name).keys() == ({0, 2, 4} if "fails" in gold else {4})
        assert "gold" not in records(folder / "grpo", 4)[0]


@pytest.mark.slow(
    instead=(" tests/evaluation/test_evaluate_box.py::test_a_killed_run_makes_the_same_evaluations"),
    seconds=3.0,
)
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("answers are recorded", 11),
        ("oat.ledger.outstanding:Outstanding.submit", 15),
        ("an evaluation is written", 2),
    ],
)
def test_killed_in_a_second_opinion(world: World, tmp_path: Path, judges: str, place: str, call: int) -> None:
    config = world.config("grpo", tmp_path, {"evaluation.gold": f"{judges}:letters"})
    assert oat("train", config, "--run_dir", tmp_path / "unbroken") == 0
    killed_and_continued(config, tmp_path / "killed", place, call)
    assert digest_run(tmp_path / "killed") == digest_run(tmp_path / "unbroken")


def test_oat_eval_knows_all_of_it(
    world: World, tmp_path: Path, judges: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oat eval` computes numbers for a run that did not report them, from its configuration and from its
    directory."""
    config = world.config("grpo", tmp_path, {"stop.max_steps": 1})
    assert oat("train", config) == 0
    answers = f"{judges}:first_letter"
    wanted: Mapping[str, Any] = {
        "samples": 4,
        "intervals": True,
        "pass_at": [2],
        "majority_at": [4],
        "answers": answers,
        "slot": "reference",
    }
    flags = itertools.chain(*((f"--evaluation.{name}", json.dumps(value)) for name, value in wanted.items()))
    flags_ = [
        *flags,
        "--evaluation.oracle",
        f"{judges}:has_a",
        "--evaluation.gold",
        json.dumps({"name": f"{judges}:letters", "max_queries": 20}),
    ]
    for target in (config, tmp_path / "grpo"):
        capsys.readouterr()
        assert oat("eval", target, *flags_) == 0
        found = json.loads(capsys.readouterr().out)
        names = {
            "sampled",
            "sampled_low",
            "sampled_high",
            "sampled_length",
            "greedy",
            "pass@2",
            "majority@4",
            "gold_sampled",
            "gold_agreement",
        }
        assert {f"eval/{name}" for name in names} <= found.keys()
    with pytest.warns(UserWarning, match=r"may cost 20 queries, and 0 of 19 are spent"):
        assert oat("eval", config, *flags_, "--evaluation.max_queries", "19", "--oracle.repeats", "0") == 0
    assert json.loads(capsys.readouterr().out) == {"step": 0, "eval/skipped": 1.0}


def test_every_number_is_reported(
    world: World, tmp_path: Path, judges: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation reports every metric of the list. Left out are metrics of failures and skipped
    evaluations, which other tests cover, of training samples, of pairs, and of the best of several."""
    wanted = {
        "kl": True,
        "oracle": f"{judges}:longer",
        "gold": f"{judges}:letters",
        "intervals": True,
        "samples": 4,
        "pass_at": [4],
        "majority_at": [2],
    }
    changes = {f"evaluation.{name}": value for name, value in {**wanted, "answers": "last_number"}.items()}
    assert oat("eval", world.config("dpo", tmp_path, changes)) == 0
    found = {re.sub(r"@[0-9]+", "@k", name) for name in json.loads(capsys.readouterr().out)} - {"step"}
    listed = {
        name
        for name in NAMES
        if name.startswith("eval/")
        and "online" not in name
        and not name.startswith(("eval/pairs/", "eval/best", "eval/gold_best"))
    }
    assert found == listed - {"eval/failed", "eval/skipped", "eval/gold_failed", "eval/gold_skipped"}


def test_a_number_in_a_name_stands_for_any() -> None:
    metrics = Metrics()
    metrics.add({"eval/pass@1": 0.5, "eval/pass@128": 1.0})
    assert metrics.values == {"eval/pass@1": 0.5, "eval/pass@128": 1.0}
    for name in ("eval/pass@", "eval/pass@x", "eval/pass@1.5", "eval/passed@1"):
        with pytest.raises(ConfigError, match="no list knows"):
            metrics.add({name: 1.0})


def test_the_page_is_valid(world: World, tmp_path: Path) -> None:
    """The settings in docs/evaluation.md are valid."""
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    sections = [yaml.safe_load(block.split("```")[0])["evaluation"] for block in page.split("```yaml\n")[1:]]
    assert len(sections) >= 3
    for section in sections:
        config = world.config("dpo", tmp_path, {"evaluation": section})
        settings, origins = load_config(config)
        assert resolve(settings, origins).config.evaluation is not None
