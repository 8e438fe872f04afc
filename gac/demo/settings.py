"""Durations and schedules of the methods, scaled to short demo runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from gac.methods import all_methods


def demo_fields(name: str, steps: int) -> dict[str, Any]:
    """Overrides for method `name`: schedule lengths scaled to `steps` optimizer steps.

    The published durations assume about 800 steps.
    """
    prior = {"high": 0.85, "low": 0.15, "hold": steps // 20, "decay": steps}
    decaying = {"peak": 0.9, "valley": 0.05, "decay": int(0.6 * steps)}
    wcf = {"peak": 0.5, "valley": 0.02, "warmup": steps // 4, "decay": steps // 2}
    fields: dict[str, dict[str, Any]] = {
        "sft-light": {"examples": 128, "epochs": 5},  # the task has 256 demonstrations in all
        "sft-best": {"epochs": 20},
        "sft-then-rl": {"sft_steps": steps // 2},
        **{key: {"schedule": decaying} for key in ["hpcd", "chord-mu", "chord"]},
        "wcf": {"schedule": wcf},
        **{key: {"calibration": max(steps // 8, 1)} for key in ["kl-ctrl", "rewvar-ctrl"]},
        "amft": {"warmup": steps // 16},
        "uft": {"hint_steps": max(int(0.6 * steps), 1)},
        "prefix-rft": {"low": {"peak": 0.95, "valley": 0.05, "decay": steps}},
        "dwa": {"window": max(steps // 16, 1)},
    }
    scheduled = any(field.name == "prior" for field in dataclasses.fields(all_methods()[name]))
    own_prior = not scheduled or name.startswith("gac-gated")
    return fields.get(name, {}) | ({} if own_prior else {"prior": prior})
