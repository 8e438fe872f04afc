"""`gac demo`: a tiny task on which mixing SFT and RL matters.

This package may import `study` and earlier packages.
"""

DEMO_METHODS = ("sft", "grpo", "constant", "constant-alarm", "gac", "gac-gated")
"""Methods that `gac demo` compares by default."""
