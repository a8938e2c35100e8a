"""Our algorithms by name."""

from typing import Any

from oat.algorithms.contrast import AOT, CPO, EXO, NCA, ORPO, APODown, APOZero, DiscoPOP, SPPOHard
from oat.algorithms.direct import BNF, DPO, IPO, RobustDPO, SimPO, SLiC
from oat.algorithms.group import GRPO, DrGRPO
from oat.algorithms.kto import KTO
from oat.algorithms.reward_model import RewardModelling
from oat.algorithms.supervised import SFT

_OF_PAIRS = (
    DPO,
    RobustDPO,
    IPO,
    SLiC,
    SimPO,
    BNF,
    EXO,
    NCA,
    APOZero,
    APODown,
    SPPOHard,
    DiscoPOP,
    AOT,
    ORPO,
    CPO,
)
_OF_SCORES = (KTO, SFT, GRPO, DrGRPO)

ALGORITHMS: dict[str, Any] = {cls.name: cls for cls in (*_OF_PAIRS, *_OF_SCORES, RewardModelling)}
