"""Studies, ablations and validation of signals; not installed, and imported by nothing else."""
