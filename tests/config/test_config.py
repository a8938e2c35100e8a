"""The configuration: what is read, what is refused, and the messages."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from configurations import MINIMAL, OFFLINE, PLAYED, resolved
from fixtures import World, oat

from oat.config.load import dump, load_config, to_yaml
from oat.config.settings import MAIN_FIELDS
from oat.errors import ConfigError, ModelError
from oat.opening.given import tree_of
from oat.resolve.resolve import resolve


def test_a_file_and_its_defaults(here: Path) -> None:
    config, origins = load_config("run.yaml")
    assert (config.model.path, config.learner.learning_rate, config.seed, config.engine.name) == (
        "models/tiny",
        0.0005,
        0,
        "torch",
    )
    assert config.run_dir == os.path.join("runs", "run")
    assert origins["learner", "learning_rate"] == "run.yaml:14"
    assert config.algorithm.options == {"prompts": 4, "samples": 2}
    assert resolve(config, origins).config.algorithm.options["clip_low"] == 0.2


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--learner.learning_rate", "1e-4"], "learner.learning_rate", 1e-4),
        (["--learner.learning_rate=3"], "learner.learning_rate", 3.0),
        (["--seed", "-7"], "seed", -7),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        (["--learner.betas", "[0.8, 0.9]"], "learner.betas", (0.8, 0.9)),
        (["--sampling.stop=['\\n', 'Q:']"], "sampling.stop", ("\\n", "Q:")),
        (["--sampling.stop", '["\\n"]'], "sampling.stop", ("\n",)),
        (["--prompts.epochs", "null"], "prompts.epochs", None),
        (["--prompts.shuffle", "false"], "prompts.shuffle", False),
        (["--oracle.deadline_s", ".inf"], "oracle.deadline_s", float("inf")),
        (["--model.path=a=b"], "model.path", "a=b"),
        (["--evaluation.path", "held_out.jsonl"], "evaluation.path", "held_out.jsonl"),
        (["--checkpoint", "{every: 3}"], "checkpoint.every", 3),
        (["--run_dir", '"1e5"'], "run_dir", "1e5"),
        (["--algorithm", "dpo"], "algorithm.name", "dpo"),
        (["--prompts", "other.jsonl"], "prompts.path", "other.jsonl"),
    ],
)
def test_flags(here: Path, flags: list[str], name: str, value: Any) -> None:
    found: Any = load_config("run.yaml", flags)[0]
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_section_may_be_its_main_field_alone(here: Path) -> None:
    """A file may give the value alone where `oat.Trainer` takes it, and a flag adds fields to it."""
    short = "model: models/tiny\nprompts: train.jsonl\noracle: exact_match\nalgorithm: grpo\n"
    (here / "short.yaml").write_text(f"{short}stop: {{max_steps: 3}}\n", encoding="utf-8")
    flags = [
        *("--run_dir", "runs/run", "--sampling.max_new_tokens", "8", "--learner.learning_rate", "5e-4"),
        *("--algorithm.prompts", "4", "--algorithm.samples", "2", "--engine", "torch", "--explorer", "none"),
    ]
    assert resolved("short.yaml", *flags) == resolved("run.yaml")
    assert load_config("short.yaml")[1]["algorithm", "name"] == "short.yaml:4"
    from_python = tree_of(*"xxxx", {"engine": "x", "explorer": "x"})
    assert {from_python[name][field] for name, field in MAIN_FIELDS.items()} == {"x"}


def test_numbers_as_people_write_them(here: Path) -> None:
    for text, value in {"5e-4": 5e-4, "1E+2": 100.0, "2.e1": 20.0, ".5": 0.5, "1": 1.0}.items():
        (here / "run.yaml").write_text(MINIMAL.replace("5e-4", text), encoding="utf-8")
        assert load_config("run.yaml")[0].learner.learning_rate == value


def test_a_flag_that_replaces_a_section_takes_its_fields_along(here: Path) -> None:
    """A flag for a section removes all of the section's fields in the file. Checks between settings then also
    ignore them: `oracle.labels` of the file is dropped."""
    (here / "run.yaml").write_text(
        MINIMAL.replace("exact_match", "exact_match\n  labels: bernoulli"), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:9: .*oracle.labels"):
        resolved("run.yaml")
    assert resolved("run.yaml", "--oracle", "{name: exact_match}").oracle.labels == "threshold"
    with pytest.raises(ConfigError, match=r"--oracle: .*oracle.scale"):
        resolved("run.yaml", "--oracle", "{name: exact_match, scale: 2}")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm", "{name: dpo, prompts: 2}", "--oracle.labels", "bernoulli", "--oracle.scale", "2"],
        ["--algorithm", "{name: 'mine.py:Mine', prompts: 2, strength: 1e-3}"],
        [
            "--oracle",
            (
                "{name: 'mine.py:Asked', threshold: 1e9, words: ['1e5', 'null', '0x1', '\\u2028', 'ü'], "
                "deep: "
                "{a: [1, null, true]}}"
            ),
        ],
        [
            "--run_dir",
            '"5e-4"',
            "--render.template",
            '"null"',
            "--sampling.stop",
            '["1e3", "\\u0085", "on", " "]',
        ],
        [
            "--learner.schedule",
            "cosine",
            "--evaluation",
            "{path: x.jsonl, every: 7}",
            "--engine.deterministic",
            "true",
        ],
    ],
)
def test_a_written_configuration_reads_back_equal(here: Path, flags: list[str]) -> None:
    """A written configuration is read back unchanged. It states every field, including fields that the
    algorithm does not read, with their defaults."""
    config = resolved("run.yaml", *flags)
    (here / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = resolved("again.yaml")
    assert dump(again) == dump(config)
    assert again == config
    (here / "thrice.yaml").write_text(to_yaml(again), encoding="utf-8")
    assert (here / "thrice.yaml").read_text(encoding="utf-8") == (here / "again.yaml").read_text(
        encoding="utf-8"
    )


def test_a_merged_section_may_be_overridden(here: Path) -> None:
    text = "checkpoint: &often {every: 3}\nevaluation:\n  <<: *often\n  every: 5\n  path: held_out.jsonl\n"
    (here / "run.yaml").write_text(MINIMAL + text, encoding="utf-8")
    config = load_config("run.yaml")[0]
    assert config.evaluation is not None
    assert (config.checkpoint.every, config.evaluation.every) == (3, 5)


def test_defaults_that_follow_from_other_settings(here: Path) -> None:
    dr_grpo = ["--algorithm.name", "dr_grpo"]
    assert resolved("run.yaml", *dr_grpo).algorithm.options["max_length"] == 8
    assert (
        resolved("run.yaml", *dr_grpo, "--sampling.max_new_tokens", "5").algorithm.options["max_length"] == 5
    )
    assert (
        resolved("run.yaml", *dr_grpo, "--algorithm.max_length", "20").algorithm.options["max_length"] == 20
    )
    assert (
        resolved("run.yaml", *dr_grpo, *PLAYED, "--algorithm.max_length", "9").algorithm.options["max_length"]
        == 9
    )
    with pytest.raises(
        ConfigError, match=r"max_length is 7: .*tokens 8; set as much or more, the most .*epis"
    ):
        resolved("run.yaml", *dr_grpo, *PLAYED, "--algorithm.max_length", "7")
    assert resolved("run.yaml", *OFFLINE).algorithm.options["samples"] == 2
    assert (
        resolved("run.yaml", *OFFLINE, "--algorithm", "{name: sft, prompts: 2}").algorithm.options["samples"]
        == 2
    )
    assert (
        resolved(
            "run.yaml", *OFFLINE, "--prompts.responses", "[a, b, c]", "--algorithm.name", "sft"
        ).algorithm.options["samples"]
        == 3
    )


def test_a_section_that_needs_no_field_may_be_empty_or_missing(here: Path) -> None:
    tree = yaml.safe_load(MINIMAL)
    del tree["stop"]
    (here / "run.yaml").write_text(
        yaml.safe_dump({**tree, "render": None, "prompts": {"path": "train.jsonl", "epochs": 2}}),
        encoding="utf-8",
    )
    assert resolved("run.yaml").prompts.epochs == 2


@pytest.mark.parametrize("section", [{"name": "one"}, {}, None, "one"])
def test_the_router_of_an_older_configuration_is_read_and_left_out(here: Path, section: Any) -> None:
    """Configurations of earlier versions have a section `router`. It is accepted and ignored."""
    without = resolved("run.yaml")
    assert resolved("run.yaml", "--router.name", "one") == without
    (here / "run.yaml").write_text(yaml.safe_dump({**yaml.safe_load(MINIMAL), "router": section}))
    assert resolved("run.yaml") == without
    assert "router" not in to_yaml(without)


@pytest.mark.parametrize("field", ["path", "reference"])
def test_a_model_beside_the_configuration_is_found_without_the_hub(here: Path, field: str) -> None:
    """`model.path` is `start/one`, which could be a model of the hub. The error names the folder beside the
    configuration and does not ask the hub, which takes seconds without a network."""
    (here / "below" / "start" / "one").mkdir(parents=True)
    changed = MINIMAL.replace(
        "  path: models/tiny",
        "  path: start/one" if field == "path" else "  path: models/tiny\n  reference: start/one",
    )
    (here / "below" / "run.yaml").write_text(changed)
    with pytest.raises(ModelError) as refused:
        resolved("below/run.yaml")
    line = 2 if field == "path" else 3
    assert str(refused.value) == (
        f"below/run.yaml:{line}: model.{field} is 'start/one': there is no directory start/one in {here}; "
        "there is below/start/one, and paths are "
        "taken from the working directory, not from the configuration's folder: give that path"
    )


def test_a_start_that_fails_can_be_mended_and_repeated(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remains of a failed start in the run directory do not prevent the next start. Other files do."""
    config = world.config(
        "dpo", tmp_path, {"stop.max_steps": 1, "evaluation.path": str(tmp_path / "absent.jsonl")}
    )
    assert oat("train", config) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    assert oat("train", config, "--evaluation", "null") == 0
    (tmp_path / "dpo" / "config.yaml").unlink()
    assert oat("train", config, "--evaluation", "null") == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_dir_that_is_a_file(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.config("dpo", tmp_path)
    assert oat("train", config, "--run_dir", config) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_flag_alone_is_true_and_serialise_is_short(here: Path) -> None:
    assert resolved("run.yaml", "--serialise").compute.serialise
    assert resolved("run.yaml", "--compute.serialise", "--seed", "3").compute.serialise
    assert not resolved("run.yaml", "--serialise", "false").compute.serialise


@pytest.mark.parametrize("text", ["runs/h #2", "runs/a\nb", " a  b ", "h #", "x\n\ny", "\u2028é"])
def test_a_text_of_a_flag_is_taken_as_it_is(text: str, tmp_path: Path) -> None:
    """YAML alone would drop a comment and fold blanks: another folder."""
    file = tmp_path / "a.yaml"
    file.write_text(MINIMAL)

    def run_dir(given: str) -> str:
        return load_config(file, ["--run_dir", given])[0].run_dir

    assert run_dir(text) == text
    assert (run_dir('"007"'), run_dir("'a #b'")) == ("007", "a #b")
