"""The fused loss in Axolotl: `plugins: [gac_kernels.heads.axolotl.GACPlugin]`."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from .transformers import fuse


class GACPlugin(BasePlugin):
    """Axolotl calls it once the model and its adapters are loaded."""

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Let the model compute its loss without logits."""
        fuse(model)
