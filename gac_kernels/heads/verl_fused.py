"""Importing this module installs the fused head in verl's process: see `verl`.

verl imports it in every worker with `VERL_USE_EXTERNAL_MODULES=gac_kernels.heads.verl_fused`.
"""

from .verl import apply_fused_head

PATCH = apply_fused_head()
