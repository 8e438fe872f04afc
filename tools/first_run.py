"""Runs the first commands in a terminal of 80 columns; writes the transcript in docs/start.md.

`python -m tools.first_run` takes a minute or two. The commands run in an empty folder, as in the
page. A bar that is drawn again and again appears as it was last, and long lines are not wrapped.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

PAGE = Path("docs/start.md")
COMMANDS = ("init first", "train first/run.yaml")
SIZE = struct.pack("HHHH", 40, 80, 0, 0)  # lines and columns
SECONDS = 600  # limit of one command
CONTROL = re.compile(r"\x1b\[[?\d;]*([A-Za-z])|\x1b[^\[]|[\r\n]|[^\x1b\r\n]+")


def main() -> int:
    """Run the commands and rewrite the part of the page between the markers."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [f"$ gac {command}\n{run(command, folder)}" for command in COMMANDS]
    text, begin, end = PAGE.read_text(), "<!-- begin: first run -->\n", "<!-- end -->"
    head, _, rest = text.partition(begin)
    block = "```text\n" + "\n".join(parts).replace(f"{folder}/", "") + "```\n"
    PAGE.write_text(head + begin + block + end + rest.partition(end)[2])
    return 0


def run(command: str, folder: str) -> str:
    """What `gac COMMAND` shows on the terminal; raises CalledProcessError if it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, SIZE)
    arguments = ["timeout", str(SECONDS), sys.executable, "-m", "gac.cli", *command.split()]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"PYTHONPATH": str(Path.cwd()), "TERM": "xterm"}
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        output = b""
        try:
            while block := os.read(ours, 65536):
                output += block
        except OSError:  # how Linux reports that the other end was closed
            os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, output.decode())
    return screen(output.decode())


def screen(output: str) -> str:
    """The lines that a terminal shows after this output."""
    lines, row, column = [""], 0, 0
    for match in CONTROL.finditer(output):
        token, final = match[0], match[1]
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif final == "A":
            row = max(0, row - int(token[2:-1] or 1))
        elif final == "K":
            lines[row] = "" if token[2:-1] == "2" else lines[row][:column]
        elif token[0] != "\x1b":
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
