"""Every method, in the order in which `gac methods` prints them."""

from .base import Method, Mix, Observation, State
from .chord import CHORD, CHORDBoth, CHORDPhi
from .constant import Constant
from .gac import GAC
from .grpo import GRPO
from .sft import SFT

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (SFT, GRPO, Constant, CHORD, CHORDPhi, CHORDBoth, GAC)
}

__all__ = ["METHODS", "Method", "Mix", "Observation", "State"]
