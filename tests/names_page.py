"""Write docs/names.md from the tables of names in `src/oat/config/peers`: `python tests/names_page.py`."""

from pathlib import Path

import yaml

from oat.config.peers.copied import tree_of
from oat.config.peers.switches import SWITCHES
from oat.config.peers.table import Row, rows, values
from oat.config.peers.theirs import CLASSES, trl_fields, versions
from oat.config.peers.trl_defaults import LEARNED, by_default

PAGE = Path(__file__).parent.parent / "docs" / "names.md"
SAID = {"*": "it", "*-1": "it - 1", "*/s": "it / (`algorithm.epochs` x `algorithm.minibatches`), rounded up"}
SAID["512/s"] = SAID["*/s"].replace("it", "512", 1)
"""How the right side of a conversion reads."""
INTRODUCTION = """# Names of TRL, OpenRLHF and verl

What the settings of other libraries are called here; `python tests/names_page.py` makes this page from the
tables in `src/oat/config/peers`. The message about an unknown setting reads the same tables, so
`--num_generations 8` says what to write in its place.

A step here asks about `algorithm.prompts` prompts with `algorithm.samples` responses each, and learns from
them in `algorithm.epochs` passes of `algorithm.minibatches` optimiser steps. So a field there that counts
completions, records or optimiser steps needs a conversion. In the column *value*, "the same" is a value that
does not change, A → B a value A that becomes B, and "it" the value itself; without an entry the value has to
be worked out. In brackets stands what a value gives too unless another name says otherwise; you choose the
value of a setting with `...`. A name without a setting means nothing here. A name with an algorithm, or
a family of them, in brackets means this with it: `pairs` learn from pairs of responses, `reward` and `sft`
are `reward_model` and `sft`.
"""
PORTED = """## A script of TRL here

With TRL, two reward functions with weights, an adapter and a few settings:

```py
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def right(completions, answer, **columns):
    return [float(text.strip() == each) for text, each in zip(completions, answer)]


def brief(completions, **columns):
    return [-len(text) / 100 for text in completions]


trainer = GRPOTrainer(
    model="quickstart/start",
    reward_funcs=[right, brief],
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    args=GRPOConfig(
        output_dir="runs/ported",
        reward_weights=[1.0, 0.1],
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_completion_length=8,
        max_steps=4,
        learning_rate=1e-5,
        beta=0.04,
        bf16=False,
    ),
)
trainer.train()
```

Here the functions stay as they are. A step has 16 responses, so 4 prompts, and two optimiser steps, one in
each pass. The settings that are not in the script above are defaults of TRL (`loss_type`, the unbiased KL,
`lr_scheduler_type`, `adam_beta2`):

```python
import oat


def right(completions, answer, **columns):
    return [float(text.strip() == each) for text, each in zip(completions, answer)]


def brief(completions, **columns):
    return [-len(text) / 100 for text in completions]


trainer = oat.Trainer(
    model={"path": "quickstart/start", "lora": {"rank": 8, "alpha": 16}},
    oracle=[{"name": right, "weight": 1.0}, {"name": brief, "weight": 0.1}],
    prompts="prompts.jsonl",
    algorithm={
        "name": "grpo",
        "reduction": "token",
        "prompts": 4,
        "samples": 4,
        "epochs": 2,
        "kl_coef": 0.04,
        "kl_unbiased": True,
    },
    sampling={"max_new_tokens": 8},
    learner={"learning_rate": 1e-5, "schedule": "linear", "betas": [0.9, 0.999], "autocast": None},
    stop={"max_steps": 2},
    run_dir="runs/ported",
)
trainer.train()
```

As a file for `oat train`, with the two functions in reward.py:

```yaml
model: {path: quickstart/start, lora: {rank: 8, alpha: 16}}
oracle:
  name: mixture
  sources: [{name: "reward.py:right", weight: 1.0}, {name: "reward.py:brief", weight: 0.1}]
prompts: {path: prompts.jsonl}
algorithm: {name: grpo, reduction: token, prompts: 4, samples: 4, epochs: 2, kl_coef: 0.04, kl_unbiased: true}
sampling: {max_new_tokens: 8}
learner: {learning_rate: 1e-5, schedule: linear, betas: [0.9, 0.999], autocast: null}
stop: {max_steps: 2}
run_dir: runs/ported
```
"""
DEFAULTS = """## TRL's defaults

To train as TRL {trl} does by default, on one device, write this. The message about a whole configuration of
TRL's, such as `args=GRPOConfig(...)` or a file with its fields, adds the settings that are not in it to the
block to copy, and marks them. Settings with equal defaults are left out, and those that change memory, speed
or files alone. Replace `learner.schedule_steps`, which is `prompts.epochs` x records / `algorithm.prompts`
optimiser steps, here of {records:,} records. No setting has these differences:

* A linear schedule falls to 0 there, and to a tenth of the rate here.
* The KL to the reference (`beta`, off by default) is unbiased there: write `algorithm.kl_unbiased: true`
  beside `algorithm.kl_coef`.
* Records of messages get the chat template there: write `render: {{template: tokenizer}}`.
* An adapter of peft is on the layers that peft chooses for the model unless `target_modules` names them, and
  here on every linear layer unless `model.lora.targets` does.
"""
RECORDS = 1000
"""Number of records for which the page has the steps of a schedule."""
HEADS = {
    "TrainingArguments": "## TRL: fields of every configuration\n\nTRL {trl} with transformers "
    "{transformers}. Its configurations inherit these fields of `TrainingArguments`.",
    "GRPOConfig": "## TRL: GRPOConfig",
    "DPOConfig": "## TRL: DPOConfig",
    "RewardConfig": "## TRL: RewardConfig",
    "SFTConfig": "## TRL: SFTConfig",
    "trainers": "## TRL: arguments of the trainers",
    "older": "## TRL: older names\n\nNames that earlier versions of TRL and transformers had.",
    "ModelConfig": "## TRL: flags of its scripts\n\nThe fields of `ModelConfig` and `ScriptArguments`.",
    "OpenRLHF": "## OpenRLHF\n\nOpenRLHF {openrlhf}; `older`: names before its flags had dots.",
    "verl": "## verl\n\nverl {verl}.",
    "peft": "## peft\n\nThe fields of its `LoraConfig`, which may also stand in a section `lora`.",
    "": "## Names in common use",
    "values": "## Values\n\nValues of other libraries in a setting of ours.",
}


def page() -> str:
    known = {name.lower(): version for name, version in versions().items()}
    known["transformers"] = trl_fields()["versions"]["transformers"]
    parts = [INTRODUCTION, PORTED, DEFAULTS.format(**known, records=RECORDS)]
    parts += [f"### {cls}\n\n```yaml\n{block(cls)}```\n" for cls in CLASSES]
    for head, title in HEADS.items():
        has_groups = head in ("trainers", "ModelConfig", "OpenRLHF")
        parts += [title.format(**known) + "\n", *table(of(head), has_groups, head == "values"), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def block(cls: str) -> str:
    """Return the YAML of a run that trains as one of TRL's classes does by default."""
    algorithm = CLASSES[cls]
    ours = by_default(cls, [], None)
    ours["learner.schedule_steps"] = ours["prompts.epochs"] * RECORDS // ours["algorithm.prompts"]
    oracle = "reward.py:reward" if algorithm == "grpo" else "recorded"
    given = {"model.path": "org/name", "oracle.name": oracle, "prompts.path": f"{cls[:-6].lower()}.jsonl"}
    given |= ours
    order = [*("model", "oracle"), *LEARNED]
    tree = tree_of(dict(sorted(given.items(), key=lambda pair: order.index(pair[0].partition(".")[0]))))
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100)


def of(head: str) -> list[Row]:
    """Return the rows below a heading."""
    if head == "values":
        return list(values().values())
    if head == "trainers":
        return [row for row in rows() if row.groups[0].endswith("Trainer")]
    if head == "ModelConfig":
        return [row for row in rows() if row.groups[0] in ("ModelConfig", "ScriptArguments")]
    if head in ("OpenRLHF", "verl", "peft", ""):
        return [row for row in rows() if row.peer == head]
    known = [row for row in rows() if row.peer == "TRL"]
    return [row for row in known if head in [group.partition(":")[0] for group in row.groups]]


def table(found: list[Row], has_groups: bool, has_values: bool) -> list[str]:
    first = "setting | value there" if has_values else "in | name" if has_groups else "name"
    lines = [f"| {first} | here | value | remark |", "| --- " * (first.count("|") + 4) + "|"]
    for row in found:
        groups = (
            f"`{row.groups[0]}`"
            if has_values
            else ", ".join(dict.fromkeys(group.partition(":")[0] for group in row.groups))
        )
        own = ", ".join(f"`{group.partition(':')[2]}`" for group in row.groups if ":" in group)
        name = f"`{row.field}`" + (f" ({own})" if own else "")
        name = f"{groups} | {name}" if has_groups or has_values else name
        here = ", ".join(f"`{setting}`" for setting in row.settings)
        lines.append(f"| {name} | {here} | {written(row)} | {row.remark}{switches(row)} |")
    return lines


def switches(row: Row) -> str:
    """Return without which other fields TRL ignores a row's, as a sentence."""
    needed = SWITCHES.get(row.field, ()) if row.peer == "TRL" else ()
    kin = [switch for switch in needed if not switch.families or row.groups[0].startswith("GRPO")]
    shown = " and ".join(f"`{each.shown}`" for each in kin)
    return f" TRL {kin[0].verb} it without {shown}." if kin else ""


def written(row: Row) -> str:
    """Return a row's conversion as text."""
    if row.conversion in ("=", "whole"):
        return "the same"
    texts = []
    for entry in row.conversion.split("; ") if row.conversion else []:
        there, ours = entry.split(" -> ")
        name = {"*": "others" if texts else "any", "whole": "whole numbers", "list": "a list"}.get(
            there, f"`{there}`"
        )
        if ours == "=":
            texts.append(f"{name} → the same" if texts else "the same")
        else:
            texts.append(f"{name} → {settings_in(row, ours)}")
    return "; ".join(texts)


def settings_in(row: Row, ours: str) -> str:
    """Return the settings that a value gives; in brackets those that give way to other names."""
    pairs = (
        [pair.split("=", 1) for pair in ours.split(" & ") if not pair.endswith("=-")] if ours != "-" else []
    )
    texts = {False: list[str](), True: list[str]()}
    for setting, value in pairs:
        gives_way = setting.endswith("?") and len(pairs) > 1
        name = setting.rstrip("?")
        said = SAID.get(value, f"`{value}`")
        is_short = len(pairs) == 1 and (name,) == row.settings[:1]
        plain = "..." if value == "..." else value
        full = f"`{name}`: {said}" if value in SAID else f"`{name}: {plain}`"
        texts[gives_way].append(said if is_short else full)
    bracket = f" ({', '.join(texts[True])})" if texts[True] else ""
    return f"{', '.join(texts[False])}{bracket}".strip() or "no setting"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
