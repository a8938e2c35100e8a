"""Write docs/coverage.md from the tests' `inventory` markers: `python tests/coverage_page.py`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
FEATURES = {
    1: "token log-probabilities with shift and mask",
    2: "right and left padding invariance",
    3: "DPO loss",
    4: "label smoothing (cDPO)",
    5: "DPO-Positive",
    6: "length regularisation",
    7: "SFT term in DPO",
    8: "IPO",
    9: "SLiC",
    10: "SimPO sigmoid",
    11: "SimPO hinge",
    12: "BNF",
    13: "loss masks",
    14: "SFT: single responses, whole conversations, packing",
    15: "rejection sampling (REST, RFT)",
    16: "XPO loss: DPO's with alpha 0; above 0 the reference's responses become less probable",
    17: "XPO, two engines: the reference has an engine of its own, and no sample changes",
    18: "XPO, one engine with both slots: sampling from the reference does not change the policy",
    19: "APL: the prompts of the largest entropy are kept",
    20: "APL: the pair with the largest difference of implicit rewards, never a response with itself",
    21: "APL, certainty alone: k of P prompts are kept",
    22: "GAE: it matches brute force over a grid of gamma and lambda",
    23: "returns of GAE with lambda 1: the discounted sums of the rewards to come",
    24: "PPO: values of permuted rows are permuted values",
    25: "PPO: no gradient beyond the clip for a positive advantage",
    26: "PPO: KL in the loss (k3), 0 for equal models",
    27: "PPO: KL in the rewards (k1)",
    28: "GRPO advantages",
    29: "training of a critic: its loss falls on a fixed rollout",
    30: "clip of the critic's values: values are clipped only after a large update",
    31: "penalty for a response that did not stop",
    32: "scale of rewards, and their whitening with the mean kept",
    33: "statistics of the importance ratio: 1 in the first mini-batch",
    34: "PPO: the mean reward rises",
    35: "PPO from recorded responses and rewards",
    36: "TRL's PPO: a response ends at its stop token, whose id may be 0",
    37: "TRL's PPO: masks of tokens and of final states",
    38: "TRL's PPO: estimators k1 and k3 of the KL",
    39: "TRL's PPO: penalty for a missing end-of-text token",
    40: "TRL's PPO: whitening of rewards",
    41: "TRL's PPO: each of its metrics has a counterpart in every row",
    42: "TRL's PPO: mini-batches that do not divide are refused",
    43: "TRL's PPO: table of samples",
    44: "TRL's PPO: the reference is the policy without its adapter",
    45: "sequence-classification score",
    46: "estimators of LightRFT by its names: each gives finite advantages",
    47: "RLOO",
    48: "range of rewards: an extreme reward is clipped before the KL",
    49: "normalisation of advantages over several processes: mean 0, variance 1",
    50: "weights that make up for groups without spread (clip filter)",
    51: "packing: packed and padded rows have the same advantages",
    52: "filter of high-entropy tokens: it keeps exactly the top fraction",
    53: "reward functions with the signatures of TRL and LightRFT",
    54: "several reward functions with weights: the reward is their weighted sum",
    55: "lambda returns: lambda 0 and 1, and a lambda for each step",
    56: "ensemble: its members are independent",
    57: "ensemble: no initial weight is beyond two standard deviations",
    58: "ensemble: the prior is 0 at the start, and fades with labelled pairs",
    59: "ensemble: it learns pairs with linearly separable features",
    60: "ensemble: ring buffer of pairs; a batch has all pairs while there are few",
    61: "features of a PairRM: twice the hidden size, one marker for each text",
    62: "features of an encoder, such as DeBERTa",
    63: "features of a causal model: the state at the last token, or a mean",
    64: "measures of disagreement: symmetric, 0 on the diagonal, 0 for equal members except `bernoulli`, the"
    " variance of one answer",
    65: "rule EETS: the second response differs from the first if members disagree",
    66: "rule BAI-TS: the second response is the one of the largest variance against the first",
    67: "rule of pure exploration: the pair of the largest variance",
    68: "rule passive: the first two responses",
    69: "a clash is mended by a random second response, uniform over the others",
    70: "EETS with the second best: used if all members agree",
    71: "labels of the ensemble: none in the burn-in, afterwards the share, rounded down",
    72: "labels of the ensemble follow its rewards, and cost no query",
    73: "labels of the ensemble alone (pure): no other pair is asked about or learned",
    74: "best of n, in evaluations and in generation: the response with the highest mean reward",
    75: "weights of the ensemble: the actor's copy equals the learner's after a transfer",
    76: "frozen policy: the ensemble learns, and the policy's weights do not change",
    77: "ensemble that has learned before is loaded; may stay so; may stop at `max_pairs`; constant prior",
    78: "PairRM oracle",
    79: "remote server: preferences",
    80: "remote server: rewards; the result is a list even for one response",
    81: "remote server: one process per device, or one process over several devices",
    82: "remote client: keeps the order, survives two failures, reports a refusal",
    83: "LLM judge",
    84: "LLM judge: replies without a verdict",
    85: "GSM8K oracle",
    86: "countdown oracle",
    87: "MATH oracle: boxed answers with nested braces",
    88: "few-shot templates: a rendered prompt ends with the answer cue",
    89: "Bernoulli feedback",
    90: "allocation of GPUs: actors and learner, apart or together",
    91: "synchronous collector: every response is counted; a reward gets the columns of its prompt",
    93: "sizes of batches, mini-batches and micro-batches: bad sizes are refused",
    94: "weight sync: equal logits after a push",
    95: "LoRA sync",
    96: "sync_every: the sampler's version advances as configured",
    97: "evaluation changes no weights and no training",
    98: "evaluation: the file with its records",
    99: "evaluation: metrics of the win rate",
    100: "online evaluation: samples of training are compared with the reference responses of the data",
    102: "query budget",
    101: "evaluation after a number of queries",
    103: "transfer between processes: a record arrives as it was sent, and nothing of it is kept afterwards",
    104: "if prompts are dropped, each reference response stays with its prompt",
    105: "chat template: a response is what the template adds to its prompt",
    106: "datasets from disk and hub",
    107: "shards of the prompts are disjoint",
    108: "reproducibility",
    109: "learning-rate schedule",
    110: "gradient accumulation equals one big batch",
    112: "4-bit weights, LoRA, gradient checkpointing: one step runs, and heads are trained",
    113: "checkpoints: a run keeps the newest ones, as many as are set; the last one has equal logits",
    114: "a continued run has the same loss curve",
    115: "export and offline reload: the same records, the same losses",
    116: "offline DPO and SFT: the loss falls, no actor is started",
    117: "offline run with online evaluation: the evaluation's file is written",
    118: "logging: the groups of metrics of the older package `oat-llm`, with their names in this project",
    119: "slicer of reasoning steps: the slices concatenate to the text; two markers of the answer survive",
    124: "handling of failures: a process that fails ends the run with one message, or is replaced",
    125: "end to end on a CPU",
}


def marked() -> dict[int, list[str]]:
    """Return the tests that carry the marker of a row, by row. A file's `pytestmark` counts for all its
    tests."""
    found: dict[int, list[str]] = {}
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        place = file.relative_to(ROOT).as_posix()
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text if "pytest.mark.inventory" in text else "")
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
            ):
                marks, name = node.value.elts if isinstance(node.value, ast.List) else [node.value], place
            elif isinstance(node, ast.FunctionDef):
                marks, name = node.decorator_list, f"{place}::{node.name}"
            else:
                continue
            for mark in marks:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.inventory":
                    for row in mark.args:
                        found.setdefault(ast.literal_eval(row), []).append(name)
    return found


def page() -> str:
    rows = marked()
    assert rows.keys() <= FEATURES.keys(), (
        f"name the features of rows {sorted(rows.keys() - FEATURES.keys())} here"
    )
    lines = [
        "# What the tests prove",
        "",
        "This page lists the features that this project must have, each with the tests that prove it. The",
        "column `row` has the feature's number in the project's list of features; the numbers have gaps.",
        "`python tests/coverage_page.py` makes this page from the markers `@pytest.mark.inventory(row)` of",
        "the tests. A test fails if the page differs from the markers.",
        "",
        "| row | feature | tests |",
        "| --- | --- | --- |",
    ]
    return (
        "\n".join(
            lines
            + [
                f"| {row} | {FEATURES[row]} | {'<br>'.join(f'`{name}`' for name in names)} |"
                for row, names in sorted(rows.items())
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
