"""`gac demo`: command-line arguments."""

import argparse
from pathlib import Path

from gac.errors import require_counts

from . import METHODS


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `demo` to the commands of `gac`."""
    demo = commands.add_parser(
        "demo",
        help="train a tiny model with several methods and compare them",
        description="Train a tiny base model, post-train it with several methods and compare them. "
        "Finished runs are skipped; interrupted runs resume.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for all runs")
    demo.add_argument("--methods", nargs="+", default=list(METHODS), help="see `gac methods`")
    demo.add_argument("--seeds", type=int, default=1, help="seeds per method")
    demo.add_argument("--steps", type=int, default=160, help="optimizer steps per method")
    demo.add_argument(
        "--jobs", type=int, default=None, help="number of parallel runs (default: one per core)"
    )
    demo.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from .run import run_demo

    require_counts(options, "seeds", "steps", "jobs")
    return run_demo(options.out, options.methods, range(options.seeds), options.steps, options.jobs)
