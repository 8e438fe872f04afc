"""Where a stored result comes from: the commit of the code, and the date."""

from __future__ import annotations

import datetime
import subprocess

from .pages import ROOT

CODE = "*.py", "*.cpp", "*.cu", "*.h", "*.toml"


def origin() -> dict[str, str]:
    """`date` and `commit` of a measurement that is made now.

    A commit with "+" had uncommitted changes; without a repository it is "unknown".
    """
    return {"date": str(datetime.date.today()), "commit": commit()}


def commit() -> str:
    """The checkout's commit, shortened; results and pages may differ from it, code may not."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("diff", "HEAD", "--stat", "--", *CODE)
        return git("rev-parse", "--short=8", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive, or no git
        return "unknown"
