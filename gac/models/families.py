"""Lists the tested model families: `gac models`."""

from __future__ import annotations

import json
from pathlib import Path

from gac.errors import ConfigError

RESULTS = Path(__file__).with_name("families.json")
LEGEND = 'padded: its rows are padded instead of packed; "not tested": no tiny model could be made'


def families_table(name: str | None = None) -> str:
    """Table of the families and how each mode was tested.

    Args:
        name: part of a family's name, or a folder or Hub name of a model; None: all families.

    Raises:
        ConfigError: no family matches.
    """
    results = json.loads(RESULTS.read_text())
    if name is not None and (Path(name).is_dir() or "/" in name):
        chosen = {_family(name)} & {*results}
    else:
        chosen = {family for family in results if (name or "") in family}
    if not chosen:
        raise ConfigError(
            f"NAME={name!r}: no tested family matches; run `gac models` for a list. `gac train` "
            "checks any model at the start"
        )
    width = max(map(len, chosen))
    lines = [f"{family:{width}}  {_summary(results[family])}" for family in sorted(chosen)]
    return "\n".join([*lines, "", LEGEND])


def _family(path: str) -> str:
    from transformers import AutoConfig

    from .source import check_source, one_line_errors

    check_source("NAME", path)
    with one_line_errors("NAME", path):
        return AutoConfig.from_pretrained(path).model_type


def _summary(modes: dict[str, str]) -> str:
    if "padded" in modes:
        order = sorted(modes, key=lambda mode: (mode != "padded", mode != "packed", mode))
        return ", ".join(f"{mode}: {modes[mode]}" for mode in order)
    reason = modes["model"]
    return f"refused: {reason}" if reason.startswith("model type") else f"not tested: {reason}"
