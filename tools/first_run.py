"""Writes the transcript of a first run on a terminal of 80 columns into docs/start.md.

Usage: python -m tools.first_run
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

from tools.pages import ROOT, fill

COMMANDS = ("init first", "check first/run.yaml", "train first/run.yaml")
COLUMNS = 80


def on_terminal(arguments: list[str], folder: Path) -> str:
    """The final text on a terminal in which `gac ARGUMENTS` runs in `folder`."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        os.environ |= {"PYTHONPATH": paths, "COLUMNS": str(COLUMNS)}
        os.execv(sys.executable, [sys.executable, "-m", "gac.cli", *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    output = bytearray()
    try:
        while part := os.read(terminal, 4096):
            output += part
    except OSError:  # the program has closed the terminal
        pass
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit(output.decode())
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output.decode())
    lines = [line.rstrip("\r").split("\r")[-1].rstrip() for line in text.split("\n")]
    return "\n".join(line for line in lines if line)


def main() -> None:
    """Run the commands in a new folder, and write what they show."""
    shown = []
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            output = on_terminal(command.split(), Path(folder))
            shown.append(f"$ gac {command}\n{output.replace(folder, '.')}")
    fill(ROOT / "docs" / "start.md", "first run", "```text\n" + "\n".join(shown) + "\n```")


if __name__ == "__main__":
    main()
