"""What defines a run's model, its text and its rewards is what it was, or the run says so: real runs, whose
files are changed between two lives."""

import csv
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, forked, kill_at, make_model, named, show_warnings, write_jsonl
from fixtures import oat as command
from tiny_models import build_config, save_reward_model
from transformers import AutoTokenizer

from oat.oracles.make import build_oracle
from oat.plugins import loading as plugins

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
REWARD = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

def reward(prompts, completions, **columns):
    from helper import worth

    return [worth(text) for text in completions]
"""
GAME = """from oat.environments.base import Turn


class Twice:
    def reset(self, prompt, generator):
        return {}

    def step(self, state, response):
        return Turn(state, None, float(response.count("a")))
"""
HELPER = "def worth(text):\n    return text.count('a') + 0.1 * text.count('b')\n"


def run(folder: Path, *arguments: object, before: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """A command in a process of its own, in a folder; its exit code, or minus its signal, and what it
    printed."""

    def action() -> int:
        os.chdir(folder)
        show_warnings()
        before()
        return command(*arguments)

    (folder / "log").unlink(missing_ok=True)
    code = forked(action, folder / "log")
    return code, (folder / "log").read_text(encoding="utf-8")


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def told(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "environment.json").read_text())


def make(world: World, folder: Path, algorithm: str = "dpo", changes: dict[str, Any] | None = None) -> Path:
    """A folder with everything that a run reads, and its configuration, in which every path is relative."""
    shutil.copytree(world.folder / "model", folder / "model")
    edit(folder / "model" / "tokenizer_config.json", chat_template=TEMPLATE)
    (folder / "reward.py").write_text(REWARD)
    (folder / "helper.py").write_text(HELPER)
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(world.folder / name, folder / name)
    own = {
        "model.path": "model",
        "prompts.path": "train.jsonl",
        "evaluation.path": "held_out.jsonl",
        "oracle.name": "reward.py:reward",
    }
    tree = world.tree(
        algorithm,
        Path("run"),
        {
            **own,
            "render.template": "tokenizer",
            "checkpoint.every": 1,
            "stop.max_steps": 2,
            **(changes or {}),
        },
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps; each test goes on with a copy of it, at another place."""
    folder = make(world, tmp_path_factory.mktemp("begun"))
    code, said = run(folder, "train", "run.yaml")
    assert code == 0, said
    return folder


@pytest.fixture
def copy(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "copy"))


def edit(file: Path, *removed: str, **fields: Any) -> None:
    """Other fields of a JSON file, some removed."""
    found = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    file.write_text(
        json.dumps({name: value for name, value in found.items() if name not in removed}), encoding="utf-8"
    )


def config(*removed: str, **fields: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", *removed, **fields)


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        found = json.loads((model / "tokenizer.json").read_text())
        change(found)
        (model / "tokenizer.json").write_text(json.dumps(found))

    return apply


def exchanged(found: dict[str, Any]) -> None:
    vocabulary = found["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def other_weights(model: Path) -> None:
    make_model(model.parent / "other", seed=9)
    shutil.copy(model.parent / "other" / "model.safetensors", model)


def few_of(cases: dict[str, Any], *names: str) -> list[Any]:
    """All cases, of which only these are not slow tests."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.slow, id=name) for name in cases]


CHANGES: dict[str, tuple[Callable[[Path], None], Sequence[str]]] = {
    "the base of the positions": (
        config(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
        ["run.yaml:3: model.path is 'model'", "config.json: rope_theta was 10000.0 and is 500000.0"],
    ),
    "the same as older files have it": (
        config("rope_parameters", rope_theta=5e5),
        ["config.json: rope_theta was 10000.0 and is 500000.0"],
    ),
    "an epsilon": (config(rms_norm_eps=0.01), ["config.json: rms_norm_eps was 1e-06 and is 0.01"]),
    "an activation": (config(hidden_act="gelu"), ['config.json: hidden_act was "silu" and is "gelu"']),
    "the context": (
        config(max_position_embeddings=48),
        ["config.json: max_position_embeddings was 64 and is 48"],
    ),
    "the ids that end a text": (
        lambda model: edit(model / "generation_config.json", eos_token_id=[2, 5]),
        ["generation_config.json: eos_token_id was [2] and is [2, 5]"],
    ),
    "two tokens": (
        tokenizer(exchanged),
        ["tokenizer.json: model.vocab.a was 14 and is 15", "tokenizer.json: model.vocab.b was 15 and is 14"],
    ),
    "a normaliser": (
        tokenizer(lambda found: found.update(normalizer={"type": "Lowercase"})),
        ['tokenizer.json: normalizer.type was not there and is "Lowercase"'],
    ),
    "a pre-tokenizer": (
        tokenizer(lambda found: found["pre_tokenizer"].update(behavior="MergedWithNext")),
        ['tokenizer.json: pre_tokenizer.behavior was "Isolated" and is "MergedWithNext"'],
    ),
    "a decoder": (tokenizer(lambda found: found.update(decoder=None)), ["tokenizer.json: decoder"]),
    "an added token": (
        tokenizer(
            lambda found: found["added_tokens"].append({**found["added_tokens"][0], "id": 14, "content": "a"})
        ),
        ["tokenizer.json: added_tokens.a."],
    ),
    "the token that ends a text": (
        lambda model: edit(model / "tokenizer_config.json", eos_token="<pad>"),
        ['tokenizer_config.json: eos_token was "<eos>" and is "<pad>"'],
    ),
    "the chat template": (
        lambda model: edit(model / "tokenizer_config.json", chat_template=TEMPLATE + " "),
        [
            "run.yaml:",
            (
                "render.template is 'tokenizer': the text of the chat template (chat_template.jinja, or "
                "`chat_template` in tokenizer_config.json)"
            ),
        ],
    ),
    "the weights of the reference": (other_weights, ["weights: lm_head.weight, model.embed_tokens.weight,"]),
}


@pytest.mark.parametrize(
    "change",
    few_of(
        CHANGES, "the base of the positions", "the ids that end a text", "two tokens", "the chat template"
    ),
)
def test_a_change_of_model_or_text_is_refused_by_file_and_field(copy: Path, change: str) -> None:
    apply, words = CHANGES[change]
    apply(copy / "model")
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, len(rows(copy / "run"))) == (2, 3), said
    for part in (*words, "put "):
        assert part in said
    assert "Traceback" not in said


def saved_again(model: Path) -> None:
    """By the libraries themselves; the weights in parts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, tokens = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    (model / "model.safetensors").unlink()
    module.save_pretrained(model, max_shard_size="2KB")
    tokens.save_pretrained(model)
    assert len(list(model.glob("model-*.safetensors"))) > 1


def by_another_program(model: Path) -> None:
    """Another version, aliases, order, white space, fields that nobody reads, and none of those that have
    their default."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        if not (model / name).exists():
            continue
        found = json.loads((model / name).read_text(encoding="utf-8"))
        if name != "tokenizer.json":
            found["transformers_version"] = "4.40.1"
        if name == "config.json":
            found |= {
                "torch_dtype": found.pop("dtype"),
                "use_cache": False,
                "architectures": None,
                "attention_dropout": 0.3,
                "initializer_range": 0.5,
            }
            found |= {
                "rope_theta": found.pop("rope_parameters")["rope_theta"],
                "rope_scaling": None,
                "_name_or_path": "elsewhere",
            }
            del found["mlp_bias"], found["attention_bias"], found["pretraining_tp"], found["rms_norm_eps"]
        (model / name).write_text(json.dumps(dict(reversed(found.items())), indent=7), encoding="utf-8")


def template_in_a_file(model: Path) -> None:
    edit(model / "tokenizer_config.json", "chat_template")
    (model / "chat_template.jinja").write_text(TEMPLATE)


SAME: dict[str, Callable[[Path], None]] = {
    "by the libraries": saved_again,
    "by another program": by_another_program,
    "the template in a file of its own": template_in_a_file,
    "without the ends that config.json has too": lambda model: (model / "generation_config.json").unlink(),
}


@pytest.mark.parametrize("again", few_of(SAME, "by another program"))
def test_a_file_that_is_only_saved_again_is_the_same(copy: Path, again: str) -> None:
    SAME[again](copy / "model")
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, len(rows(copy / "run"))) == (0, 4), said
    assert "warning" not in said
    assert "inputs" not in told(copy / "run")[-1], "nothing new is to be said"


def test_whoever_uses_a_run_meets_the_same_refusal(copy: Path) -> None:
    """Its greedy accuracy would be another model's, and an export would have another model's
    configuration."""
    assert run(copy, "eval", "run")[0] == 0
    CHANGES["the base of the positions"][0](copy / "model")
    fork = ("train", "run.yaml", "--from", "run@1", "--run_dir", "fork", "--learner.learning_rate", 0.1)
    commands = (
        ("eval", "run"),
        ("export", "run", "out"),
        ("check", "run.yaml", "--stop.max_steps", 3),
        ("check", *fork[1:]),
        fork,
    )
    for arguments in (
        *commands,
        ("eval", "model", "--against", "run"),
        ("eval", "run", "--against", "model"),
    ):
        code, said = run(copy, *arguments)
        assert (code, "config.json: rope_theta was 10000.0 and is 500000.0" in said) == (2, True), (
            arguments,
            said,
        )
    assert not (copy / "out").exists()


def test_a_reference_and_an_adapter_are_held_against_what_they_were(world: World, tmp_path: Path) -> None:
    folder = make(world, tmp_path, "dpo", {"model.reference": "reference", "evaluation": None})
    shutil.copytree(folder / "model", folder / "reference")
    assert run(folder, "train", "run.yaml")[0] == 0
    config(rms_norm_eps=0.01)(folder / "reference")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        "model.reference is 'reference'" in said,
        "config.json: rms_norm_eps was 1e-06 and is 0.01" in said,
    ) == (2, True, True), said
    config(rms_norm_eps=1e-6)(folder / "reference")
    other_weights(folder / "reference")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "model.reference is 'reference'" in said, "weights: lm_head.weight" in said) == (
        2,
        True,
        True,
    ), said


@pytest.mark.sample("train.jsonl*", seconds=0.8)
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model/model.safetensors", "weights: "),
        ("train.jsonl", "expected the prompts that the run began with"),
    ],
)
def test_before_the_first_checkpoint_start_and_prompts_are_what_the_ledger_knows(
    world: World, tmp_path: Path, file: str, words: str
) -> None:
    """The rounds on record were sampled by that start about these prompts."""
    folder = make(world, tmp_path, "grpo", {"checkpoint.every": 2})
    code, said = run(
        folder, "train", "run.yaml", before=lambda: kill_at(*named("oat.learner.learner:Learner.update"), 1)
    )
    assert code == -signal.SIGKILL, said
    if file == "train.jsonl":
        write_jsonl(folder / file, [{"prompt": "9+9=", "answer": "b"}])
    else:
        other_weights(folder / "model")
    code, said = run(folder, "train", "run.yaml")
    assert (code, words in said) == (2, True), said


@pytest.mark.slow(instead="test_a_change_of_model_or_text_is_refused_by_file_and_field", seconds=1.5)
def test_the_start_may_go_where_nobody_reads_it_any_more(world: World, tmp_path: Path) -> None:
    """Without a reference the checkpoint has every weight."""
    folder = make(world, tmp_path, "grpo")
    assert run(folder, "train", "run.yaml")[0] == 0
    other_weights(folder / "model")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "warning" in said) == (0, False), said


@pytest.mark.slow(instead="test_a_reference_and_an_adapter_are_held_against_what_they_were", seconds=1.4)
def test_a_distance_that_only_evaluations_measure_is_from_the_same_reference(
    world: World, tmp_path: Path
) -> None:
    folder = make(world, tmp_path, "grpo", {"evaluation.kl": True})
    assert run(folder, "train", "run.yaml")[0] == 0
    other_weights(folder / "model")
    for arguments in (("train", "run.yaml", "--stop.max_steps", 3), ("eval", "run")):
        code, said = run(folder, *arguments)
        assert (code, "weights: lm_head.weight" in said) == (2, True), said


def pay_more(folder: Path) -> None:
    (folder / "reward.py").write_text(REWARD.replace("worth(text) for", "100 + worth(text) for"))


def test_a_changed_reward_goes_on_only_when_that_is_accepted(copy: Path) -> None:
    pay_more(copy)
    for name in ("train", "check"):
        code, said = run(copy, name, "run.yaml", "--stop.max_steps", 4)
        assert (code, "oracle.name is 'reward.py:reward'" in said, "\n  reward.py: its text\n" in said) == (
            2,
            True,
            True,
        ), said
        assert "--accept-changed reward" in said
    code, said = run(copy, "train", "run.yaml", "--accept-changed", "rewards")
    assert (code, "what may change and be accepted is reward, not 'rewards'" in said) == (2, True), said
    assert run(copy, "check", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")[0] == 0
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")
    assert (code, said.count("oat: warning"), "rows from here on have oracle/changes" in said) == (
        0,
        1,
        True,
    ), said
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 5)
    assert (code, "warning" in said) == (0, False), said
    found = rows(copy / "run")
    assert [row.get("oracle/changes") for row in found] == [None, None, None, 1, 1, 1]
    assert max(row["reward/mean"] for row in found[1:3]) < 50 < min(row["reward/mean"] for row in found[3:])
    assert ["inputs" in entry for entry in told(copy / "run")] == [True, True, False]


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=2.1)
def test_what_a_kill_leaves_of_an_accepted_change(copy: Path, begun: Path) -> None:
    """The change counts from the first question on: no command needs to accept it twice, and the rows are
    those of the run that nobody killed."""
    from oat.commands.export import digest_run

    unbroken = Path(shutil.copytree(begun, copy.parent / "unbroken"))
    for folder in (copy, unbroken):
        pay_more(folder)
    flags = ("train", "run.yaml", "--stop.max_steps", 4)
    assert run(unbroken, *flags, "--accept-changed", "reward")[0] == 0
    code, said = run(
        copy,
        *flags,
        "--accept-changed",
        "reward",
        before=lambda: kill_at(*named("oat.ledger.outstanding:Outstanding._record"), 1, after=True),
    )
    assert code == -signal.SIGKILL, said
    assert run(copy, *flags)[0] == 0
    assert digest_run(copy / "run") == digest_run(unbroken / "run")
    assert [row.get("oracle/changes") for row in rows(copy / "run")] == [None, None, None, 1, 1]


@pytest.mark.slow(
    instead="test_a_changed_reward_goes_on_only_when_that_is_accepted; tests/build/test_fork.py", seconds=4.7
)
def test_a_fork_has_the_reward_of_its_time(copy: Path) -> None:
    pay_more(copy)
    assert (
        run(
            copy,
            "train",
            "run.yaml",
            "--stop.max_steps",
            4,
            "--accept-changed",
            "reward",
            "--checkpoint.keep_last",
            9,
        )[0]
        == 0
    )
    fork = ("train", "run.yaml", "--stop.max_steps", 4, "--learner.learning_rate", 0.1)
    for step, needs in ((2, True), (3, False)):
        begin = (*fork, "--run_dir", f"fork{step}", "--from", f"run@{step}")
        code, said = run(copy, *begin)
        assert code == (2 if needs else 0), said
        assert run(copy, "check", *begin[1:])[0] == code
        assert run(copy, *begin, "--accept-changed", "reward")[0] == 0
        assert [row.get("oracle/changes") for row in rows(copy / f"fork{step}")] == [None, None, None, 1, 1]
    (copy / "reward.py").write_text(REWARD)
    assert run(copy, *fork, "--run_dir", "old", "--from", "run@2")[0] == 0, (
        "it is what the run asked up to there"
    )
    assert not any("oracle/changes" in row for row in rows(copy / "old"))


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=1.2)
def test_a_reward_that_never_answered_may_be_mended(world: World, tmp_path: Path) -> None:
    folder = make(world, tmp_path, "grpo", {"evaluation": None})
    (folder / "reward.py").write_text(
        "def reward(prompts, completions, **columns):\n    raise ValueError('not yet')\n"
    )
    assert run(folder, "train", "run.yaml")[0] == 1
    pay_more(folder)
    code, said = run(folder, "train", "run.yaml")
    assert (code, "changed since this run last asked it" in said) == (0, False), said
    assert not any("oracle/changes" in row for row in rows(folder / "run"))


DECLARED = """
from oat.oracles.local import LocalOracle


class Declared(LocalOracle):
    version = "{version}"

    def __init__(self):
        super().__init__("declared")

    def values(self, questions):
        return [[float(len(text)) for text in question.candidates] for question in questions]
"""


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=2.2)
def test_a_declared_version_is_a_warning(world: World, tmp_path: Path) -> None:
    folder = make(world, tmp_path, "grpo", {"oracle.name": "declared.py:Declared"})
    (folder / "declared.py").write_text(DECLARED.format(version="1"))
    assert run(folder, "train", "run.yaml")[0] == 0
    (folder / "declared.py").write_text(DECLARED.format(version="1") + "\n# as before\n")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        said.count("oat: warning"),
        "code of yours has changed since this run last used it" in said,
    ) == (0, 1, True), said
    (folder / "declared.py").write_text(DECLARED.format(version="2"))
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 4)
    assert (code, "oracle declared.py:Declared has changed since this run last asked it" in said) == (
        0,
        True,
    ), said
    assert [row.get("oracle/changes") for row in rows(folder / "run")] == [None, None, None, None, 1]


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=2.0)
def test_own_code_and_held_out_data_are_warned_of(copy: Path) -> None:
    """The helper is imported by the first answer, long after the run was opened."""
    assert {"reward.py", "helper.py"} <= told(copy / "run")[0]["inputs"]["modules"].keys()
    (copy / "helper.py").write_text(HELPER + "\n# changed\n")
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        said.count("oat: warning"),
        "code of yours has changed since this run last used it" in said,
        ": helper.py" in said,
    ) == (
        0,
        1,
        True,
        True,
    )
    write_jsonl(copy / "held_out.jsonl", [{"prompt": "1+1=", "answer": "b"}])
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4)
    assert (
        code,
        said.count("oat: warning"),
        "the held-out prompts (evaluation.path) are not those" in said,
    ) == (0, 1, True), said
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 5)
    assert (code, "warning" in said) == (0, False), said


def test_an_evaluation_says_that_it_is_another(copy: Path) -> None:
    pay_more(copy)
    write_jsonl(copy / "held_out.jsonl", [{"prompt": "1+1=", "answer": "b"}])
    code, said = run(copy, "eval", "run")
    assert (code, said.count("oat: warning")) == (0, 3), said
    assert "evaluation.oracle reward.py:reward has changed since run asked it" in said
    assert "the held-out prompts (evaluation.path) are not those" in said
    code, said = run(copy, "eval", "run", "--evaluation.path", "train.jsonl")
    assert "held-out prompts" not in said, "who names others knows it"


@pytest.mark.slow(
    instead="test_before_the_first_checkpoint_start_and_prompts_are_what_the_ledger_knows", seconds=3.1
)
@pytest.mark.parametrize("is_removed", [False, True])
def test_runs_begun_before_go_on_with_one_warning(copy: Path, is_removed: bool) -> None:
    """Also one whose file was removed, which nobody can tell from them."""
    entries = [
        {name: value for name, value in entry.items() if name != "inputs"} for entry in told(copy / "run")
    ]
    (copy / "run" / "environment.json").write_text(json.dumps(entries))
    if is_removed:
        (copy / "run" / "environment.json").unlink()
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (
        code,
        said.count("oat: warning"),
        "environment.json does not say what the run's model" in said,
    ) == (0, 1, True), said
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4)
    assert (code, "warning" in said) == (0, False), said
    config(rms_norm_eps=0.01)(copy / "model")
    assert run(copy, "train", "run.yaml", "--stop.max_steps", 5)[0] == 2


def test_a_reward_file_of_a_run_begun_before_is_held_against_its_ledger(copy: Path) -> None:
    (copy / "run" / "environment.json").unlink()
    pay_more(copy)
    code, said = run(copy, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "reward.py: its text" in said) == (2, True), said


def test_what_stands_there_names_no_place(copy: Path) -> None:
    text = json.dumps([entry["inputs"] for entry in told(copy / "run") if "inputs" in entry])
    assert str(copy) not in text
    assert str(Path.home()) not in text


TRAINER = """
import oat
from {module} import reward

def train(steps, **options):
    prompts = [{{"prompt": f"{{n}}+1="}} for n in range(6)]
    settings = {{"algorithm": {{"name": "grpo", "prompts": 2, "samples": 2}}, "compute": {{"threads": 1}}}}
    settings |= {{"sampling": {{"max_new_tokens": 3}}, "stop": {{"max_steps": steps}}, "run_dir": "python"}}
    settings |= {{"model": "model", "oracle": reward, "prompts": prompts}}
    trainer = oat.Trainer(quiet=True, **settings, **options)
    trainer.train()
    return trainer.metrics
"""


@pytest.mark.slow(instead="the same by the command line", seconds=1.9)
def test_from_python_likewise(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "first.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [float(len(text)) for text in "
        "completions]\n"
    )
    (copy / "second.py").write_text(
        "def reward(prompts, completions, **columns):\n    return [50.0 + len(text) for text in "
        "completions]\n"
    )
    for module in ("first", "second"):
        (copy / f"with_{module}.py").write_text(TRAINER.format(module=module))

    def lived(module: str, steps: int, **options: Any) -> str:
        def action() -> int:
            import importlib
            import sys

            from oat.errors import OatError

            os.chdir(copy)
            sys.path.insert(0, str(copy))
            try:
                print(json.dumps(importlib.import_module(f"with_{module}").train(steps, **options)[-1]))
            except OatError as error:
                print(error)
                return error.exit_code
            return 0

        (copy / "log").unlink(missing_ok=True)
        return f"{forked(action, copy / 'log')} {(copy / 'log').read_text()}"

    assert lived("first", 1).startswith("0")
    refused = lived("second", 2)
    assert refused.startswith("2")
    assert "python:reward: its text" in refused
    assert "accept_changed=['reward'] from Python" in refused
    assert '"oracle/changes": 1.0' in lived("second", 2, accept_changed=["reward"])
    assert '"oracle/changes": 1.0' in lived("second", 3)


@pytest.mark.slow(instead="test_a_changed_reward_goes_on_only_when_that_is_accepted", seconds=1.4)
def test_a_change_is_shown_wherever_the_curve_is(copy: Path) -> None:
    pay_more(copy)
    _, said = run(copy, "train", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")
    assert [line.count("oracle/changes 1") for line in said.splitlines() if line.startswith("step ")] == [
        1,
        1,
    ], said
    code, said = run(copy, "ledger", "run")
    assert (
        code,
        "reward.py:reward and reward.py:reward/preferences had changed before step 3 took its answers"
        in said,
    ) == (0, True), said
    assert run(copy, "plot", "run", "--metric", "reward/mean", "--out", "plot.png")[0] == 0
    with (copy / "plot.csv").open(newline="") as file:
        assert [(row["steps"], row["oracle/changes"]) for row in csv.DictReader(file)] == [
            ("1", "0"),
            ("2", "0"),
            ("3", "1"),
            ("4", "1"),
        ]
    assert run(copy, "export", "run", "out")[0] == 0
    assert "oracle/changes" in (copy / "out" / "README.md").read_text()


MIXED = {
    "name": "mixture",
    "sources": [{"name": "reward_model", "path": "scores"}, {"name": "reward.py:reward", "weight": 0.5}],
}


@pytest.mark.parametrize(
    "oracle",
    [pytest.param({"name": "reward_model", "path": "scores"}, marks=pytest.mark.slow), MIXED],
    ids=["alone", "in a mixture"],
)
def test_a_reward_model_is_what_is_read_of_it(world: World, tmp_path: Path, oracle: dict[str, Any]) -> None:
    """One that is saved again is the same, with all that it has said; another field is another reward."""
    folder = make(world, tmp_path, "grpo", {"oracle": oracle, "evaluation": None})
    save_reward_model(
        folder / "scores",
        build_config("llama", vocab_rows=18),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    assert run(folder, "train", "run.yaml")[0] == 0
    by_another_program(folder / "scores")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "warning" in said) == (0, False), said
    config(rms_norm_eps=0.01)(folder / "scores")
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 4)
    assert (code, "config.json" in said, ": rms_norm_eps was 1e-06 and is 0.01" in said) == (2, True, True), (
        said
    )
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 4, "--accept-changed", "reward")
    assert (code, rows(folder / "run")[-1]["oracle/changes"]) == (0, 1), said


def test_a_reward_in_a_worker_and_what_it_imports_there(world: World, tmp_path: Path) -> None:
    folder = make(
        world,
        tmp_path,
        "grpo",
        {"oracle": {"name": "isolated", "function": "reward.py:reward"}, "evaluation": None},
    )
    (folder / "reward.py").write_text(
        REWARD.replace("    from helper import worth\n", "").replace(
            "\ndef reward", "\nfrom helper import worth\n\ndef reward"
        )
    )
    assert run(folder, "train", "run.yaml", "--stop.max_steps", 1)[0] == 0
    (folder / "helper.py").write_text(HELPER + "\n# changed\n")
    code, said = run(folder, "train", "run.yaml")
    assert (code, ": helper.py" in said) == (0, True), said
    pay_more(folder)
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "reward.py: its text" in said) == (2, True), said


@pytest.mark.slow(instead="test_a_reward_in_a_worker_and_what_it_imports_there", seconds=1.6)
def test_what_a_worker_imports_only_when_it_is_asked(world: World, tmp_path: Path) -> None:
    folder = make(
        world,
        tmp_path,
        "grpo",
        {"oracle": {"name": "isolated", "function": "reward.py:reward"}, "evaluation": None},
    )
    assert run(folder, "train", "run.yaml", "--stop.max_steps", 1)[0] == 0
    (folder / "helper.py").write_text(HELPER.replace("0.1", "0.7"))
    code, said = run(folder, "train", "run.yaml")
    assert (code, ": helper.py" in said) == (0, True), said


@pytest.mark.slow(instead="the same of a reward function", seconds=1.6)
def test_the_file_of_an_environment_is_that_of_the_reward(world: World, tmp_path: Path) -> None:
    changes = {
        "oracle": {"name": "environment"},
        "sampling.environment": "game.py:Twice",
        "evaluation": None,
        "render.template": None,
    }
    folder = make(world, tmp_path, "grpo", changes)
    (folder / "game.py").write_text(GAME)
    assert run(folder, "train", "run.yaml", "--stop.max_steps", 2)[0] == 0
    (folder / "game.py").write_text(GAME.replace('"a"', '"b"'))
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3)
    assert (code, "game.py: its text" in said) == (2, True), said
    code, said = run(folder, "train", "run.yaml", "--stop.max_steps", 3, "--accept-changed", "reward")
    assert (code, rows(folder / "run")[-1]["oracle/changes"]) == (0, 1), said


def test_a_hub_model_is_what_is_read_of_its_commit(world: World, tmp_path: Path) -> None:
    """Another cache, as on another machine, and another commit: what it says counts, and not where it
    lies."""
    import huggingface_hub.constants
    import transformers.utils.hub

    folder = make(world, tmp_path, "dpo", {"model.path": "org/name"})

    def published(cache: str, commit: str, change: Callable[[Path], None]) -> Callable[[], None]:
        place = folder / cache / "models--org--name"
        shutil.copytree(folder / "model", place / "snapshots" / commit)
        change(place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)

        def patch() -> None:
            for module in (huggingface_hub.constants, transformers.utils.hub):
                for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE"):
                    if hasattr(module, name):
                        setattr(module, name, str(folder / cache))
            huggingface_hub.constants.HF_HUB_OFFLINE = True

        return patch

    code, said = run(folder, "train", "run.yaml", before=published("here", "a" * 40, lambda model: None))
    assert code == 0, said
    assert told(folder / "run")[0]["inputs"]["weights"]["model.path"]["is"]["weights"]
    code, said = run(
        folder,
        "train",
        "run.yaml",
        "--stop.max_steps",
        3,
        before=published("there", "b" * 40, by_another_program),
    )
    assert (code, "warning" in said) == (0, False), said
    code, said = run(
        folder,
        "train",
        "run.yaml",
        "--stop.max_steps",
        4,
        before=published("there", "c" * 40, config(rms_norm_eps=0.01)),
    )
    assert (
        code,
        "model.path is 'org/name'" in said,
        "config.json: rms_norm_eps was 1e-06 and is 0.01" in said,
    ) == (2, True, True), said
    code, said = run(
        folder, "train", "run.yaml", "--stop.max_steps", 4, before=published("there", "d" * 40, other_weights)
    )
    assert (code, "weights: lm_head.weight" in said) == (2, True), said


def test_a_lambda_is_what_it_does_and_not_the_line_it_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line with what may change, such as the number of steps."""
    one, other = (lambda prompts, completions: [len(text) for text in completions]), 100
    same, more = (
        (lambda prompts, completions: [len(text) for text in completions]),
        (lambda prompts, completions: [2 * len(text) for text in completions]),
    )
    found = []
    for function in (one, same, more):
        monkeypatch.setitem(plugins.given, "lambda_", function)
        found.append(build_oracle("python:lambda_", {}))
    assert len({oracle.version for oracle in found[:2]}) == 2, other
    assert found[0].made_of == found[1].made_of != found[2].made_of
