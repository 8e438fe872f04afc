"""Starts processes for the adapter tests: each is a new interpreter, as under a launcher."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed import TCPStore

# trainers modify os.environ; child processes get the original environment
INITIAL_ENV = dict(os.environ)
ROOT = str(Path(__file__).parents[2])


def launch(module: str, *args: str, ranks: int, timeout: float = 500) -> None:
    """Run `python -m module args` on each of `ranks` ranks.

    Raises:
        AssertionError: a rank failed; the message is its output.
        TimeoutError: not finished after `timeout` seconds.
    """
    # the store runs here, as in the agent of torchrun, so that nobody can take its port
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    env = INITIAL_ENV | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]),
    }
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        processes = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("w") as out:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", module, *args],
                            stdout=out,
                            stderr=out,
                            cwd=ROOT,
                            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        )
                    )
            for process in processes:
                try:
                    process.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    tails = "\n".join(o.read_text()[-2000:] for o in outputs)
                    raise TimeoutError(
                        f"{module}: not finished after {timeout} s\n{tails}"
                    ) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output.read_text()[-6000:]


def example(name: str, steps: int, timeout: float = 300) -> list[dict[str, float]]:
    """Run `python -m examples.name steps` and return the rows that it prints."""
    env = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"examples.{name}", str(steps)],
        cwd=ROOT,
        env={**INITIAL_ENV, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("reward ")]
    return [dict(zip(line[::2], map(float, line[1::2]), strict=True)) for line in lines]


def check_example_learns(name: str, prefix: str = "gac/") -> None:
    """Run ten steps of an example with the default method, whose metrics start with `prefix`."""
    rows = example(name, 10)
    assert len(rows) == 10, rows
    assert rows[-1][f"{prefix}demo_loss"] < rows[0][f"{prefix}demo_loss"], rows
    assert rows[-1]["reward"] > rows[0]["reward"], rows
    assert {row[f"{prefix}mu"] for row in rows} == {0.4}, rows  # of the default method
