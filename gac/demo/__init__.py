"""`gac demo`: a tiny task on which mixing SFT and RL matters."""

METHODS = ("sft", "grpo", "constant", "gac", "gac-gated")
"""Methods that `gac demo` compares by default."""
