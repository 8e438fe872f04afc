"""Importing this module installs the fused head in verl's process: see `verl_head`.

verl imports it in every worker with `VERL_USE_EXTERNAL_MODULES=gac.integrations.verl_fused`.
"""

from .verl_head import apply_fused_head

PATCH = apply_fused_head()
