"""`gac demo`: a tiny task on which mixing SFT and RL matters.

It may import `study` and earlier packages.
"""

METHODS = ("sft", "grpo", "constant", "gac", "gac-gated")
"""Methods that `gac demo` compares by default."""
