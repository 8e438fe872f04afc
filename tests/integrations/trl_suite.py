"""Runs TRL's own tests with its head, our head, our GRPO loss and a deliberately wrong head.

Usage: TRL_SOURCE=path python -m tests.integrations.trl_suite [grpo sft dpo kto rloo]

TRL_SOURCE is a git checkout of TRL; its tests run against the installed package. Every test that
passes with TRL's head must pass with ours, and the losses and gradient norms of all micro-steps
before the first optimizer step must agree. The wrong head (log-probs times 1.01) must be noticed in
every test that trains.

Deselected: tests that need a GPU, vLLM, images, or models and data that only the hub has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAINERS = ("grpo", "sft", "dpo", "kto", "rloo")
DESELECTED = "not vlm and not vision and not image and not vllm and not liger and not multi_gpu"
TOLERANCE = 1e-4  # relative: float32 rounding of sums in another order
ROOT = Path(__file__).resolve().parents[2]


def run(source: Path, trainers: list[str], mode: str, home: Path) -> dict[str, Any]:
    """Outcomes and recorded micro-steps by test."""
    out = home / f"{mode}.json"
    environment = os.environ | {
        "GAC_TRL_HOME": str(home),
        "GAC_TRL_MODE": mode,
        "GAC_TRL_OUT": str(out),
        "GAC_TRL_FLOAT32": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    files = [f"tests/test_{name}_trainer.py" for name in trainers]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.integrations.trl_hub"]
    command += ["-p", "no:cacheprovider", "-k", DESELECTED, *files]
    # TRL's package has the name `tests` too: load the plugin from ours by file, not by package
    command[5] = "trl_hub"
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / 'integrations'}"
    log = home / f"{mode}.log"
    with log.open("w") as file:
        subprocess.run(
            command,
            cwd=source,
            env=environment,
            stdout=file,
            stderr=file,
            timeout=3 * 3600,
            check=False,
        )
    if not out.exists():
        raise SystemExit(f"TRL's tests did not run: see {log}")
    return json.loads(out.read_text())


def differing(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Tests whose recorded losses or gradient norms differ by more than rounding."""
    wrong = []
    for test, steps in expected["steps"].items():
        others = actual["steps"].get(test, [])
        close = len(steps) == len(others) and all(
            abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) + 1e-6 or (a != a and b != b)
            for step, other in zip(steps, others, strict=True)
            for a, b in zip(step, other, strict=True)
        )
        if not close:
            wrong.append(test)
    return wrong


def main(arguments: list[str]) -> int:
    source = os.environ.get("TRL_SOURCE", "")
    if not (Path(source) / "tests" / "test_grpo_trainer.py").is_file():
        print(f"TRL_SOURCE={source!r}: set it to a git checkout of TRL", file=sys.stderr)
        return 2
    trainers = arguments or list(TRAINERS)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        own = run(Path(source), trainers, "own", home)
        passed = [test for test, outcome in own["outcomes"].items() if outcome == "passed"]
        trained = list(own["steps"])
        print(f"TRL's own head: {len(passed)} of {len(own['outcomes'])} pass; {len(trained)} train")
        for mode in ("head", "loss", "wrong"):
            result = run(Path(source), trainers, mode, home)
            lost = [test for test in passed if result["outcomes"].get(test) != "passed"]
            numbers = differing(own, result)
            print(f"{mode}: {len(lost)} no longer pass, {len(numbers)} with other numbers")
            if mode == "wrong":
                missed = sorted(set(trained) - set(numbers))
                print(f"wrong head unnoticed in {len(missed)}: {missed}")
                failed |= bool(missed)
            else:
                print(*(f"  {test}" for test in (*lost, *numbers)), sep="\n")
                failed |= bool(lost or numbers)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
