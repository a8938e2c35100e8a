"""The recipes of runs with several processes work as the tour shows them, from the folder of a quickstart."""

import re
import shlex
from pathlib import Path

import pytest
from fixtures import oat

from oat.commands.digest import digest_run
from oat.models.loading import save_lm
from oat.quickstart.task import build_model, build_task, build_tokenizer, supervise

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
LINES = re.findall(r"^oat (train configs/\w+_(?:ray|processes)\.yaml.*)$", TOUR, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_ray", "dpo_ray", "grpo_processes"])
def test_a_recipe_is_the_run_in_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, the recipe has the same digests. The model is that of the quickstart, which has
    learned for a short time."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    (start := Path("quickstart/start")).parent.mkdir()
    (task := build_task(0, demonstrations=12_800)).write(start.parent)
    lm = build_model(tokenizer := build_tokenizer(), 0)
    supervise(lm, tokenizer, task.demonstrations)
    save_lm(lm, tokenizer, str(start))
    (line,) = {line for line in LINES if f"/{name}.yaml" in line}
    words = [*shlex.split(line, comments=True), "--stop.max_steps", "3"]
    digests = []
    for where, flags in {"apart": [], "local": ["--compute", "{threads: 1}"]}.items():
        assert oat(*words, *flags, "--run_dir", tmp_path / where) == 0
        digests.append(digest_run(tmp_path / where))
    assert digests[0] == digests[1]
