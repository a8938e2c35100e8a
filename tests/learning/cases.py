"""The algorithms of the learning tests, with their settings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """An algorithm of the learning tests: its name, the class of `flipped.py` that must not learn, its
    settings, further settings for online and for offline runs, the file of its recorded data, further flags,
    and the columns of recorded responses, if the algorithm has no default for them."""

    name: str
    flipped: str
    options: str = ""
    online: str = ""
    offline: str = ""
    records: str = "pairs.jsonl"
    flags: tuple[str, ...] = ()
    responses: str = ""


CASES = {
    "dpo": Case("dpo", "FlippedDPO"),
    "dpo with every option": Case(
        "dpo", "FlippedDPO", "label_smoothing: 0.1, length_alpha: 0.05, positive_lambda: 0.5, sft_weight: 0.1"
    ),
    "robust_dpo": Case("robust_dpo", "FlippedRobustDPO", "label_smoothing: 0.1"),
    "ipo": Case("ipo", "FlippedIPO"),
    "slic": Case("slic", "FlippedSLiC"),
    "simpo": Case("simpo", "FlippedSimPO"),
    "simpo by a hinge": Case("simpo", "FlippedSimPO", "loss: hinge", offline="beta: 0.5"),
    "bnf": Case("bnf", "FlippedBNF"),
    "exo": Case("exo", "FlippedEXO"),
    "nca": Case("nca", "FlippedNCA"),
    "apo_zero": Case("apo_zero", "FlippedAPOZero"),
    "apo_down": Case("apo_down", "FlippedAPODown"),
    "sppo_hard": Case("sppo_hard", "FlippedSPPOHard"),
    "discopop": Case("discopop", "FlippedDiscoPOP", "tau: 0.5"),
    "aot": Case("aot", "FlippedAOT"),
    "aot unpaired": Case("aot", "FlippedAOT", "form: unpaired"),
    "orpo": Case("orpo", "FlippedORPO", offline="epochs: 4"),
    "cpo": Case("cpo", "FlippedCPO"),
    "kto": Case("kto", "FlippedKTO", online="samples: 2", records="labels.jsonl"),
    "sft": Case("sft", "FlippedSFT", "threshold: 0.5", "samples: 8", "epochs: 4", "labels.jsonl"),
    "rest": Case(
        "sft",
        "FlippedSFT",
        "threshold: 0.5, epochs: 2",
        "samples: 8",
        records="",
        flags=("--learner.sync_every", "2"),
    ),
    "rft": Case(
        "sft",
        "FlippedSFT",
        "threshold: 0.75, duplicates: run, epochs: 4",
        "samples: 16",
        records="",
        flags=("--learner.sync_every", "99"),
    ),
    "grpo": Case("grpo", "FlippedGRPO", online="samples: 8", responses="[chosen, rejected]"),
    "dr_grpo": Case("dr_grpo", "FlippedDrGRPO", "samples: 8, max_length: 4", records=""),
    "rloo": Case("rloo", "FlippedRLOO", "samples: 8", records=""),
    "reinforce_pp": Case("reinforce_pp", "FlippedReinforcePP", online="samples: 8", records="labels.jsonl"),
    "reinforce_pp with a baseline": Case(
        "reinforce_pp", "FlippedReinforcePP", "samples: 8, advantage: group_mean", records=""
    ),
    "gspo": Case("gspo", "FlippedGSPO", "samples: 8", records=""),
    "gspo by tokens": Case("gspo", "FlippedGSPO", "samples: 8, policy_loss: gspo_token", records=""),
    "cispo": Case("cispo", "FlippedCISPO", "samples: 8", records=""),
    "cpgd": Case("cpgd", "FlippedCPGD", "samples: 8", records=""),
    "sapo": Case("sapo", "FlippedSAPO", "samples: 8", records=""),
    "luspo": Case("luspo", "FlippedLUSPO", "samples: 8", records=""),
    "vespo": Case("vespo", "FlippedVESPO", "samples: 8", records=""),
    "grpo with everything that shapes": Case(
        "grpo",
        "FlippedGRPO",
        "samples: 8, minibatches: 2, old_from: sampler, advantage_clip: 2.0, entropy: {coef: 0.001}, "
        "tokens: {high_entropy_share: 0.8}, rewards: {scale: 2.0, normalise: running, clip: [-5.0, 5.0]}",
        records="",
    ),
    "grpo with a lagging sampler, corrected": Case(
        "grpo",
        "FlippedGRPO",
        "samples: 8, correction: {form: truncate}",
        records="",
        flags=("--learner.sync_every", "2"),
    ),
    "ppo": Case(
        "ppo",
        "FlippedPPO",
        online="samples: 8",
        offline="epochs: 6, kl_reward_coef: 0.0",
        responses="[chosen, rejected]",
    ),
    "ppo with final states": Case(
        "ppo",
        "FlippedPPO",
        "samples: 8, end: final_state, response_length: 4, advantage: vtrace",
        records="",
    ),
    "grpo without ratios": Case("grpo", "FlippedGRPO", "samples: 8, policy_loss: reinforce", records=""),
    "grpo with vine": Case(
        "grpo",
        "FlippedGRPO",
        "samples: 8, advantage: vine, vine: {branches: 2, delimiter: '1', most_steps: 3}",
        records="",
    ),
    **{
        f"grpo with {name}": Case("grpo", "FlippedGRPO", f"samples: 8, advantage: {name}", records="")
        for name in ("batch_norm", "leave_one_out_max", "length_weighted", "best_of_group")
    },
}
OFFLINE = {name: case for name, case in CASES.items() if case.records}
