"""Runs model-written programs in a sandbox in which they can only compute.

`docs/sandbox.md` describes the design. `pool.Pool` is the trainer's side. The other modules also
run in the fork server, which loads this folder as a standalone package to avoid importing `gac`
and torch, so they may import only the standard library and each other.
"""
