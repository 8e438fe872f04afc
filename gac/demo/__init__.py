"""The demonstration: a tiny task on which mixing SFT and RL matters."""

METHODS = ("sft", "grpo", "constant", "gac", "gac-gated")
"""What `gac demo` compares unless it is told otherwise."""
