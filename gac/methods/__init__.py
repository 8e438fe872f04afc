"""Every method, a file per family, and the interface between methods and the trainer."""

import functools
import logging
from importlib.metadata import entry_points

from gac.types import Mix, Observation, State

from .base import Method
from .chord import CHORD, HPCD, WCF, CHORDBoth, CHORDPhi
from .constant import Constant, ConstantAlarm, Guarded
from .dpo import DPO, IPO
from .gac import GAC, GACGated, GACPaper
from .groups import DYPO, GTA, LUFFY, SDAR, SRFT
from .grpo import DAPO, GRPO, GSPO, DrGRPO
from .kdrl import KDRL
from .loss_weights import DWA, FAMO, GradNorm, Uncertainty
from .opd import OPD
from .prefixes import TRAPO, UFT, PrefixRFT
from .routing import HPT, MultiTask, ReLIFT, Routing, SuperRL
from .rules import AMFT, GradNormControl, KLControl, RewardThreshold, RewardVarianceControl
from .sdft import SDFT
from .sdpg import SDPG
from .sft import ASFT, DFT, SFT, SFTBest, SFTLight, SFTThenRL
from .solvers import MGDA, AlignedMTL, CAGrad, MoCo, NashMTL, PCGrad, SDMGrad

_FAMILIES: tuple[tuple[type[Method], ...], ...] = (
    (SFT, SFTLight, SFTBest, DFT, ASFT, GRPO, DrGRPO, DAPO, GSPO, SFTThenRL),
    (DPO, IPO),
    (Constant, HPCD, WCF, CHORD, CHORDPhi, CHORDBoth),
    (RewardThreshold, KLControl, RewardVarianceControl, GradNormControl, AMFT),
    (MultiTask, LUFFY, SRFT, HPT, SuperRL, Routing, DYPO, ReLIFT, SDAR, TRAPO, UFT, PrefixRFT, GTA),
    (OPD, KDRL, SDFT, SDPG),
    (MGDA, PCGrad, CAGrad, NashMTL, AlignedMTL, SDMGrad, MoCo, GradNorm),
    (Uncertainty, DWA, FAMO),
    (GAC, GACPaper),
    (ConstantAlarm, Guarded, GACGated),
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
