"""The smallest size of each benchmark, with `oat` alone: it runs, reports its counts, and computes the right
numbers."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = {"mean": 16, "cap": 64}


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    paths = [str(BENCHMARKS), str(BENCHMARKS / "sides")]
    sys.path[:0] = paths
    yield
    for path in paths:
        sys.path.remove(path)


@pytest.mark.slow
def test_generation() -> None:
    from generation import compare, growth

    row = compare("tiny", "float32", 1, sys.executable, None, {"prompt_count": 8, "samples": 4, "cap": 128})
    assert min(row["tokens_per_second"][side] for side in ("oat", "transformers")) > 0
    assert row["settings"]["transformers"]["batch"] in (8, 16, 32, 64, 128, 256)
    assert 0 < row["padding"] < 0.3
    assert row["shares"]["oat"] > 0
    assert set(growth("tiny", 1, requests=(8, 16), cap=8)["seconds"]) == {"8", "16"}


def test_the_end_of_text_has_the_probability_it_should(tmp_path: Path) -> None:
    from task import END, make_model

    make_model("tiny", tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        probabilities = lm(torch.randint(3, 256, (8, 32))).logits.softmax(-1)[..., END]
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 1 / 32), rtol=0.1, atol=0)


def test_proofs() -> None:
    from proofs import compare

    row = compare("tiny", 1, 1)
    assert set(row["milliseconds"]) == {"copy", "crc32", "sums", "arrived", "all", "sample", "probe"}
    assert row["probe_gap"]["float32"] < 1e-5 < row["probe_gap"]["bfloat16"] < 0.05


@pytest.mark.slow(instead="tests/golden compares with the numbers of the padded learner", seconds=5.5)
def test_the_update_is_that_of_padded_rows(tmp_path: Path) -> None:
    """The gradient's norm equals that of autograd over padded rows. The advantage is the reward minus its
    group's mean, divided by the group's deviation; the ratio is 1 at the start. The loss is a mean over each
    sequence, then over sequences."""
    from peers import Side
    from task import make_model, prompts, ragged, reward, text

    make_model("tiny", tmp_path)
    with Side(sys.executable, "oat_side.py") as side:
        side.ask("open", model=str(tmp_path), threads=1)
        side.ask("learn", prompt_count=3, samples=4, micro_tokens=256, **LENGTHS)
        found = side.ask("update")
    inputs, responses = prompts(3, 256), ragged(12, 256, **LENGTHS)
    rows = [np.concatenate([inputs[number // 4], ids]) for number, ids in enumerate(responses)]
    width = max(map(len, rows))
    ids_NT = torch.tensor(np.stack([np.pad(row, (0, width - len(row))) for row in rows]))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    logps_NT = lm(ids_NT).logits[:, :-1].log_softmax(-1).gather(-1, ids_NT[:, 1:, None])[..., 0]
    rewards_BG = torch.tensor([reward(text(ids)) for ids in responses]).view(3, 4)
    advantages_N = (
        (rewards_BG - rewards_BG.mean(1, keepdim=True)) / (rewards_BG.std(1, keepdim=True) + 1e-4)
    ).flatten()
    terms = []
    for number, row in enumerate(rows):
        trained_T = logps_NT[number, len(inputs[number // 4]) - 1 : len(row) - 1]
        terms.append(-((trained_T - trained_T.detach()).exp() * advantages_N[number]).mean())
    torch.stack(terms).mean().backward()
    norm = torch.stack(
        [parameter.grad.norm() for parameter in lm.parameters() if parameter.grad is not None]
    ).norm()
    assert norm > 0.1
    assert found["tokens"] == sum(map(len, rows))
    assert found["padding"] == 0
    assert 0 <= found["attention_padding"] < 0.3
    assert found["update_gb"] > 0
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_best_of_what_is_tried() -> None:
    from peers import best_of

    rates = {1: 5.0, 2: 10.0, 4: 10.4, 8: 8.4, 16: 8.2, 32: 99.0}
    assert best_of(list(rates), rates.__getitem__) == (2, {1: 5.0, 2: 10.0, 4: 10.4, 8: 8.4, 16: 8.2})
    assert best_of([4], rates.__getitem__) == (4, {4: 10.4})


def test_the_best_batch_of_generate_may_be_a_small_one() -> None:
    from generation import _best_batch

    rates, asked = {32: 10.0, 64: 7.0, 16: 12.0, 8: 11.0}, []
    assert _best_batch(lambda rows: asked.append(rows) or rates[rows]) == (16, rates)
    assert asked == [32, 64, 16, 8]
    assert _best_batch(lambda rows: float(rows)) == (256, {rows: float(rows) for rows in (32, 64, 128, 256)})


def test_the_spread_is_of_the_repetitions() -> None:
    from peers import spread

    answers = {
        "oat": [{"tokens": 10, "seconds": 1.0}, {"tokens": 8, "seconds": 1.0}],
        "trl": [{"tokens": 10, "seconds": 2.0}, {"tokens": 8, "seconds": 4.0}],
    }
    assert spread(answers) == {"trl": (2.0, 4.0)}


@pytest.mark.slow
def test_update_and_step() -> None:
    import step
    import update

    assert update.compare("tiny", 1, None, LENGTHS)["tokens_per_second"]["oat"] > 0
    row = update.growth("tiny", 1, tokens=700, copies=(1, 2))
    assert row["counts"]["2"] == 2 * row["counts"]["1"] > 700
    row = step.compare("tiny", 1, None, {"prompt_count": 4, "samples": 2, "cap": 16})
    assert row["samples_per_second"]["oat"] > 0
    assert row["peak_gb"]["oat"] > 0


@pytest.mark.slow(instead="test_ledger, and the tests of the benchmarks' own arithmetic", seconds=8)
def test_steps_with_short_responses(tmp_path: Path) -> None:
    from short import compare

    from oat.models.loading import save_lm
    from oat.quickstart.task import build_model, build_task, build_tokenizer

    tokenizer = build_tokenizer()
    save_lm(build_model(tokenizer, 0, hidden=32, layers=1), tokenizer, str(tmp_path / "start"))
    build_task(0, demonstrations=1).write(tmp_path)
    row = compare(1, 2, None, {"prompts": 2, "samples": 2}, str(tmp_path))
    assert 0 < row["parts"]["learn"] + row["parts"]["sample"] <= row["seconds"]["oat"]


@pytest.mark.slow(
    instead="tests/protocol/test_ppo.py compares runs with a straight implementation", seconds=85
)
@pytest.mark.parametrize("shape", ["tiny", "quickstart"])
def test_ppo(shape: str) -> None:
    """The policy begins at the reference, and scores and values come from the judge. The quickstart's
    tokenizer has no unknown token."""
    from ppo import compare

    row = compare(shape, 1, None)
    assert row["steps_per_second"]["oat"] > 0
    assert row["peak_gb"]["oat"] > 0
    assert 0 < row["length"]["oat"] <= 8
    assert row["kl"]["oat"] == pytest.approx(0, abs=1e-3)
    assert row["value_loss"]["oat"] > 0
    assert 0 < abs(row["score"]["oat"]) < 1


def test_the_page_has_a_place_for_every_table() -> None:
    import tables

    page = tables.PAGE.read_text(encoding="utf-8")
    for name in tables.TABLES:
        assert page.count(f"<!-- {name} -->") == page.count(f"<!-- end of {name} -->") == 1


@pytest.mark.slow(instead="test_ledger, and the tests of the benchmarks' own arithmetic", seconds=12.1)
def test_direct(tmp_path: Path) -> None:
    """The benchmark of DPO runs four steps of four pairs. Its first loss is that of a policy that equals the
    reference. The ids are those of the texts, with their end tokens."""
    import direct
    from peers import Side
    from task import END, digest, make_model, pairs

    row = direct.compare("tiny", 4, None, LENGTHS)
    assert row["samples_per_second"]["oat"] > 0
    assert row["peak_gb"]["oat"] > 0
    assert row["padding"]["oat"] == 0
    assert row["losses"]["oat"][0] == pytest.approx(np.log(2), abs=1e-6)
    assert len(set(row["losses"]["oat"])) == 4

    make_model("tiny", tmp_path)
    with Side(sys.executable, "oat_side.py") as side:
        side.ask("open", model=str(tmp_path), threads=1)
        side.ask("direct", pair_count=3, steps=1, rate=1e-5, micro_tokens=256, **LENGTHS)
        found = side.ask("step")
    texts = [
        pair["prompt"] + pair[name] for pair in pairs(3, 256, **LENGTHS) for name in ("chosen", "rejected")
    ]
    assert found["ids"] == digest([*(int(word[1:]) for word in text.split()), END] for text in texts)


@pytest.mark.slow(
    instead="tests/models/test_lm.py compares log-probabilities with those of transformers", seconds=5.4
)
def test_logps() -> None:
    from logps import compare

    row = compare(32, tokens=64, repetitions=1, vocabulary=30_000)
    assert max(row["errors"]["float32"].values()) < 1e-5
    assert max(row["errors"]["float64"].values()) < 1e-10


@pytest.mark.slow(
    instead="tests/functional/test_functional_returns.py compares the estimates with a loop", seconds=5.0
)
@pytest.mark.parametrize("kind", ["equal", "with gaps"])
def test_gae(kind: str) -> None:
    from gae import compare

    row = compare(kind, 1, rows=16, tokens=256)
    assert (row["settings"]["oat"]["tokens"] == 16 * 256) == (kind == "equal")
    assert 0 < row["errors"]["float32"] < 1e-5
    assert 0 < row["errors"]["float64"] < 1e-12
    assert row["spread"][0] <= row["ratio"] <= row["spread"][1]


@pytest.mark.slow(instead="the tests of tests/ledger", seconds=3.0)
def test_ledger(tmp_path: Path) -> None:
    from ledger import opening, rate, share

    found = share(tmp_path, steps=2, held_out=8)
    assert 0 < found["ledger"] + found["checkpoints"] + found["oracle"] < found["run"]
    assert found["share"] == pytest.approx((found["ledger"] + found["checkpoints"]) / found["run"])
    assert rate(tmp_path, rounds=3) > 0
    assert opening(tmp_path, 2000) > 0


@pytest.mark.slow
def test_remote(tmp_path: Path) -> None:
    """The benchmark of the reward server starts two servers and reports plausible figures."""
    from remote import measure

    found = measure(tmp_path, requests=200, soak=0)
    assert found["ratio"] == found["together"] / found["alone"] > 0
    assert 0 < found["p50_s"] <= found["p99_s"]


@pytest.mark.parametrize("asked", [[], ["two"]])
def test_tables_are_written_where_the_page_names_them(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tables

    page = tmp_path / "page.md"
    page.write_text(
        (
            "before\n<!-- one -->\nold\n<!-- end of one -->\nbetween\n<!-- two -->\n<!-- end of two -->\n"
            "after\n"
        ),
        encoding="utf-8",
    )
    made = {
        name: lambda peers, name=name: iter([["of", "with"], [name, f"{peers.trl} {peers.vllm}"]])
        for name in ("one", "two")
    }
    monkeypatch.setattr(tables, "PAGE", page)
    monkeypatch.setattr(tables, "TABLES", made)
    monkeypatch.setattr(sys, "argv", ["tables.py", *asked, "--trl", "T", "--trl-ppo", "P", "--vllm", "V"])
    tables.main()
    written = page.read_text(encoding="utf-8")
    assert ("old" in written) == bool(asked)
    assert [place for place in ("before", "between", "after") if place not in written] == []
    assert "<!-- two -->\n| of | with |\n| --- | --- |\n| two | T V |\n\n*" in written


def test_turns() -> None:
    from turns import compare

    row = compare("tiny", 3, 2, 8, 1, {"prompt_count": 2, "samples": 2, "said": 2})
    assert row["ratios"].keys() == {"kept", "again", "own"}
    assert min(row["seconds"].values()) > 0


def test_explore_cost() -> None:
    """Keeping hidden states does not change the tokens; the script asserts it."""
    import explore_cost

    row = explore_cost.compare("tiny", 1)
    assert row["features"] == 64
    assert min(row["seconds"][part] for part in ("generate", "ensemble", "rule", "pass", "learn")) > 0
    assert row["shares"].keys() == explore_cost.SHARES.keys()
    load = {"candidates": 3, "features": 5, "members": 2, "hidden": 4}
    found = explore_cost.rate(1, load, (8, 16))
    assert found["operations"] == 2 * 3 * 2 * (5 * 4 + 4 * 4 + 4)
    assert found["spread"][0] <= found["ratio"] <= found["spread"][1]


@pytest.mark.slow(instead="tests/processes/test_ray.py", seconds=40)
def test_apart() -> None:
    """Runs with actors have the digests of the local run, and an actor that is killed is replaced."""
    import apart

    row = apart.steps("tiny", 1, 2)
    assert row["same_digests"]
    assert min(row["seconds"].values()) > 0
    assert apart.starts(1)["ratio"] > 0
    for runtime in apart.RUNTIMES:
        row = apart.transfer("tiny", 1, 2, runtime)
        assert row["bytes"] > 100_000
        assert row["seconds"].keys() == {"broadcast", "sample", "all"}
    row = apart.kills("tiny", 1, 1, 3, "processes")
    assert row["spread"][0] == row["cost"] == row["spread"][1]
