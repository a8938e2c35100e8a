"""Helpers for tests of updates: objectives with their options, and made-up feedback."""

import math

import numpy as np

from oat.algorithms.base import Outputs, View
from oat.algorithms.contrast import AOT, ORPO, AOTConfig, ORPOConfig
from oat.algorithms.corrections import CorrectionConfig
from oat.algorithms.direct import BNF, DPO, IPO, BNFConfig, DPOConfig, IPOConfig, SimPO, SimPOConfig
from oat.algorithms.group import CISPO, CPGD, GRPO, GSPO, RLOO, SAPO, VESPO, DrGRPO, ReinforcePP
from oat.algorithms.group_config import (
    CISPOConfig,
    CPGDConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SAPOConfig,
    VESPOConfig,
)
from oat.algorithms.kto import KTO, KTOConfig
from oat.algorithms.supervised import SFT, SFTConfig
from oat.algorithms.token_choice import EntropyConfig, TokensConfig
from oat.types import (
    Answer,
    Feedback,
    Group,
    Item,
    KeptSets,
    Key,
    Loss,
    Message,
    Prompt,
    Question,
    Segment,
    Trajectory,
)

VOCABULARY = 24


def row(
    generator: np.random.Generator, prompt: int, size: int, *, kept: bool = False, temperature: float = 1.0
) -> Trajectory:
    ids = generator.integers(0, VOCABULARY, size).astype(np.int32)
    sets = None
    if kept:
        chosen = [np.unique(np.append(generator.integers(0, VOCABULARY, 5), i)).astype(np.int32) for i in ids]
        sets = KeptSets(np.concatenate(chosen), np.concatenate([[0], np.cumsum([len(c) for c in chosen])]))
    logps = generator.normal(-2, 0.3, size).astype(np.float32)
    context = Segment("context", generator.integers(0, VOCABULARY, prompt).astype(np.int32))
    response = Segment("model", ids, np.ones(size, bool), np.zeros(size, np.int32), logps, logps, sets)
    return Trajectory("sampler", (context, response), "stop", " ".join(map(str, ids)), temperature)


def scored_feedback(groups: int = 4, samples: int = 4, seed: int = 0) -> Feedback:
    generator, items = np.random.default_rng(seed), []
    for number in range(groups):
        prompt = Prompt(number + 1, number, (Message("user", "p"),))
        rows = tuple(row(generator, 3 + number, int(generator.integers(1, 9))) for _ in range(samples))
        group = Group(prompt, rows)
        key = Key("train", 1, 0, number)
        scores = tuple(float(s) for s in generator.normal(size=samples))
        items.append(
            Item(
                group,
                Question.about(group, key, "score", tuple(range(samples))),
                Answer(key, scores, ("ok",) * samples, samples),
                None,
            )
        )
    return Feedback(1, tuple(items), groups * samples)


def compared_feedback(pairs: int = 6, seed: int = 0) -> Feedback:
    generator, items = np.random.default_rng(seed), []
    for number in range(pairs):
        prompt = Prompt(number + 1, number, (Message("user", "p"),))
        group = Group(
            prompt, tuple(row(generator, 2 + number, int(generator.integers(1, 9))) for _ in range(2))
        )
        key = Key("train", 1, 0, number)
        label = None if number == 2 else number % 2
        answer = Answer(
            key, (0.5 if label is None else 0.9 - 0.8 * label,), ("tie" if label is None else "ok",), 2
        )
        items.append(Item(group, Question.about(group, key, "compare", (0, 1)), answer, label))
    return Feedback(1, tuple(items), 2 * pairs)


GROUPS = {"prompts": 4, "samples": 4}
OBJECTIVES = {
    "dpo": lambda: DPO(DPOConfig(prompts=6)),
    "dpo-options": lambda: DPO(DPOConfig(prompts=6, length_alpha=0.1, positive_lambda=0.5, sft_weight=0.3)),
    "ipo": lambda: IPO(IPOConfig(prompts=6)),
    "simpo": lambda: SimPO(SimPOConfig(prompts=6)),
    "bnf": lambda: BNF(BNFConfig(prompts=6)),
    "dpo-ties": lambda: DPO(DPOConfig(prompts=6, sft_weight=0.3, ties="half")),
    "aot": lambda: AOT(AOTConfig(prompts=6)),
    "aot-unpaired": lambda: AOT(AOTConfig(prompts=6, form="unpaired")),
    "orpo": lambda: ORPO(ORPOConfig(prompts=6)),
    "gspo": lambda: GSPO(GSPOConfig(**GROUPS)),
    "cispo": lambda: CISPO(CISPOConfig(**GROUPS, clip_high=0.5)),
    "cpgd": lambda: CPGD(CPGDConfig(**GROUPS)),
    "sapo": lambda: SAPO(SAPOConfig(**GROUPS)),
    "vespo": lambda: VESPO(VESPOConfig(**GROUPS)),
    "rloo-corrected": lambda: RLOO(
        RLOOConfig(
            **GROUPS,
            correction=CorrectionConfig(form="mask", low=0.1, high=9.0, off_policy_bound=1.5),
            tokens=TokensConfig(high_entropy_share=0.7, covariance_kl=0.2),
            entropy=EntropyConfig(coef=0.1),
        )
    ),
    "reinforce_pp-kl": lambda: ReinforcePP(
        ReinforcePPConfig(
            **GROUPS, gamma=0.9, kl_reward_coef=0.1, kl_coef=0.1, kl_unbiased=True, old_from="sampler"
        )
    ),
    "kto": lambda: KTO(KTOConfig(prompts=4, samples=4, threshold=0.0)),
    "sft-prompt": lambda: SFT(SFTConfig(prompts=4, samples=4, threshold=0.0, reduction="prompt")),
    "dr-grpo": lambda: DrGRPO(DrGRPOConfig(prompts=4, samples=4, kl_coef=0.1, max_length=8)),
    "grpo": lambda: GRPO(GRPOConfig(prompts=4, samples=4, kl_coef=0.1)),
    "grpo-token": lambda: GRPO(GRPOConfig(prompts=4, samples=4, reduction="token")),
}


class Poisoned(DPO):
    """DPO with a NaN in its loss or only in its gradient."""

    def __init__(self, config: DPOConfig, where: str):
        super().__init__(config)
        self.where = where

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        loss = super().losses(outputs, view)["loss/preference"]
        extra = loss.terms.sum() * math.nan if self.where == "loss" else (loss.terms.sum() * 0).sqrt()
        return {"loss/preference": Loss(loss.terms + extra, "pair")}
