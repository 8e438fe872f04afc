"""Runs TRL's own tests with its head, our head, our GRPO loss and a deliberately wrong head.

Usage: TRL_SOURCE=path python -m tests.heads.trl_suite [--home FOLDER] [grpo sft ...]

TRL_SOURCE is a git checkout of TRL; its tests run against the installed package. Every test that
passes with TRL's head must pass with ours. Losses, gradient norms and metrics of all micro-steps
before the first optimizer step must agree, under TRL's default autocast and in float32. The wrong
head (log-probs times 1.01) must be noticed in every test that trains with TRL's head and has a
gradient. The results go to docs/integrations/trl.md if all five files were run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

TRAINERS = ("grpo", "sft", "dpo", "kto", "rloo")
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations" / "trl.md"
# relative tolerance by dtype: rounding of sums in another order, and of TRL's logits
TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2e-3, "torch.bfloat16": 2e-2}
ABSOLUTE = 0.1  # times the relative tolerance: for sums that nearly cancel
DISCRETE = ("accurac", "clip")  # rounding flips these decisions: compared in float32 only
# word in the reason that pytest reports: reason in the table
REASONS = {
    "image": "images",
    "vllm": "vLLM",
    "accelerator": "a GPU",
    "gpu": "a GPU",
    "bitsandbytes": "a GPU",
    "hub only": "a model or dataset that is on the hub only",
    "gated": "a model or dataset that is on the hub only",
    "jmespath": "tool calls: token ids of a tokenizer that is on the hub only",
    "this trl version lacks": "private functions of another TRL version",
    "expected to fail": "expected to fail",
}
OTHER = "assertions about another TRL version or the data on the hub"
Result = dict[str, Any]


def run(
    source: Path, trainer: str, mode: str, float32: bool, home: Path, tests: Iterable[str] = ()
) -> Result:
    """Outcomes and recorded micro-steps of one test file, or of `tests`.

    Reads the results of an earlier run if there are any.
    """
    name = f"{trainer}-{mode}{'-float32' * float32}"
    out = home / f"{name}.json"
    if not out.exists():
        # TRL's package of tests has the same name as ours, so the plugin is imported by file name
        environment = os.environ | {
            "GAC_TRL_HOME": str(home),
            "GAC_TRL_MODE": mode,
            "GAC_TRL_OUT": str(out),
            "GAC_TRL_FLOAT32": str(int(float32)),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'heads'}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",  # or the checkout would come before the installed TRL
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "trl_plugin"]
        command += ["-p", "no:cacheprovider"]
        command += sorted(tests) or [f"tests/test_{trainer}_trainer.py"]
        with (home / f"{name}.log").open("w") as log:
            subprocess.run(
                command,
                cwd=source,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=3 * 3600,
                check=False,
            )
    result = json.loads(out.read_text()) if out.exists() else {"outcomes": {}}
    if not result["outcomes"]:
        raise SystemExit(f"TRL's tests did not run: see {home / name}.log")
    return result


def passed(result: Result) -> set[str]:
    return {test for test, (outcome, _) in result["outcomes"].items() if outcome == "passed"}


def errors(own: Result, ours: Result, test: str) -> Iterator[tuple[str, float]]:
    """Difference of each recorded number of a test, as a multiple of the tolerance."""
    dtypes = own["heads"].get(test, ["torch.float32"])
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    half = dtypes != ["torch.float32"]
    expected, actual = own["steps"].get(test, []), ours["steps"].get(test, [])
    if len(expected) != len(actual):
        yield f"{len(actual)} micro-steps instead of {len(expected)}", float("inf")
    for step, other in zip(expected, actual, strict=False):
        if step.keys() != other.keys():
            yield f"metrics {sorted(step.keys() ^ other.keys())}", float("inf")
        for name in step.keys() & other.keys():
            a, b = step[name], other[name]
            if half and any(word in name for word in DISCRETE):
                continue
            if a != b and (a == a or b == b):  # nan equals nan
                limit = tolerance * (max(abs(a), abs(b)) + ABSOLUTE)
                yield f"{name} {b} instead of {a}", abs(a - b) / limit


def differing(own: Result, ours: Result) -> dict[str, str]:
    """Tests with a number that differs by more than the tolerance: its largest difference."""
    out = {}
    for test in own["steps"]:
        worst = max(errors(own, ours, test), key=lambda item: item[1], default=("", 0.0))
        if not worst[1] <= 1:
            out[test] = f"{worst[0]} ({worst[1]:.2g} x the tolerance)"
    return out


def compare(source: Path, trainer: str, home: Path) -> tuple[dict[str, Any], list[str]]:
    """A row of the table, and one line per failure."""
    own = {False: run(source, trainer, "own", False, home)}
    trained = own[False]["steps"].keys() & own[False]["heads"].keys()
    tests = {False: passed(own[False]) | trained, True: trained}
    own[True] = run(source, trainer, "own", True, home, trained)
    trained &= own[True]["steps"].keys()
    skipped = Counter(
        next((reason for word, reason in REASONS.items() if word in text.lower()), OTHER)
        for outcome, text in own[False]["outcomes"].values()
        if outcome != "passed"
    )
    row = {
        "file": f"test_{trainer}_trainer.py",
        "tests": len(own[False]["outcomes"]),
        "own": len(passed(own[False])),
        "compared": len(trained),
        "skipped": dict(skipped),
    }
    failures = [] if trained else ["no test trained with TRL's head"]
    for mode in ("head", "loss") if trainer == "grpo" else ("head",):
        ours = {f: run(source, trainer, mode, f, home, tests[f]) for f in (False, True)}
        kept = passed(own[False]) & passed(ours[False])
        row[mode] = len(kept)
        failures += [f"{mode}: no longer passes: {t}" for t in passed(own[False]) - kept]
        for float32, name in ((False, "autocast"), (True, "float32")):
            different = differing(own[float32], ours[float32])
            failures += [f"{mode}, {name}: {t}: {text}" for t, text in different.items()]
        if mode == "loss":
            row["loss"] = (
                f"{row['loss']}, {len(trained - set(ours[True]['fell_back']))} in one pass"
            )
    noticed = set(differing(own[True], run(source, trainer, "wrong", True, home, trained)))
    zero = TOLERANCES["torch.float32"] * ABSOLUTE  # e.g. all rewards are equal
    norms = {t: [step["gradient norm"] for step in own[True]["steps"][t]] for t in trained}
    gradients = {test for test in trained if max(norms[test]) > zero}
    row["noticed"] = f"{len(noticed & gradients)} of {len(gradients)}"
    failures += [f"wrong head not noticed: {test}" for test in gradients - noticed]
    return row, sorted(failures)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of the docs."""
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row["skipped"])
    return "\n".join(
        [
            f"TRL {version('trl')}, transformers {version('transformers')}:",
            "",
            "| TRL's test file | tests | pass with TRL's head | also with our head "
            "| also with our loss | trainings with equal numbers | wrong head noticed |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| `{r['file']}` | {r['tests']} | {r['own']} | {r['head']} | {r.get('loss', '')} "
                f"| {r['compared']} | {r['noticed']} |"
                for r in rows
            ),
            "",
            "Deselected, or failing with TRL's own head, too: "
            + ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
            + ".",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, help="keep logs and results here, and reuse them")
    parser.add_argument("trainers", nargs="*", choices=[*TRAINERS, []], default=[])
    options = parser.parse_args()
    source = Path(os.environ.get("TRL_SOURCE", ""))
    if not (source / "tests" / "test_grpo_trainer.py").is_file():
        print(f"TRL_SOURCE={str(source)!r}: set it to a git checkout of TRL", file=sys.stderr)
        return 2
    failed = False
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = options.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        for trainer in options.trainers or TRAINERS:
            row, failures = compare(source, trainer, home)
            rows.append(row)
            print(json.dumps(row), *failures, sep="\n  ", flush=True)
            failed |= bool(failures)
    table = markdown(rows)
    print(table)
    if not failed and len(rows) == len(TRAINERS):
        pattern = "(?<=<!-- trl tests -->\\n).*?(?=<!-- /trl tests -->)"
        PAGE.write_text(re.sub(pattern, lambda _: table + "\n", PAGE.read_text(), flags=re.S))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
