"""Every method, one file each, and the interface between methods and the trainer.

This package may import `rollouts` and earlier packages.
"""

import functools
import logging
from importlib.metadata import entry_points

from .aligned_mtl import AlignedMTL
from .amft import AMFT
from .asft import ASFT
from .base import Method, Mix, Observation, State
from .cagrad import CAGrad
from .chord import CHORD, HPCD, WCF, CHORDBoth, CHORDPhi
from .constant import Constant
from .constant_alarm import ConstantAlarm, Guarded
from .dpo import DPO, IPO
from .dwa import DWA
from .dypo import DYPO
from .famo import FAMO
from .gac import GAC, GACGated, GACGatedSketch, GACPaper
from .gradnorm import GradNorm
from .gradnorm_ctrl import GradNormControl
from .grpo import DAPO, GRPO, GSPO, DrGRPO
from .gta import GTA
from .hpt import HPT
from .kl_ctrl import KLControl
from .luffy import LUFFY
from .mgda import MGDA
from .moco import MoCo
from .multitask import MultiTask
from .nash_mtl import NashMTL
from .pcgrad import PCGrad
from .prefix_rft import PrefixRFT
from .relift import ReLIFT
from .reward_threshold import RewardThreshold
from .rewvar_ctrl import RewardVarianceControl
from .routing import Routing
from .sdar import SDAR
from .sdmgrad import SDMGrad
from .sft import DFT, SFT
from .sft_budget import SFTBest, SFTLight
from .sft_then_rl import SFTThenRL
from .srft import SRFT
from .superrl import SuperRL
from .trapo import TRAPO
from .uft import UFT
from .uncertainty import Uncertainty

_FAMILIES: tuple[tuple[type[Method], ...], ...] = (
    (SFT, SFTLight, SFTBest, DFT, ASFT, GRPO, DrGRPO, DAPO, GSPO, SFTThenRL),
    (DPO, IPO),
    (Constant, HPCD, WCF, CHORD, CHORDPhi, CHORDBoth),
    (RewardThreshold, KLControl, RewardVarianceControl, GradNormControl, AMFT),
    (MultiTask, LUFFY, SRFT, HPT, SuperRL, Routing, DYPO, ReLIFT, SDAR, TRAPO, UFT, PrefixRFT, GTA),
    (MGDA, PCGrad, CAGrad, NashMTL, AlignedMTL, SDMGrad, MoCo, GradNorm),
    (Uncertainty, DWA, FAMO),
    (GAC, GACPaper),
    (ConstantAlarm, Guarded, GACGated, GACGatedSketch),
)
METHODS: dict[str, type[Method]] = {m.name: m for family in _FAMILIES for m in family}
"""Name in the configuration -> method."""
DEFAULT = ConstantAlarm.name
"""The method of `gac train`, of the adapters and of new projects, unless another is named."""

__all__ = ["DEFAULT", "METHODS", "Method", "Mix", "Observation", "State", "all_methods"]
logger = logging.getLogger(__name__)


@functools.cache
def all_methods() -> dict[str, type[Method]]:
    """`METHODS` and those of installed packages: their entry points of the group `gac.methods`."""
    installed = {}
    for entry in entry_points(group="gac.methods"):
        try:
            installed[entry.name] = entry.load()
        except Exception as error:  # a broken package must not stop runs that do not use it
            logger.warning("gac.methods: cannot load %s = %s: %s", entry.name, entry.value, error)
    return {**METHODS, **{name: m for name, m in installed.items() if name not in METHODS}}
