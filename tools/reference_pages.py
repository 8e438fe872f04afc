"""Generates the reference pages of the documentation site: `python -m tools.reference_pages`.

docs/reference/cli.md lists the help of every command, docs/reference/configuration.md every key.
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
from gac.evaluation.suite import EvalConfig
from gac.methods import METHODS, Method
from gac.methods.listing import summary
from gac.training.run_config import TrainConfig

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def main() -> int:
    """Write both pages."""
    os.environ["COLUMNS"] = "80"  # argparse wraps its help at this width, which fits the page
    (FOLDER / "cli.md").write_text(cli_page())
    (FOLDER / "configuration.md").write_text(configuration_page())
    return 0


def cli_page() -> str:
    """The help of `gac` and of each of its commands."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    parts = [
        "# Command line\n",
        "The output of `gac COMMAND --help`. Configuration keys have [their own page](configuration.md).\n",
        _block(parser.format_help()),
    ]
    for name, command in commands.choices.items():
        text = argparse.ArgumentParser.format_help(
            command
        )  # without the keys, which have their own page
        parts.append(f"## gac {name}\n\n{_block(text)}")
    return "\n".join(parts)


def configuration_page() -> str:
    """Every key of `gac train` and `gac eval`, and the hyperparameters of each method."""
    parts = [
        "# Configuration\n",
        "Set a key in a YAML file, or on the command line with `--set key=value`. A dot means nesting: `optim.lr` is `lr` under `optim:`. Each key is followed by its type and default; `null` means no value.\n",
        f"## gac train\n\n{_sections(keys(TrainConfig), 'train')}",
        f"## gac eval\n\n{_sections(keys(EvalConfig), 'eval')}",
        "## Methods\n\nGiven as `method: {name: NAME, key: value}`, or as `--set method=NAME "
        "method.key=1`.\n",
    ]
    parts += [_method(method) for method in METHODS.values()]
    return "\n".join(parts)


def _method(method: type[Method]) -> str:
    """Section for one method. For a variant of another method, only the changed defaults are shown."""
    mine, base = keys(method, "method"), _base(method)
    title = f"### {method.name}\n\n{_prose(summary(method))}\n"
    if base is None:
        return f"{title}\n{_list(mine, method.name) or 'No keys of its own.'}\n"
    theirs = {key.name: key for key in keys(base, "method")}
    changed = [key for key in mine if theirs.get(key.name) != key]
    same = f"Its keys are those of [{base.name}](#{base.name})"
    words = f"{same}, except for:\n\n{_list(changed, method.name)}" if changed else f"{same}."
    return f"{title}\n{words}\n"


def _base(method: type[Method]) -> type[Method] | None:
    """The method that this one is a variant of, if it is listed as well."""
    return next((b for b in method.__mro__[1:] if METHODS.get(getattr(b, "name", "")) is b), None)


def _sections(found: Iterable[Key], where: str) -> str:
    """Render plain keys as a list, then a section for each mapping."""
    parts: list[tuple[str, list[Key]]] = [("", [])]
    for key in found:
        if key.section:
            parts.append((f"### {key.name}\n\n{_prose(key.words)}\n\n", []))
        else:
            parts[-1][1].append(key)
    return "\n".join(f"{title}{_list(of, where)}" for title, of in parts)


def _list(found: Iterable[Key], where: str) -> str:
    """A definition list, each key with an anchor."""
    entries = []
    for key in found:
        anchor = re.sub(r"\W+", "-", f"{where}-{key.name}")
        words = "\n  ".join([_prose(key.words) or "&nbsp;", *(f"\n  - {c}" for c in key.choices)])
        entries.append(f"`{key.name}`{{#{anchor}}} `{key.kind}`{{.kind}}\n: {words}\n")
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
