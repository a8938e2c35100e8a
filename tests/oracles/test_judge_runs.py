"""Whole runs with a language model as judge, behind a real HTTP server: training, evaluation, gold oracle,
budgets, and the key."""

import json
import math
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_server import Reply
from fixtures import World, make_group, make_questions, oat, write_jsonl
from openai_server import Model, Says, Shown, completion, counts, judging

from oat.config.load import load_config
from oat.ledger.audit import contradictions
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.oracles.judge import Judge
from oat.oracles.preferences import Preferences
from oat.seeds import Seeds
from oat.types.questions import Budget

ROOT = Path(__file__).resolve().parents[2]
KEY = "sesame-4711-sesame"
pytestmark = pytest.mark.usefixtures("brief_waits")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def section(url: str, **options: Any) -> dict[str, Any]:
    return {"name": "judge", "model": "m", "url": url, "timeout_s": 5.0, **options}


@pytest.mark.sample("True", seconds=0.8)
@pytest.mark.inventory(83)
@pytest.mark.parametrize("serialise", [False, True])
def test_a_pair_is_judged_in_training_and_in_evaluation(
    world: World, tmp_path: Path, serialise: bool
) -> None:
    """One judge prefers the letter a, and also the first place; a second judge scores in evaluations. Asked
    in both orders, the first judge gives labels by the letter alone."""

    def says(shown: Shown) -> Says:
        if "response" in shown.material:
            return str(min(9, shown.material["response"].count("a")))
        first, second = (shown.material["responses"][name].count("a") for name in ("0", "1"))
        p = min(0.99, max(0.01, 0.5 + 0.2 * (first - second) + 0.1))
        return {"0": p, "1": 1 - p}

    with judging(says) as (_, model, url):
        changes = {
            "oracle": section(url),
            "evaluation.gold": section(url, mode="score"),
            "compute.serialise": serialise,
        }
        assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    store = Store(tmp_path / "dpo" / "ledger.sqlite")
    labels = 0
    for step in range(4):
        for asked, answer, label in store.answers(store.taken("train", step)):
            first, second = (text.count("a") for text in asked.question.candidates)
            assert (answer.marks[0] == "tie") == (first == second)
            assert answer.marks[0] == "tie" or label == int(second > first)
            labels += answer.marks[0] == "ok"
    last = rows(tmp_path / "dpo")[-1]
    assert labels > 0
    assert last["oracle/position_bias"] == pytest.approx(0.1, abs=0.03)
    assert last["oracle/invalid_frac"] == 0
    assert {"eval/sampled", "eval/gold_sampled", "oracle/latency_s"} <= last.keys()
    spent = {purpose: store.spent(purpose) for purpose in ("train", "eval", "gold")}
    assert sum(price.tokens for price in spent.values()) == sum(map(sum, model.tokens))
    assert contradictions(store) == []


@pytest.mark.sample("grpo", seconds=0.4)
@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_scores_of_a_judge(world: World, tmp_path: Path, algorithm: str) -> None:
    """A run uses a judge's scores as they are, or makes preferences of them. Answered questions are not asked
    again."""
    with judging(counts("a")) as (_, model, url):
        assert (
            oat(
                "train",
                world.config(
                    algorithm,
                    tmp_path,
                    {"oracle": section(url, mode="score", rubric="Many a."), "evaluation": None},
                ),
            )
            == 0
        )
    asked = [
        (json.dumps(shown.material["conversation"]), shown.material["response"]) for shown in model.shown
    ]
    assert len(asked) == len(set(asked))
    store = Store(tmp_path / algorithm / "ledger.sqlite")
    for step in range(4):
        for row, answer, label in store.answers(store.taken("train", step)):
            scores = answer.values if algorithm == "grpo" else answer.scores
            assert list(scores) == [text.count("a") for text in row.question.candidates]
            assert label is None or scores[label] > scores[1 - label]
    assert "oracle/latency_s" in rows(tmp_path / algorithm)[-1], (
        "also through the preferences that are made of it"
    )


@pytest.mark.sample("score-max_tokens", seconds=1.8)
@pytest.mark.fault("R13")
@pytest.mark.parametrize("limit", ["max_cost", "max_tokens"])
@pytest.mark.parametrize("mode", ["compare", "score"])
def test_a_budget_is_never_passed(
    world: World, tmp_path: Path, figure: Callable[[str], None], limit: str, mode: str
) -> None:
    """A run stays within its budget although some replies have no verdict, some are lost after they were
    paid, and some are timeouts of the gateway. It ends when the next question could exceed the budget."""
    paid: list[tuple[int, int]] = []

    def says(shown: Shown) -> Says | Reply:
        paid.append((len(shown.text.split()), 1))
        said = {"0": 0.7, "1": 0.2, "2": 0.1}
        if shown.number % 18 == 17:
            return Reply(status=504)
        if shown.number % 18 == 8:
            return Reply(completion(said, paid[-1]), fault="half")
        return Reply(completion({"?": 1.0} if shown.number % 7 == 6 else said, paid[-1]))

    most = {"max_cost": 0.06, "max_tokens": 30_000}[limit]
    options = section(url="", mode=mode, price_in=2.0, price_out=8.0, max_tokens=4)
    with judging(says) as (_, _, url):
        changes = {"oracle": {**options, "url": url}, "evaluation": None, "stop": {limit: most}}
        assert oat("train", world.config("grpo" if mode == "score" else "dpo", tmp_path, changes)) == 0
    run_dir = tmp_path / ("grpo" if mode == "score" else "dpo")
    store = Store(run_dir / "ledger.sqlite")
    spent = store.spent("train")
    costs = [row["oracle/cost"] for row in rows(run_dir)[1:]]
    assert costs == [store.take_price("train", step).cost for step in range(len(costs))]
    assert costs[-1] == pytest.approx(spent.cost)
    took = {
        "max_cost": sum(2.0 * prompt + 8.0 * reply for prompt, reply in paid) / 1e6,
        "max_tokens": sum(map(sum, paid)),
    }[limit]
    counted = {"max_cost": spent.cost, "max_tokens": spent.tokens}[limit]
    assert 0 < took <= counted <= most
    judge = Judge(**{name: value for name, value in options.items() if name != "name"} | {"url": url})
    prices = [judge.price(row.question) for row in store.answered() if "unpaid" in store.answer(row)[0].marks]
    left = {
        "max_cost": min(price.cost for price in prices),
        "max_tokens": min(price.tokens for price in prices),
    }[limit]
    assert counted + left > most, "nothing is left that pays one of the questions that were not asked"
    figure(
        f"a budget of {most:,} ({limit}, mode {mode}) was not exceeded: the judge charged {took:,.4g}, the "
        f"run counted {counted:,.4g}"
    )


@pytest.mark.slow(instead="tests/ledger/test_budget.py, for queries; tests/ledger/test_waves.py", seconds=2.0)
@pytest.mark.fault("R13")
def test_64_threads_share_a_budget_of_money(tmp_path: Path, figure: Callable[[str], None]) -> None:
    with judging(counts("a")) as (_, model, url):
        judge = Judge(model="m", url=url, price_in=1.0, price_out=1.0, concurrency=8)
        limit = 0.1
        ledger = Ledger(
            Store(tmp_path / "ledger.sqlite"),
            {"o": judge},
            Seeds(0),
            labels="threshold",
            deadline_s=60.0,
            budgets={"train": Budget(cost=limit)},
        )
        errors: list[BaseException] = []

        def work(asker: int) -> None:
            try:
                for number in range(2):
                    step = 2 * asker + number
                    groups = [make_group(4 * step + place, "a" * place, f"b{step}") for place in range(4)]
                    ledger.ask(step, 0, groups, make_questions(groups, "compare", step, oracle="o"))
                    ledger.take_feedback(step, 4)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(asker,)) for asker in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        judge.close()
    paid = sum(map(sum, model.tokens)) / 1e6
    assert errors == []
    assert ledger.store.spent("train").cost == pytest.approx(paid)
    assert 0 < paid <= limit
    assert any(
        "unpaid" in answer.marks
        for step in range(128)
        for _, answer, _ in ledger.store.answers(ledger.store.taken("train", step))
    )
    assert contradictions(ledger.store) == []
    figure(f"64 threads with a shared budget of {limit} dollars spent {paid:.4f} dollars")


def test_a_budget_in_money_needs_prices(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in ("compare", "score"):
        oracle = section("http://127.0.0.1:1/v1", mode=mode)
        assert (
            oat(
                "train",
                world.config("dpo", tmp_path, {"oracle": oracle, "evaluation": None, "stop.max_cost": 1.0}),
            )
            == 2
        )
        assert "the oracle judge" in (said := capsys.readouterr().err)
        assert "does not know what a token costs" in said
    assert Preferences(
        Judge(model="m", url="http://127.0.0.1:1", mode="score", price_in=0.0, price_out=0.0)
    ).names_cost


@pytest.mark.parametrize("field", ["oracle", "evaluation.gold"])
@pytest.mark.parametrize("name", ["judge", "remote"])
def test_a_deadline_ends_after_an_outage(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, name: str
) -> None:
    url = "http://127.0.0.1:1/v1"
    oracle = (
        {"name": "remote", "url": url, "max_outage_s": 300}
        if name == "remote"
        else section(url, mode="score")
    )
    changes = {field: oracle, **({"evaluation": None} if field == "oracle" else {}), "oracle.deadline_s": 300}
    assert oat("check", world.config("dpo", tmp_path, changes)) == 2
    assert (
        f"oracle.deadline_s is 300, and the oracle {name} has max_outage_s: 300, so questions would fail"
        in capsys.readouterr().err
    )


@pytest.mark.sample("judge-402", seconds=5.3)
@pytest.mark.parametrize("status", [402, 400])
@pytest.mark.parametrize("name", ["judge", "mixture"])
def test_a_run_whose_credit_is_used_up_is_continued_by_the_same_command(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, status: int
) -> None:
    """The endpoint refuses every question in the third step, and no words say why. The run saves its state
    and ends. With credit again, the same command asks what is unanswered, and ends as the run that was never
    refused."""
    limit = math.inf

    def says(shown: Shown) -> Says | Reply:
        is_open = len(model.tokens) < limit
        return counts("a")(shown) if is_open else Reply(b"It is over.", status=status)

    digests, paid = [], []
    with judging(says) as (_, model, url):
        scoring = section(url, mode="score")
        mixture = {"name": "mixture", "sources": [scoring, {"name": world.oracle, "label": "own"}]}
        for most in (math.inf, 24 if name == "mixture" else 18):
            limit, _ = most, model.tokens.clear()
            (tmp_path / str(most)).mkdir()
            changes = {"oracle": section(url) if name == "judge" else mixture, "evaluation": None}
            config = world.config("dpo" if name == "judge" else "grpo", tmp_path / str(most), changes)
            if most < math.inf:
                assert oat("train", config) == 4
                assert "run the same command again" in capsys.readouterr().err
                limit = math.inf
            assert oat("train", config) == 0
            run_dir = config.parent / config.stem
            capsys.readouterr()
            assert oat("digest", run_dir) == 0
            digests.append(capsys.readouterr().out.split()[0])
            store = Store(run_dir / "ledger.sqlite")
            marks = {mark for row in store.answered() for mark in store.answer(row)[0].marks}
            assert marks <= {"ok", "tie"}
            assert contradictions(store) == []
            paid.append(store.spent("train"))
    assert digests[0] == digests[1]
    assert paid[0] == paid[1]


@pytest.mark.sample("OAI_KEY", seconds=2.4)
@pytest.mark.fault("R29")
@pytest.mark.parametrize("name", ["OAI_KEY", "OPENAI_API_KEY", "MY_KEY"])
def test_a_key_is_in_the_header_and_nowhere_else(
    world: World,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    """The judge's service repeats the key in replies, in refusals and in the error about a wrong key. No
    output or file shows it."""
    for each in ("OAI_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, KEY)

    def says(shown: Shown) -> Says | Reply:
        if shown.number > 40:
            return Reply(f"wrong key {KEY}".encode(), status=401)
        return {0: {KEY: 1.0}, 1: Reply(KEY.encode() * 3), 2: Reply(KEY.encode(), status=500)}.get(
            shown.number % 5, {"0": 0.9, "1": 0.1}
        )

    with judging(says) as (server, _, url):
        monkeypatch.setenv("OAI_URL", url)
        oracle = {
            "name": "judge",
            "model": "m",
            "tries": 2,
            "orders": "one",
            **({"key_env": name} if name == "MY_KEY" else {}),
        }
        config = world.config("dpo", tmp_path, {"oracle": oracle, "evaluation": None, "stop.max_steps": 100})
        with pytest.warns(UserWarning, match="gave no answer|is no verdict") as warned:
            assert oat("train", config) == 4
        said = "".join(capsys.readouterr()) + "".join(str(each.message) for each in warned)
        oat("check", config)
        said += "".join(capsys.readouterr())
        judge = Judge(**{option: value for option, value in oracle.items() if option != "name"})
        said += repr(judge) + repr(vars(judge).keys()) + repr(judge.config) + judge.version
        try:
            tickets = judge.submit(make_questions([make_group(0, "a", "b")], "compare", 0, oracle="o"))
            judge.collect(tickets, 20.0)
        except Exception as error:
            said += "".join(traceback.format_exception(error)) + repr(error.args)
        judge.close()
    assert "refused with status 401" in said
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.yaml", "ledger.sqlite", "metrics.jsonl"} <= {file.name for file in files}
    assert [str(file) for file in files if b"sesame" in file.read_bytes()] == []
    assert "sesame" not in said
    assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {KEY}"}
    assert not any(b"sesame" in asked.body for asked in server.asked)
    figure(f"a key in {name} that a judge sent back is in none of the run's files, messages and tracebacks")


def test_the_recipe_takes_two_steps(world: World, tmp_path: Path) -> None:
    """configs/dpo_judge.yaml runs with a small model, small sizes and the test's server."""
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{a}+1="} for a in range(6)])
    recipe = ROOT / "configs" / "dpo_judge.yaml"
    with judging(counts("a")) as (_, model, url):
        small: dict[str, Any] = {
            "model": world.folder / "model",
            "run_dir": tmp_path / "run",
            "oracle.url": url,
        }
        small |= {
            "prompts.path": tmp_path / "prompts.jsonl",
            "evaluation.path": tmp_path / "prompts.jsonl",
            "evaluation.max_prompts": 3,
        }
        small |= {"sampling.max_new_tokens": 4, "algorithm.prompts": 3, "stop.max_steps": 2}
        judge = {**load_config(recipe)[0].evaluation.oracle.options, "name": "judge", "url": url}  # type: ignore[union-attr]
        flags = [part for name, value in small.items() for part in (f"--{name}", str(value))]
        assert oat("train", recipe, *flags, "--evaluation.oracle", json.dumps(judge)) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]
    assert isinstance(model, Model)
    assert {("response" in shown.material) for shown in model.shown} == {True, False}
    assert all("How cheerful the story is" in shown.text for shown in model.shown)
