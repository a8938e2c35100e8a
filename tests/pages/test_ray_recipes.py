"""The recipes of runs on a Ray cluster work as the README shows them."""

import re
import shlex
from pathlib import Path

import pytest
from fixtures import oat
from tiny_models import build_config, save_model

from oat.commands.export import digest_run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = re.findall(r"^oat (train configs/\w+_ray\.yaml.*)$", README, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_a_recipe_on_a_cluster_is_the_run_without_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its cluster, the recipe has the same digests."""
    monkeypatch.chdir(ROOT)
    model = save_model(tmp_path / "model", build_config("llama", layers=1, context=256))
    small = ["--model", model, "--algorithm.prompts", "4", "--stop.max_steps", "2", "--evaluation", "null"]
    (line,) = {line for line in LINES if f"/{name}_ray.yaml" in line}
    words = shlex.split(line, comments=True)
    digests = []
    for where, flags in {"cluster": [], "local": ["--compute", "{threads: 1}"]}.items():
        run_dir = tmp_path / where
        assert oat(*words, *small, *flags, "--engine.threads", "1", "--run_dir", run_dir) == 0
        digests.append(digest_run(run_dir))
    assert digests[0] == digests[1]
