"""Runs model-written programs that can compute and nothing else; `docs/sandbox.md` has the design.

`pool.Pool` is the trainer's side. The other modules also run in the fork server, which loads this
folder as a package of its own, without `gac` and so without torch: they import the standard
library and each other only.
"""
