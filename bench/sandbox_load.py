"""Runs many multi-threaded programs on many workers and counts the correct programs that fail.

    python -m bench.sandbox_load --programs 10000 --workers 64

Every program starts 30 threads at once, three times. Every hundredth one is a thread bomb, which
must fail without affecting the others: the limit on threads holds per program.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time

from gac.sandbox.pool import JudgeSpec, Pool, Program, RunResult

HONEST = """
import threading
def run(n):
    for _ in range(3):
        barrier, lock, out = threading.Barrier(n), threading.Lock(), []
        def work(i):
            barrier.wait()
            with lock: out.append(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    return sum(out)
"""
BOMB = """
import threading
def run(n):
    event = threading.Event()
    while True: threading.Thread(target=event.wait, daemon=True).start()
"""
TESTS = JudgeSpec(("assert run(30) == 435",))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--memory-mb", type=int, default=88, help="limit per process")
    options = parser.parse_args()
    pool = Pool(workers=options.workers)
    print(pool.start(), flush=True)
    started = time.perf_counter()

    def run(number: int) -> tuple[bool, RunResult]:
        bomb = number % 100 == 99
        program = Program(BOMB if bomb else HONEST)
        return bomb, pool.check(program, TESTS, 5, options.memory_mb)

    results = pool.map(run, range(options.programs))
    seconds = time.perf_counter() - started
    pool.close()
    failed = [result for bomb, result in results if not bomb and result.passed != (True,)]
    fooled = [result for bomb, result in results if bomb and result.passed == (True,)]
    print(f"{len(results)} programs on {options.workers} workers in {seconds:.0f} s")
    print(f"correct programs that failed: {len(failed)}; bombs that passed: {len(fooled)}")
    for reason, count in collections.Counter(f"{r.ending}: {r.problem}" for r in failed).items():
        print(f"{count} x {reason}")
    return 1 if failed or fooled else 0


if __name__ == "__main__":
    sys.exit(main())
