"""Arguments and classes of other libraries that a user gives to `oat.Trainer` or looks for in `oat`."""

import pytest

import oat as package


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GRPOTrainer", 'oat.Trainer(algorithm="grpo", ...)'),
        ("RewardConfig", 'oat.Trainer(algorithm="reward_model", ...)'),
        ("ORPOConfig", 'oat.Trainer(algorithm="orpo", ...)'),
        ("NashMDTrainer", "oat.Trainer (docs/python.md)"),
    ],
)
def test_a_class_of_trl_is_named_as_what_it_is_here(name: str, expected: str) -> None:
    assert not hasattr(package, name)
    for error, line in ((AttributeError, f"oat.{name}"), (ImportError, f"from oat import Trainer, {name}")):
        with pytest.raises(error) as refused:
            exec(line, {"oat": package})
        assert expected in str(refused.value)
        assert "docs/names.md" in str(refused.value)


def test_other_names_and_submodules_are_as_in_any_package() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from oat import nothing")
    with pytest.raises(AttributeError, match=r"'nothing'$"):
        package.nothing  # noqa: B018
    exec("from oat import config, errors")
