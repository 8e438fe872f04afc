"""The pages of the site that the program writes itself: `python -m tools.reference_pages`.

docs/reference/cli.md has every command's help, docs/reference/configuration.md every key.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gac.cli import make_parser
from gac.config import describe
from gac.evaluation.suite import EvalConfig
from gac.methods import METHODS
from gac.train_config import TrainConfig

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def main() -> int:
    """Write both pages."""
    os.environ["COLUMNS"] = "100"  # what argparse wraps its help at
    (FOLDER / "cli.md").write_text(cli_page())
    (FOLDER / "configuration.md").write_text(configuration_page())
    return 0


def cli_page() -> str:
    """The help of `gac` and of each of its commands."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = ["# Command line\n", _block(parser.format_help())]
    for name, command in commands.choices.items():
        text = argparse.ArgumentParser.format_help(command)  # without the keys: they have a page
        parts.append(f"## gac {name}\n\n{_block(text)}")
    return "\n".join(parts)


def configuration_page() -> str:
    """Every key of `gac train` and `gac eval`, and the hyperparameters of each method."""
    parts = [
        "# Configuration\n",
        "Keys are given in a YAML file, or on the command line as `--set key=value`. A dot leads "
        "into a mapping: `optim.lr`. Each line has the key, its type and its default.\n",
        f"## gac train\n\n{_block(describe(TrainConfig))}",
        f"## gac eval\n\n{_block(describe(EvalConfig))}",
        "## Methods\n\n`method: {name: NAME, key: value}`, or `--set method=NAME method.key=1`.\n",
    ]
    for name, method in METHODS.items():
        keys = describe(method, "method")
        parts.append(f"### {name}\n\n{_block(keys) if keys else 'No hyperparameters.'}\n")
    return "\n".join(parts)


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
