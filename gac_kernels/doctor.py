"""What is active here, and why: `python -m gac_kernels.doctor [--json]`, or `gac doctor`.

Prints versions, devices, the backend that serves each dtype, why the others do not, the trainers
with their adapters, and a self-test of each backend against float64. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from . import backends
from .api import fused_linear_gac_loss
from .tokens import DTYPES

PACKAGES = ("gac-kernels", "torch", "triton", "numpy", "transformers", "accelerate", "peft")
TRAINERS = {  # package: first version that the adapter supports, first one that it does not
    "trl": ("1.15", None),
    "verl": ("0.9", "1"),
    "axolotl": ("0.19", None),
    "openrlhf": ("0.11", None),
    "skyrl": ("0.3", None),
    "prime-rl": ("0.7", None),
    "ms-swift": ("4.6", None),
    "trinity-rft": ("0.6", None),
}
ABSENT = "not installed"
TOLERANCE = 1e-3  # relative, of the gradient in float32; TF32 is off


def report() -> dict[str, dict[str, str]]:
    """Sections of (item, state); a state that begins with "FAILED" is a failed self-test."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    sections: dict[str, dict[str, str]] = {
        "versions": {"python": platform.python_version()} | {x: _version(x) for x in PACKAGES},
        "devices": _devices(),
        "backends": {},
        "self-test": {},
        "trainers": {name: _support(name, *limits) for name, limits in TRAINERS.items()},
    }
    for kind in kinds:
        device = torch.device(kind)
        for name in backends.NAMES:
            reasons = {dtype: backends.unavailable(name, device, dtype) for dtype in DTYPES}
            known = sorted({reason for reason in reasons.values() if reason})
            sections["backends"][f"{name} on {kind}"] = "; ".join(known) or "available"
            if reasons[torch.float32] is None:
                sections["self-test"][f"{name} on {kind}"] = self_test(name, device)
        with warnings.catch_warnings(action="ignore"):  # it repeats the reasons
            chosen = {str(x)[6:]: backends.select_backend("auto", device, x) for x in DTYPES}
        used = {dtype: backends.name_of(module) for dtype, module in chosen.items()}
        sections["backends"][f"auto on {kind}"] = ", ".join(f"{y} for {x}" for x, y in used.items())
    return sections


def self_test(backend: str, device: torch.device) -> str:
    """Compare the gradients of one loss with those of the reference in float64."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8), torch.randn(33, 8)
    targets, is_demo = torch.randint(33, (2, 5)), torch.tensor([False, True])
    grads = []
    for name, dtype in (("reference", torch.float64), (backend, torch.float32)):
        x, w = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
        try:
            out = fused_linear_gac_loss(
                x, w, targets.to(device), torch.ones(2), is_demo, mu=0.5, backend=name
            )
            grads += [torch.cat([g.flatten() for g in torch.autograd.grad(out.loss, (x, w))])]
        except Exception as error:  # whatever is wrong with this installation
            return f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    relative = ((grads[1] - grads[0]).norm() / grads[0].norm()).item()
    return f"{'passed' if relative < TOLERANCE else 'FAILED'}: relative error {relative:.1e}"


def _devices() -> dict[str, str]:
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    devices = {"cpu": f"{platform.machine()}, {capability}, {threads} threads"}
    for i in range(torch.cuda.device_count()):
        free, total = (x / 2**30 for x in torch.cuda.mem_get_info(i))
        name, runtime = torch.cuda.get_device_name(i), torch.version.cuda or torch.version.hip
        devices[f"cuda:{i}"] = f"{name}, {free:.1f} of {total:.1f} GiB free, runtime {runtime}"
    return devices if len(devices) > 1 else devices | {"gpu": "none that torch can use"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def _support(package: str, first: str, end: str | None) -> str:
    """Whether the adapter for a trainer supports its installed version."""
    installed = _version(package)
    numbers = [tuple(map(int, re.findall(r"\d+", x or ""))) for x in (installed, first, end)]
    if numbers[0] and (numbers[0] < numbers[1] or (end and numbers[0] >= numbers[2])):
        wanted = f"{first} or later" + (f", below {end}" if end else "")
        return f"{installed} is not supported: install {wanted}"
    return f"{installed}, supported" if numbers[0] else installed


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns 1 if a self-test failed."""
    parser = argparse.ArgumentParser(prog="gac doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json, sections = parser.parse_args(argv).json, report()
    lines = [
        f"{name:11}{item}: {state}"
        for name, rows in sections.items()
        for item, state in rows.items()
        if state != ABSENT or name == "versions"
    ]
    absent = [item for item, state in sections["trainers"].items() if state == ABSENT]
    lines += [f"{'trainers':11}{ABSENT}: {', '.join(absent)}"] if absent else []
    print(json.dumps(sections, indent=1) if as_json else "\n".join(lines))
    return int(any(state.startswith("FAILED") for state in sections["self-test"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
