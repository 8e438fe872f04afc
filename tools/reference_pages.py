"""Generates the reference pages of the documentation site: `python -m tools.reference_pages`.

docs/reference/cli.md lists the help of every command, docs/reference/configuration.md every key,
docs/reference/index.md every column of metrics.jsonl and eval.jsonl.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from gac.cli import make_parser
from gac.config import Key, keys
from gac.evaluation.config import EvalConfig
from gac.evaluation.table import markdown_table
from gac.methods import METHODS, Method
from gac.methods.listing import summary
from gac.train_config import TrainConfig
from gac.training.columns import EVALUATION, METRICS
from tools.pages import fill

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def main() -> int:
    """Write the pages."""
    os.environ["COLUMNS"] = "80"  # argparse wraps its help at this width, which fits the page
    (FOLDER / "cli.md").write_text(cli_page())
    (FOLDER / "configuration.md").write_text(configuration_page())
    fill(FOLDER / "index.md", "metrics", metrics_tables())
    return 0


def metrics_tables() -> str:
    """Every column of metrics.jsonl and eval.jsonl."""
    parts = []
    for file, columns in (("metrics.jsonl", METRICS), ("eval.jsonl", EVALUATION)):
        rows = [
            (f"`{names.replace(', ', '`, `')}`", c.unit, c.meaning, f"`gac.{c.source}`")
            for names, c in columns.items()
        ]
        table = markdown_table((f"column of {file}", "unit", "meaning", "computed in"), rows)
        parts.append(table)
    return "\n\n".join(parts)


def cli_page() -> str:
    """The help of `gac` and of each of its commands."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = [
        "# Command line\n",
        "The output of `gac COMMAND --help`. Configuration keys have "
        "[their own page](configuration.md).\n",
        _block(parser.format_help()),
    ]
    for name, command in commands.choices.items():
        text = argparse.ArgumentParser.format_help(command)  # the base class omits the keys
        parts.append(f"## gac {name}\n\n{_block(text)}")
    return "\n".join(parts)


def configuration_page() -> str:
    """Every key of `gac train` and `gac eval`, and the hyperparameters of each method."""
    parts = [
        "# Configuration\n",
        "Set a key in a YAML file, or on the command line with `--set key=value`. A dot means "
        "nesting: `optim.lr` is `lr` under `optim:`. Each key is followed by its type and default; "
        "`null` means no value.\n",
        f"## gac train\n\n{_sections(keys(TrainConfig), 'train')}",
        f"## gac eval\n\n{_sections(keys(EvalConfig), 'eval')}",
        "## Methods\n\nSet with `method: {name: NAME, key: value}`, or with "
        "`--set method=NAME method.key=1`.\n",
    ]
    parts += [_method(method) for method in METHODS.values()]
    return "\n".join(parts)


def _method(method: type[Method]) -> str:
    """The section of one method; for a variant of another method, only the changed defaults."""
    own_keys, base = keys(method, "method"), _base(method)
    title = f"### {method.name}\n\n{_prose(summary(method))}\n"
    if base is None:
        return f"{title}\n{_list(own_keys, method.name) or 'No keys of its own.'}\n"
    base_keys = {key.name: key for key in keys(base, "method")}
    changed = [key for key in own_keys if base_keys.get(key.name) != key]
    same = f"Its keys are those of [{base.name}](#{base.name})"
    text = f"{same}, except for:\n\n{_list(changed, method.name)}" if changed else f"{same}."
    return f"{title}\n{text}\n"


def _base(method: type[Method]) -> type[Method] | None:
    """The method that this one is a variant of, if it is listed as well."""
    return next((b for b in method.__mro__[1:] if METHODS.get(getattr(b, "name", "")) is b), None)


def _sections(keys: Iterable[Key], prefix: str) -> str:
    """Render plain keys as a list, then a section for each mapping."""
    parts: list[tuple[str, list[Key]]] = [("", [])]
    for key in keys:
        if key.section:
            parts.append((f"### {key.name}\n\n{_prose(key.doc)}\n\n", []))
        else:
            parts[-1][1].append(key)
    return "\n".join(f"{title}{_list(members, prefix)}" for title, members in parts)


def _list(keys: Iterable[Key], prefix: str) -> str:
    """Render keys as a definition list; each has an anchor."""
    entries = []
    for key in keys:
        anchor = re.sub(r"\W+", "-", f"{prefix}-{key.name}")
        text = "\n  ".join([_prose(key.doc) or "&nbsp;", *(f"\n  - {c}" for c in key.choices)])
        entries.append(f"`{key.name}`{{#{anchor}}} `{key.kind}`{{.kind}}\n: {text}\n")
    return "\n".join(entries)


def _prose(text: str) -> str:
    """Convert docstring text to Markdown, escaping everything outside backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<\[\]\\])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
