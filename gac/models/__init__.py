"""Causal language models: loading, weights, the LM head, attention for packed rows.

This package may import `config` and `parallel`.
"""
