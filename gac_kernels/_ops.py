"""Namespace of the custom operators; the kernels hub replaces this file to make names unique."""

import torch

ops = torch.ops.gac_kernels


def add_op_namespace_prefix(op_name: str) -> str:
    """The qualified name of an operator."""
    return f"gac_kernels::{op_name}"
