"""Oracles that are asked by processes of their own, the clients. A run with clients is the local one, also if
they are killed, hang, or answer late."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import asked_apart
import pytest
from fixtures import World, make_group, make_questions, oat, write_jsonl
from planned_kills import Kill, StruckMachine, drawn_kills
from tiny_models import save_reward_model
from trainers import letters, lines
from transformers import AutoTokenizer, LlamaConfig

from oat import Trainer, wire
from oat.assemble.oracle_side import OracleBox, plan_of
from oat.assemble.run_inputs import gather_inputs
from oat.commands.digest import digest_run
from oat.config.load import load_config
from oat.errors import ActorError, ConfigError, OatWarning, OracleError
from oat.oracles.base import Mean
from oat.resolve.resolve import resolve
from oat.runtime.clients import ClientOracle, Clients, sums_of, together
from oat.runtime.worker_group import Restarts, WorkerGroup
from oat.types import Answer, Group, Key, Message, Question

CHANGES: dict[str, Any] = {"engine.deterministic": True, "engine.threads": 1}
APART = {"compute.runtime": "processes", "compute.max_restarts": 100}
ORACLES = asked_apart.__file__
OF_CLIENTS = ("submit", "collect")


def mixed(world: World) -> dict[str, Any]:
    """Return a mixture whose scores depend on the other questions of a round."""
    second = {"name": f"{world.folder / 'reward.py'}:late", "label": "late", "weight": 0.5}
    sources = [{"name": world.oracle, "label": "own", "normalise": "batch"}, second]
    return {"oracle": {"name": "mixture", "sources": sources}, "evaluation.oracle": {"name": world.oracle}}


def judged(world: World) -> dict[str, Any]:
    return {"evaluation.gold": {"name": f"{world.folder / 'reward.py'}:late", "max_queries": 20}}


RUNS: dict[str, tuple[str, Any]] = {
    "a function": ("grpo", judged),
    "preferences": ("dpo", lambda world: {}),
    "late answers": ("dpo", lambda world: {"oracle": {"name": world.late, "max_outstanding": 8}}),
    "a mixture": ("grpo", mixed),
    "workers": ("grpo", lambda world: {"oracle": {"name": "isolated", "function": world.oracle}}),
    "a budget": ("grpo", lambda world: {"stop.max_queries": 30}),
}


class Runs:
    """Makes runs in folders of their own."""

    def __init__(self, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.world, self.folder, self._monkeypatch = world, folder, monkeypatch

    def config(self, name: str, recipe: str = "grpo", **changes: Any) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.world.config(recipe, self.folder / name, {**CHANGES, **changes})

    def local(self, recipe: str = "grpo", **changes: Any) -> dict[str, str]:
        config = self.config("local", recipe, **changes)
        assert oat("train", config) == 0
        return digest_run(config.parent / recipe)

    def apart(
        self,
        name: str,
        machine: StruckMachine,
        recipe: str = "grpo",
        *,
        clients: int = 2,
        code: int = 0,
        **changes: Any,
    ) -> dict[str, str]:
        """Make a run with clients, or continue it."""
        self._monkeypatch.setattr("oat.assemble.apart.Machine", machine)
        config = self.config(name, recipe, **{**APART, "compute.oracle_clients": clients, **changes})
        assert oat("train", config) == code
        assert not machine.left()
        return digest_run(config.parent / recipe) if code == 0 else {}


@pytest.fixture
def runs(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(world, tmp_path, monkeypatch)


def noting(folder: Path, name: str = "Noting", **options: Any) -> dict[str, Any]:
    folder.mkdir()
    return {"oracle": {"name": f"{ORACLES}:{name}", "folder": str(folder), **options}}


def noted(folder: Path) -> list[list[str]]:
    """Return what each process that was asked something has noted."""
    return [file.read_text(encoding="utf-8").split() for file in sorted(folder.glob("*.txt"))]


@pytest.mark.sample("a mixture", seconds=13.3)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_clients_is_the_local_run(name: str, runs: Runs) -> None:
    recipe, make = RUNS[name]
    changes = make(runs.world)
    local = runs.local(recipe, **changes)
    for clients in (1, 2):
        machine = StruckMachine()
        assert runs.apart(f"{clients}", machine, recipe, clients=clients, **changes) == local
        assert machine.calls["collect"] > 0


def test_clients_know_the_columns_of_the_data(runs: Runs, tmp_path: Path) -> None:
    """A function may need a column that most records lack."""
    records = [json.loads(line) for line in (runs.world.folder / "train.jsonl").read_text().splitlines()]
    prompts = write_jsonl(tmp_path / "train.jsonl", [{**records[0], "hint": "a"}, *records[1:]])
    changes = {"prompts.path": str(prompts), "oracle.name": f"{ORACLES}:hinted", "evaluation": None}
    local = runs.local(**changes)
    assert runs.apart("apart", StruckMachine(), **changes) == local


def test_every_client_is_asked_and_closes_its_oracle(runs: Runs, tmp_path: Path) -> None:
    changes = noting(tmp_path / "notes")
    runs.apart("apart", StruckMachine(), **changes)
    files = noted(tmp_path / "notes")
    asked = Counter(line for lines_ in files for line in lines_ if line != "closed")
    assert {*asked.values()} == {1}
    of_clients = [lines_ for lines_ in files if len(lines_) > 1]
    assert len(of_clients) == 2
    assert all(lines_[-1] == "closed" for lines_ in files)
    assert abs(len(of_clients[0]) - len(of_clients[1])) < len(asked) / 4


@pytest.mark.slow
def test_killed_clients_are_replaced(runs: Runs) -> None:
    """The client is killed before or after it gets a call: at its start, while it makes its oracles, and at
    any question and answer."""
    local = runs.local()
    whole = StruckMachine()
    assert runs.apart("whole", whole, clients=1) == local
    planned = [Kill("prepare", 1), Kill("make", 1), Kill("make", 1, 0.01)]
    calls = Counter({what: whole.calls[what] for what in OF_CLIENTS})
    planned += [kill for number in range(3) for kill in drawn_kills(f"{number}", calls, 2)]
    for number, kill in enumerate(planned):
        machine = StruckMachine([kill])
        assert runs.apart(f"{number}", machine, clients=1 + number % 2) == local, kill
        assert machine.killed == [kill]


@pytest.mark.slow
def test_a_client_that_hangs_is_replaced(runs: Runs) -> None:
    local = runs.local()
    machine = StruckMachine([Kill("collect", 5, signal=signal.SIGSTOP)], deadline_s=8.0)
    with pytest.warns(OatWarning, match=r"not answered the call `collect` within 8.0 s; it is replaced \(1 "):
        assert runs.apart("apart", machine) == local


def test_questions_of_a_lost_client_are_asked_again_and_no_others(runs: Runs, tmp_path: Path) -> None:
    local = runs.local(**noting(tmp_path / "local_notes"))
    for what in OF_CLIENTS:
        notes = tmp_path / what
        machine = StruckMachine([Kill(what, 6)])
        changes = noting(notes)
        assert runs.apart(f"of_{what}", machine, **changes)["weights"] == local["weights"]
        asked = Counter(line for lines_ in noted(notes) for line in lines_ if line != "closed")
        twice = [key for key, count in asked.items() if count > 1]
        assert max(asked.values()) <= 2
        assert len({key.rsplit("/", 3)[0] for key in twice}) <= 1, "only those of one step were open"
        assert bool(twice) == (what == "collect")


@pytest.mark.slow(
    instead="tests/runtime/test_late_processes.py::test_all_replacements_are_counted_together", seconds=1.1
)
def test_all_processes_share_the_bound_of_replacements(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """An actor and a client are lost, and only one process may be replaced. The same command goes on."""
    local = runs.local()
    kills = [Kill("sample", 1), Kill("collect", 3)]
    runs.apart("apart", StruckMachine(kills), code=1, **{"compute.max_restarts": 1})
    said = capsys.readouterr().err
    assert "oracle client 0 has ended in the call `collect`" in said or "oracle client 1" in said
    assert "compute.max_restarts (1) allows no further replacement" in said
    assert runs.apart("apart", StruckMachine()) == local


@pytest.mark.sample("True", seconds=1.2)
@pytest.mark.parametrize("gold", [False, True])
def test_an_evaluation_whose_client_is_lost_for_good_is_made_again(gold: bool, runs: Runs) -> None:
    changes = judged(runs.world) if gold else {}
    local = runs.local(**changes)
    lost = StruckMachine([Kill("collect", 3 if gold else 0)])
    runs.apart("apart", lost, clients=1, code=1, **{**changes, "compute.max_restarts": 0})
    assert lost.calls["collect"] < 6, "it was killed in the first evaluation"
    assert runs.apart("apart", StruckMachine(), clients=1, **changes) == local


@pytest.mark.sample("error", seconds=0.6)
@pytest.mark.parametrize("how", ["error", "nan"])
def test_an_oracle_that_breaks_ends_the_run_as_in_the_runs_own_process(
    how: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for where in ("local", "apart"):
        changes = noting(tmp_path / f"{where}_notes", "Breaking", how=how)
        if where == "local":
            assert oat("train", runs.config("local", **changes)) == 1
        else:
            runs.apart("apart", StruckMachine(), clients=1, code=1, **changes)
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert "oracle client 0: oracle " in said[1]
    assert said[1].replace("oracle client 0: ", "") == said[0]
    assert "(oracle.name)" in said[0]


@pytest.mark.usefixtures("several_cpus")
def test_an_outage_keeps_its_exit_code_and_the_run_goes_on(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = runs.local(**noting(tmp_path / "notes", "Breaking", how="outage", step=99))
    changes = noting(tmp_path / "other", "Breaking", how="outage")
    with pytest.warns(OatWarning, match="oracle client [01]: this oracle breaks now"):
        runs.apart("apart", StruckMachine(), code=4, **changes)
    assert "oracle client" in (said := capsys.readouterr().err)
    assert "the service has been away for too long" in said
    runs.apart("apart", StruckMachine(), **changes)
    assert digest_run(tmp_path / "apart" / "grpo")["weights"] == local["weights"]


def test_an_evaluation_that_fails_ends_alone(runs: Runs, tmp_path: Path) -> None:
    changes = noting(tmp_path / "notes", "Breaking", how="outage", purpose="eval")
    with pytest.warns(OatWarning, match="failed and is left out: oracle client [01]: the service has been"):
        runs.apart("apart", StruckMachine(), **changes)
    asked = Counter(line for lines_ in noted(tmp_path / "notes") for line in lines_ if line != "closed")
    assert {*asked.values()} == {1}, "nobody asks again for an evaluation that has ended"


@pytest.mark.slow(
    instead="test_questions_of_a_lost_client_are_asked_again_and_no_others; tests/protocol/test_late.py",
    seconds=2.7,
)
@pytest.mark.usefixtures("several_cpus")
def test_a_durable_oracle_keeps_its_questions(runs: Runs, tmp_path: Path) -> None:
    """Neither a lost client nor a new start of the run asks a question again that the oracle has."""
    local = runs.local(**noting(tmp_path / "local_notes", "Keeping"))
    notes = tmp_path / "notes"
    changes = noting(notes, "Keeping")
    machine = StruckMachine([Kill("collect", 4), Kill("collect", 9), Kill("collect", 14)])
    runs.apart("apart", machine, code=1, **{**changes, "compute.max_restarts": 2})
    machine = StruckMachine([Kill("submit", 2)])
    runs.apart("apart", machine, **changes)
    asked = Counter(line for lines_ in noted(notes) for line in lines_ if line != "closed")
    assert {*asked.values()} == {1}
    assert digest_run(tmp_path / "apart" / "grpo")["weights"] == local["weights"]


def test_metrics_are_those_of_all_clients(runs: Runs, tmp_path: Path) -> None:
    found = []
    for where in ("local", "apart"):
        changes = noting(tmp_path / f"{where}_notes", "Measuring")
        runs.local(**changes) if where == "local" else runs.apart("apart", StruckMachine(), **changes)
        lines_ = (tmp_path / where / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines_[1:]]
        found.append([(row["oracle/retries"], row["oracle/latency_s"]) for row in rows])
    assert found[0] == found[1]
    assert found[0][-1][0] > 16


def gated(machine: StruckMachine, folder: Path, clients: int = 2, restarts: int = 3) -> Clients:
    """Return clients that answer a question whose first candidate is "slow" when `folder/gate` exists."""
    crew = WorkerGroup(machine.machine(folder).launcher(1.0), Restarts(restarts), "oracle client", clients)
    crew.make(f"{ORACLES}:GatedBox", wire.encode(str(folder)))
    made = Clients(crew)
    made.begin()
    return made


def asking(groups: list[Group]) -> list[Question]:
    return make_questions(groups, "score", 0, oracle="own")


def test_what_fails_for_an_evaluation_does_not_fail_for_training(tmp_path: Path) -> None:
    """One client has questions of both when it asks its oracle again."""
    clients = gated(StruckMachine(), tmp_path, clients=1)
    oracle = ClientOracle(clients, "oracle", asked_apart.Noting(str(tmp_path)))
    first = oracle.submit(asking([make_group(0, "slow")]))
    assert oracle.collect(first, 1.0) == []
    trained = oracle.submit(asking([make_group(2, "fast")]))
    groups = [make_group(1, "fast")]
    evaluated = oracle.submit(make_questions(groups, "score", 0, oracle="own", purpose="eval"))
    (tmp_path / "gate").touch()
    with pytest.raises(OracleError, match="says nothing of evaluations"):
        oracle.collect(evaluated, 30.0)
    assert [ticket for ticket, _ in oracle.collect(trained, 30.0)] == trained
    clients.close()


def test_a_slow_question_holds_only_those_of_its_client(tmp_path: Path) -> None:
    clients = gated(StruckMachine(), tmp_path)
    oracle = ClientOracle(clients, "oracle", asked_apart.Noting(str(tmp_path)))
    groups = [make_group(number, "slow" if number == 0 else "fast") for number in range(6)]
    tickets = oracle.submit(asking(groups))
    assert len({*tickets}) == 6
    found: dict[str, Answer] = {}
    while len(found) < 3:
        found.update(oracle.collect(tickets, 5.0))
    assert {*found} == {tickets[1], tickets[3], tickets[5]}
    later = oracle.submit(asking([make_group(9, "fast")]))
    assert [ticket for ticket, _ in oracle.collect(later, 5.0)] == later, "the client with less to do gets it"
    assert oracle.collect(tickets, 0.1) == []
    (tmp_path / "gate").touch()
    while len(found) < 6:
        found.update(oracle.collect(tickets, 5.0))
    assert [found[ticket].key.occurrence for ticket in tickets] == list(range(6))
    assert oracle.collect(tickets, 0.0) == []
    clients.close()


def test_nothing_waits_for_clients_that_cannot_be_replaced(tmp_path: Path) -> None:
    machine = StruckMachine([Kill("collect", 0)])
    clients = gated(machine, tmp_path, clients=1, restarts=0)
    oracle = ClientOracle(clients, "oracle", asked_apart.Noting(str(tmp_path)))
    tickets = oracle.submit(asking([make_group(0, "fast")]))
    for _ in range(2):
        with pytest.raises(ActorError, match=r"oracle client 0 has ended .* allows no further replacement"):
            oracle.collect(tickets, 30.0)
    with pytest.raises(ActorError, match="no further replacement"):
        oracle.submit(asking([make_group(1, "fast")]))
    clients.close()


def test_means_and_counts_together() -> None:
    found = [sums_of({"a": Mean(3, 1), "b": 2.0}), sums_of({"a": Mean(1, 3), "b": 1.0, "c": 5})]
    assert together(found) == {"a": 1.0, "b": 3.0, "c": 5}
    assert Mean(0, 0) == 0.0
    assert together([sums_of({"a": Mean(0, 0)})]) == {"a": 0.0}


def test_functions_of_modules_travel_and_others_are_refused(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = {"threads": 1, "runtime": "processes", "oracle_clients": 1}
    given = lines(runs.world, tmp_path / "local", oracle=letters)
    Trainer(**given).train()
    monkeypatch.setattr("oat.assemble.apart.Machine", StruckMachine())
    Trainer(**lines(runs.world, tmp_path / "apart", oracle=letters, compute=compute)).train()
    assert digest_run(tmp_path / "apart") == digest_run(tmp_path / "local")
    own = lines(
        runs.world, tmp_path / "own", oracle=lambda prompts, completions, **columns: [0.0], compute=compute
    )
    with pytest.raises(
        ConfigError, match=r"oracle.name is 'python:lambda': lambda was given from Python, and"
    ):
        Trainer(**own).train()


def test_only_clients_load_a_reward_model(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(runs.world.folder / "model")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, max_position_embeddings=64, **shape)
    path = save_reward_model(runs.folder / "model", config, tokenizer)
    # rows of one batch change each other's last bits, and clients get other batches
    oracle = {"name": "reward_model", "path": path, "batch_tokens": 1}
    local = runs.local(oracle=oracle)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the run's own process loads no weights of oracles")

    monkeypatch.setattr("oat.models.scoring.load_module", refuse)
    assert runs.apart("apart", StruckMachine(), oracle=oracle) == local


def test_a_client_knows_what_a_prompt_has_written(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "opens.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{% if '/think' in messages[0].content %}<think>{% endif %}{% endif %}"
    )
    oracle = {"name": "format", "template": "<think>...</think> ..."}
    config = runs.config("run", **{"render.template": str(tmp_path / "opens.jinja"), "oracle": oracle})
    resolved = resolve(*load_config(config))
    run_inputs = gather_inputs(resolved)
    box = OracleBox(plan_of(resolved, resolved.config, run_inputs).encoded)
    run_inputs.close()
    key = Key("train", 0, 0, 0)
    for asked, scores in (("a /think", (1.0, 0.0)), ("a", (0.0, 1.0))):
        texts = "hm</think>b", "<think>hm</think>b"
        question = Question(key, "score", (Message("user", asked),), texts, (0, 1))
        tickets = box.submit("oracle", [wire.encode(question)])
        ((_, answer),), _ = box.collect("oracle", "train", tickets, 1.0)
        assert answer.values == scores
    box.close()


def test_an_oracle_of_another_version_is_refused(runs: Runs, tmp_path: Path) -> None:
    """Another machine may have other files."""
    resolved = resolve(*load_config(runs.config("run", **noting(tmp_path / "notes"))))
    run_inputs = gather_inputs(resolved)
    plan = plan_of(resolved, resolved.config, run_inputs)
    OracleBox(plan.encoded).close()
    plan.versions["oracle"] = "2"
    with pytest.raises(ConfigError, match=r"the oracle .*:Noting has the version 1, and 2 in the run's own"):
        OracleBox(plan.encoded)
    run_inputs.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compute.oracle_clients": 1}, "nothing reads compute.oracle_clients"),
        ({"compute.runtime": "processes", "compute.oracle_cpus": 0.5}, "nothing reads compute.oracle_cpus"),
    ],
)
def test_settings_that_nothing_reads(
    changes: dict[str, Any], said: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oat("check", runs.config("run", **changes)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("several_cpus")
def test_who_asks_the_oracle(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.config("run", **{"compute.runtime": "processes", "compute.oracle_clients": 2})
    assert oat("check", config, "--compute.oracle_cpus", "0.25", "--json") == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["name"] == "oracle"]
    assert row["unit"].startswith("asked by 2 clients on ")
