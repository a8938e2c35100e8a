"""Flags of other libraries are read as they read them."""

import pytest

from oat.config.load import load_tree
from oat.config.peers.theirs import CLASSES, SHARED, fields_of, trl_fields
from oat.config.settings import Config
from oat.errors import ConfigError

ALL = {
    (field, ours): what
    for cls, ours in CLASSES.items()
    for field, what in fields_of(cls).items()
    if field not in Config.__dataclass_fields__ and (ours == "grpo" or field not in trl_fields()[SHARED])
}
"""The fields of TRL's classes, with our algorithm for each; those that all of them inherit stand once."""
BOOLS = [key for key, what in ALL.items() if "bool" in what["type"].split(" | ")]


def message(given: list[str], algorithm: str) -> str:
    tree = {name: {"path": "p"} for name in ("model", "prompts")}
    own = {"oracle": {"name": "exact_match"}, "algorithm": {"name": algorithm}}
    with pytest.raises(ConfigError) as caught:
        load_tree({**tree, **own}, {(): "run.yaml"}, "run.yaml", given)
    return str(caught.value)


def test_a_flag_no_name_of_trl_is_false() -> None:
    """HfArgumentParser has such a flag for every bool that is true by default."""
    assert len(BOOLS) > 60
    for number, (field, algorithm) in enumerate(BOOLS):
        flag = f"--no-{field.replace('_', '-')}" if number % 2 else f"--no_{field}"
        said = message([f"--{field}=false"], algorithm).removeprefix(f"--{field}")
        assert message([flag], algorithm) == f"{flag}{said}"


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("no_shuffle_dataset", "--prompts.shuffle false"),
        ("no_gradient_checkpointing", "--learner.gradient_checkpointing false"),
        ("no_use_bias_correction_kl", "--algorithm.kl_unbiased false"),
    ],
)
def test_the_value_of_a_flag_no_name_is_told(flag: str, ours: str) -> None:
    assert ours in message([f"--{flag}"], "grpo")
    assert ours in message(["--beta", "0.04", f"--{flag}", "--num_generations", "8"], "grpo")


def test_further_words_of_a_flag_of_another_library_are_its_list() -> None:
    for field, algorithm in [*ALL, ("eps_clip_low_high", "grpo"), ("nobody_has_this", "grpo")]:
        said = message([f"--{field}", "1.0", "0.5", "--num_generations", "4"], algorithm)
        assert f"nothing reads the field `{field}`" in said
    said = message(["--num_generations", "4", "trainer.total_epochs=2", "algorithm.gamma=0.9"], "grpo")
    assert "--prompts.epochs 2" in said
    said = message(["--learner.betas", "0.9", "0.95"], "grpo")
    assert "--learner.betas '[a, b]'" in said
    assert "0.95" not in said
