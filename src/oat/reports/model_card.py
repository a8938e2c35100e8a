"""The model card of an exported model. It names the start model, the prompts, and the oracles with their
cost. It also has a table of metrics, the configuration, and code that loads the model."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from oat.config.yaml_text import tree_to_yaml
from oat.files import absolute
from oat.ledger.reader import Reader
from oat.reports.accounts import accounts
from oat.resolve.about import RunSummary
from oat.rundir.provenance import is_secret, versions
from oat.rundir.rows import read_metrics
from oat.types import UNASKED
from oat.types.questions import in_money

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHOWN = (
    "eval/sampled",
    "eval/greedy",
    "eval/best",
    "eval/gold_sampled",
    "eval/pairs/accuracy",
    "reward/mean",
    "pairs/accuracy",
    "kl/reference",
    "response/length",
    "oracle/queries",
    "oracle/changes",
)
_ROWS = 12
_PURPOSES = {"train": "in training", "eval": "in evaluations", "gold": "in evaluations, as the gold oracle"}

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```

or with vLLM: `vllm serve {place}`
"""
_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = "{base}"
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```

or with vLLM: `vllm serve {base} --enable-lora --lora-modules policy={place}`
"""
_LOAD_ADAPTER_OF_FOLDER = """```python
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = PeftConfig.from_pretrained("{place}").base_model_name_or_path  # or where {base} is on this machine
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```

or with vLLM, where `BASE` is the path of {base}, in `adapter_config.json` as `base_model_name_or_path`:
`vllm serve BASE --enable-lora --lora-modules policy={place}`
"""
"""As `_LOAD_ADAPTER`, if the base model is a folder. A card has no paths, and PEFT's file has this one."""


_LOAD_REWARD = """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```

or as an oracle of oat: `oracle: {{name: reward_model, path: {place}}}`
"""


_LOAD_CRITIC = """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")
```

or as the start of a critic of oat: `model: {{critic: {place}}}`
"""
_WORDS = {
    "policy": ("policy", "aligned online from", "text-generation", _LOAD),
    "adapter": ("policy", "a LoRA adapter of", "text-generation", _LOAD_ADAPTER),
    "reward": ("reward model", "begun as", "text-classification", _LOAD_REWARD),
    "critic": ("critic", "begun as", "text-classification", _LOAD_CRITIC),
}
"""For each kind of exported model: its name, how it is related to the model that it started from, its task on
the hub, and code that loads it."""


def model_card(run_dir: Path, about: RunSummary, step: int, out: Path, *, what: str) -> str:
    """Return the text of README.md for an exported model.

    Absolute paths are cut to their last part, so the card does not show the directories of this machine.

    Args:
        about: settings of the run.
        step: step of the exported checkpoint.
        out: directory of the exported model.
        what: "policy", "adapter" (only the policy's LoRA adapter is exported), "reward" or "critic".
    """
    named, kind, task, load = _WORDS[what]
    start = (about.critic if what == "critic" else None) or about.model
    base, is_adapter = _public(start), what == "adapter"
    name = out.resolve().name
    algorithm = _public(about.algorithm)
    front = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": task,
        "tags": ["oat", algorithm],
    }
    is_of_hub = _HUB_ID.fullmatch(start) is not None and not absolute(start).exists()
    if is_adapter and not is_of_hub:
        load = _LOAD_ADAPTER_OF_FOLDER
    if is_of_hub:
        front |= {
            "base_model": start,
            "base_model_relation": "adapter" if is_adapter else "finetune",
        }
    sections = {
        "How to load it": load.format(place=name, base=base),
        "What it learned from": _sources(run_dir, about.prompts),
        "How it went": _curve(run_dir, step),
        "Configuration": f"```yaml\n{tree_to_yaml(_without_places(about.tree))}```\n",
        "Versions": "".join(f"* {name} {version}\n" for name, version in versions().items()),
    }
    head = "\n".join(f"{field}: {json.dumps(value)}" for field, value in front.items())
    opening = f"The {named} after {step} steps of {algorithm}, {kind} `{base}`, by oat.\n"
    return "\n".join(
        [
            f"---\n{head}\n---\n\n# {name}\n\n{opening}",
            *(f"## {title}\n\n{text}" for title, text in sections.items()),
        ]
    )


def _sources(run_dir: Path, paths: Sequence[str]) -> str:
    lines = [f"* Prompts: {', '.join(f'`{_public(path)}`' for path in paths)}"]
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        for account in [account for account in accounts(store) if account.oracle != UNASKED]:
            cost = f", at a cost of {in_money(account.cost)}" if account.cost else ""
            work = _PURPOSES.get(account.purpose, account.purpose)
            took = f"{account.queries:,} queries in {account.answered - account.unpaid:,} questions{cost}"
            lines.append(f"* Oracle `{_public(account.oracle)}`, {work}: {took}")
    return "\n".join(lines) + "\n"


def _curve(run_dir: Path, last: int) -> str:
    """Return a table of metrics with at most `_ROWS` rows, up to the step `last`. If several rows have an
    evaluation, the table has only such rows."""
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] <= last}
    evaluated = [step for step, row in rows.items() if any(name.startswith("eval/") for name in row)]
    steps = _spread(evaluated if len(evaluated) > 1 else list(rows), _ROWS)
    names = [name for name in _SHOWN if any(name in rows[step] for step in steps)]
    table = [["step", *names], ["---"] * (len(names) + 1)]
    table += [
        [str(step), *(f"{rows[step][name]:,.4g}" if name in rows[step] else "" for name in names)]
        for step in steps
    ]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in table)


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the steps, the first and the last included."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _without_places(value: Any) -> Any:
    """Return settings as plain data. Absolute paths are cut to their last part. If a field has the name of a
    secret, its value becomes "***"."""
    if isinstance(value, Mapping):
        return {
            name: "***" if is_secret(name) and item is not None else _without_places(item)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    return _public(value) if isinstance(value, str) else value


def _public(name: str) -> str:
    place, colon, rest = name.partition(":")
    return Path(place).name + colon + rest if Path(place).is_absolute() else name
