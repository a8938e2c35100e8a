"""The algorithms with the sign of their loss flipped. Learning tests must fail with them."""

from dataclasses import replace

from oat.algorithms.base import Objective, Outputs, View
from oat.algorithms.contrast import AOT, CPO, EXO, NCA, ORPO, APODown, APOZero, DiscoPOP, SPPOHard
from oat.algorithms.direct import BNF, DPO, IPO, RobustDPO, SimPO, SLiC
from oat.algorithms.group import CISPO, CPGD, GRPO, GSPO, LUSPO, RLOO, SAPO, VESPO, DrGRPO, ReinforcePP
from oat.algorithms.kto import KTO
from oat.algorithms.ppo import PPO
from oat.algorithms.reward_model import RewardModelling
from oat.algorithms.supervised import SFT
from oat.types import Loss


class Flipped(Objective):
    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        return {name: replace(loss, coef=-loss.coef) for name, loss in super().losses(outputs, view).items()}


class FlippedDPO(Flipped, DPO): ...


class FlippedRobustDPO(Flipped, RobustDPO): ...


class FlippedIPO(Flipped, IPO): ...


class FlippedSLiC(Flipped, SLiC): ...


class FlippedSimPO(Flipped, SimPO): ...


class FlippedBNF(Flipped, BNF): ...


class FlippedEXO(Flipped, EXO): ...


class FlippedNCA(Flipped, NCA): ...


class FlippedAPOZero(Flipped, APOZero): ...


class FlippedAPODown(Flipped, APODown): ...


class FlippedSPPOHard(Flipped, SPPOHard): ...


class FlippedDiscoPOP(Flipped, DiscoPOP): ...


class FlippedAOT(Flipped, AOT): ...


class FlippedORPO(Flipped, ORPO): ...


class FlippedCPO(Flipped, CPO): ...


class FlippedKTO(Flipped, KTO): ...


class FlippedSFT(Flipped, SFT): ...


class FlippedGRPO(Flipped, GRPO): ...


class FlippedDrGRPO(Flipped, DrGRPO): ...


class FlippedRLOO(Flipped, RLOO): ...


class FlippedReinforcePP(Flipped, ReinforcePP): ...


class FlippedGSPO(Flipped, GSPO): ...


class FlippedCISPO(Flipped, CISPO): ...


class FlippedCPGD(Flipped, CPGD): ...


class FlippedSAPO(Flipped, SAPO): ...


class FlippedLUSPO(Flipped, LUSPO): ...


class FlippedVESPO(Flipped, VESPO): ...


class FlippedPPO(PPO):
    """The critic learns as it should, so that only the policy's sign is wrong."""

    def losses(self, outputs: Outputs, view: View) -> dict[str, Loss]:
        losses = super().losses(outputs, view)
        return {**losses, "loss/policy": replace(losses["loss/policy"], coef=-1.0)}


class FlippedRewardModelling(Flipped, RewardModelling): ...
