"""Causal language models: loading, weights, the LM head, attention for packed rows."""
