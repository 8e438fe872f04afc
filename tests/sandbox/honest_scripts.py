"""Test data: correct programs that read standard input or are in unusual completions."""

SUM = ("3\n1 2 3\n", "6\n")
"""Input and output of a script that adds numbers; the first line is their count."""

# each reads SUM in its own way
_SCRIPTS = """
=== input and map
n = int(input())
print(sum(map(int, input().split())))
=== sys.stdin.read
import sys
data = sys.stdin.read().split()
print(sum(map(int, data[1:])))
=== readline as input
import sys
input = sys.stdin.readline
n = int(input())
print(sum(int(x) for x in input().split()))
=== the binary buffer
import sys
rl = sys.stdin.buffer.readline
n = int(rl())
sys.stdout.buffer.write(b"%d\\n" % sum(map(int, rl().split())))
=== buffer.read
import sys
it = iter(sys.stdin.buffer.read().split())
print(sum(int(next(it)) for _ in range(int(next(it)))))
=== open(0)
n, *rest = map(int, open(0).read().split())
print(sum(rest))
=== open(0, "rb")
n, *rest = map(int, open(0, "rb").read().split())
print(sum(rest[:n]))
=== with open(0)
with open(0, closefd=False) as f:
    lines = f.readlines()
print(sum(map(int, lines[1].split())))
=== /dev/stdin
print(sum(map(int, open("/dev/stdin").read().split()[1:])))
=== /dev/stdin, /dev/stdout and /dev/stderr
with open("/dev/stdin") as f, open("/dev/stdout", "w") as g:
    assert open("/dev/stderr", "w").fileno() == 2
    f.readline()
    g.write(str(sum(map(int, f.readline().split()))))
=== for line in sys.stdin
import sys
total = -1
for line in sys.stdin:
    total = -1 if total < -1 else total
    numbers = list(map(int, line.split()))
print(sum(numbers))
=== fileinput
import fileinput
lines = list(fileinput.input())
print(sum(map(int, lines[1].split())))
=== os.read
import os
data = os.read(0, 1 << 20).split()
os.write(1, str(sum(map(int, data[1:]))).encode())
=== os.fdopen
import os
with os.fdopen(0, "r", closefd=False) as f: data = f.read().split()
print(sum(map(int, data[1:])))
=== io.open and readinto
import io
buffer = bytearray(100)
n = io.open(0, "rb", buffering=0).readinto(buffer)
print(sum(map(int, bytes(buffer[:n]).split()[1:])))
=== a fast input class
import os, sys
from io import BytesIO, IOBase
BUFSIZE = 8192
class FastIO(IOBase):
    newlines = 0
    def __init__(self, file):
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None
    def read(self):
        while True:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            if not b: break
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines = 0
        return self.buffer.read()
    def readline(self):
        while self.newlines == 0:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            self.newlines = b.count(b"\\n") + (not b)
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines -= 1
        return self.buffer.readline()
    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.read = lambda: self.buffer.read().decode("ascii")
        self.readline = lambda: self.buffer.readline().decode("ascii")
sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)
input = lambda: sys.stdin.readline().rstrip("\\r\\n")
n = int(input())
print(sum(map(int, input().split())))
=== atexit and a replaced stdout
import atexit, io, sys
_out = io.StringIO()
sys.stdout = _out
@atexit.register
def write(): sys.__stdout__.write(_out.getvalue())
n = int(input())
print(sum(map(int, input().split())))
=== input and output by number after the streams are closed
import os, sys
sys.stdin.close(), sys.stdout.close()
data = os.read(0, os.fstat(0).st_size).split()
os.write(1, str(sum(map(int, data[1:]))).encode())
assert os.fstat(1).st_ino != os.fstat(0).st_ino
try: os.fstat(2)
except PermissionError: pass
=== a main function with a guard
import sys
def main():
    n = int(sys.stdin.readline())
    print(sum(map(int, sys.stdin.readline().split())))
if __name__ == "__main__":
    sys.exit(main())
=== a thread with a large stack
import sys, threading
def main():
    input()
    def go(items): return items[0] + go(items[1:]) if items else 0
    print(go(list(map(int, input().split()))))
sys.setrecursionlimit(10 ** 7)
threading.stack_size(2 ** 27)
t = threading.Thread(target=main)
t.start()
t.join()
=== until EOFError
lines = []
while True:
    try: lines.append(input())
    except EOFError: break
print(sum(map(int, lines[1].split())))
=== iter with a sentinel
import sys
lines = list(iter(sys.stdin.readline, ""))
print(sum(map(int, lines[-1].split())))
=== asyncio main
import asyncio
async def main():
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, input)
    line = await loop.run_in_executor(None, input)
    print(sum(map(int, line.split())))
asyncio.run(main())
=== asyncio that waits
import asyncio, sys
async def main():
    await asyncio.to_thread(input)
    calls = []
    sys.setprofile(lambda *event: calls.append(event))
    await asyncio.sleep(0.2)
    sys.setprofile(None)
    assert len(calls) < 1000
    print(sum(map(int, input().split())))
asyncio.run(main())
=== a stdout without `closed`
import sys
class Out:
    text = ""
    def write(self, text): self.text += text
    def flush(self): sys.__stdout__.write(self.text)
sys.stdout = Out()
input()
print(sum(map(int, input().split())), end="")
=== the module of builtins
input()
print(__builtins__.sum(map(int, input().split())))
=== print to a file argument
import sys
input()
print(sum(map(int, input().split())), file=sys.stdout, flush=True)
print("debug", file=sys.stderr)
=== reconfigure and codecs
import sys, io
sys.stdin = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8")
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", line_buffering=True)
input()
print(sum(map(int, input().split())))
=== exit in the middle
import sys
n = int(input())
print(sum(map(int, input().split())))
sys.exit(0)
print("never")
=== a generator of tokens
import sys
def tokens():
    for line in sys.stdin: yield from line.split()
t = tokens()
print(sum(int(next(t)) for _ in range(int(next(t)))))
=== readlines and strip
from sys import stdin, stdout
lines = [line.strip() for line in stdin.readlines()]
stdout.write("%d\\n" % sum(map(int, lines[1].split(" "))))
=== a class with a solve method
class Solver:
    def __init__(self, read): self.n = int(read()); self.a = [*map(int, read().split())]
    def solve(self): return sum(self.a)
print(Solver(input).solve())
=== isatty and environment
import os, sys
if sys.stdin.isatty() or os.environ.get("LOCAL"): sys.stdin = None
input()
print(eval("+".join(input().split())))
"""

# the text of a completion; FENCE stands for three backticks. Its program defines add.
_COMPLETIONS = '''
=== prose around a block
Sure! Here it is:

FENCEpython
def add(a, b):
    return a + b
FENCE

This adds two numbers.
=== an indented block in a list
1. Define the function:

   FENCEpython
   def add(a, b):
       total = a
       return total + b
   FENCE

2. Done.
=== a block in a bullet
- FENCEpython
  def add(a, b):
      return a + b
  FENCE
=== a block indented with tabs
\tFENCEpy
\tdef add(a, b):
\t\treturn a + b
\tFENCE
=== a fence inside a docstring
FENCEpython
def add(a, b):
    """Adds.

    FENCE
    >>> add(1, 2)
    3
    FENCE
    """
    return a + b
FENCE
=== a block inside a Markdown block
FENCEmarkdown
# Solution

FENCEpython
def add(a, b):
    return a + b
FENCE

FENCE
=== output after the program
FENCEpython
def add(a, b):
    return a + b
print(add(1, 2))
FENCE
Output:
FENCE
3
FENCE
=== shell commands after the program
FENCEpy
def add(a, b): return a + b
FENCE
Run it:
FENCEbash
python add.py
FENCE
=== two attempts
FENCEpython
def add(a, b): return a - b
FENCE
Wait, that is wrong.
FENCEpython
def add(a, b): return a + b
FENCE
=== capital letters and attributes
FENCE{.Python .numberLines}
def add(a, b): return a + b
FENCE
=== python3 and a title
FENCEPython3 title="add.py"
def add(a, b): return a + b
FENCE
=== tildes
~~~python
def add(a, b):
    return a + b
~~~
=== longer fences
FENCE`python
text = """
FENCE
"""
def add(a, b): return a + b
FENCE`
=== no closing fence
FENCEpython
def add(a, b):
    return a + b
=== no fence at all
def add(a, b):
    return a + b
=== Windows line ends
FENCEpython\r
def add(a, b):\r
    return a + b\r
FENCE\r
=== reasoning with inline code first
Let `a` and `b` be numbers. ``add(a, b)`` returns their sum.
FENCEpython
# -*- coding: utf-8 -*-
def add(a: int, b: int) -> int:
    """Σ of a and b — naïve."""
    return a + b


if __name__ == "__main__":
    import doctest
    doctest.testmod()
FENCE
'''


def _entries(text: str) -> dict[str, str]:
    return {
        title: body.replace("FENCE", "`" * 3)
        for title, body in (entry.split("\n", 1) for entry in text.split("\n=== ")[1:])
    }


SCRIPTS = _entries(_SCRIPTS)
COMPLETIONS = _entries(_COMPLETIONS)
