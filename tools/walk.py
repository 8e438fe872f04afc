"""The walk of one training step through the files of `gac`: `python -m tools.walk [METHOD]`.

Traces the second step of a tiny run in a single process and lists each function at its first call.
A return is a change to a file that the walk has already visited.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import gac
from gac.config import load
from gac.demo.task import write_task
from gac.methods import DEFAULT
from gac.train_config import TrainConfig
from gac.training.trainer import Trainer

ROOT = Path(gac.__file__).parent


def reward(completion: str, example: Any) -> float:
    """A reward of the user's own, outside of `gac`."""
    return len(completion) % 3 / 2


def trace(method: str, folder: Path) -> list[tuple[str, str]]:
    """The file and the name of each function of one step, in the order of their first calls."""
    write_task(folder / "task", seed=0)
    task, sizes = folder / "task", {"num_prompts": 4, "num_generations": 4}
    data = {name: str(task / f"{name}.jsonl") for name in ("prompts", "demos")}
    settings = {
        "model": {"path": str(task / "init"), "random_init": True},
        "data": {**data, "demo_field": "solution"},
        "out": str(folder / "run"),
        "reward": "tools.walk:reward",
        "rollouts": {**sizes, "max_completion_length": 9},
        "method": method,
    }
    trainer = Trainer(load(TrainConfig, settings))
    trainer._train_step()  # what happens once is not part of the walk
    trainer.step += 1
    walk: dict[tuple[str, str], None] = {}

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        nested = code.co_name.startswith("<")  # comprehensions and lambdas
        if event == "call" and path.is_relative_to(ROOT) and not nested:
            walk[str(path.relative_to(ROOT)), code.co_qualname] = None

    sys.setprofile(hook)
    try:
        trainer._train_step()
    finally:
        sys.setprofile(None)
    return list(walk)


def main() -> None:
    """Print the walk and the number of returns."""
    method = sys.argv[1] if len(sys.argv) > 1 else DEFAULT
    with tempfile.TemporaryDirectory() as folder:
        walk = trace(method, Path(folder))
    visited: set[str] = set()
    returns, current = 0, ""
    for file, name in walk:
        if file != current:
            again = file in visited
            returns += again
            print(f"{file}{' (again)' if again else ''}")
        visited.add(file)
        current = file
        print(f"    {name}")
    print(f"{method}: {len(walk)} functions, {len(visited)} files, {returns} returns")


if __name__ == "__main__":
    main()
