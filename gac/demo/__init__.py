"""`gac demo`: tasks on which mixing SFT and RL matters, for a tiny and for a pretrained model."""

DEMO_METHODS = ("sft", "grpo", "constant", "constant-alarm", "gac", "gac-gated")
"""Methods that `gac demo` compares by default."""

REAL_METHODS = ("constant-alarm", "grpo")
"""Methods that `gac demo --real` compares by default: both signals, and rewards only."""
