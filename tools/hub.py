"""Writes the layout of the Hugging Face kernels hub: `python -m tools.hub FOLDER`.

The hub distributes the kernels without the native libraries: Python and Triton only. FOLDER gets
the source layout that kernel-builder reads (build.toml, flake.nix, CARD.md, torch-ext/, tests/) and
the folders that kernel-builder makes from it (build/torch-cpu, build/torch-cuda), which `kernels`
can load.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, NAME, BACKENDS = "gac_kernels", "gac-kernels", ("cpu", "cuda")
# Reports about compiled kernels need the repository; the hub allows no import of a trainer.
LEFT_OUT = ("_ops.py", "inspect.py", "heads/")
OPS = '''import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str):
    """
    Prefix op by namespace.
    """
    return f"{id}::{{op_name}}"
'''
BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = [{backends}]

[general.hub]
repo-id = "{repository}"

[torch-noarch]
"""
FLAKE = """{
  description = "Fused losses for hybrid SFT + RL post-training";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
CARD = """---
library_name: kernels
license: apache-2.0
---

# gac-kernels

Fused losses for hybrid SFT + RL post-training of language models. The loss, its gradient and the
statistics of a batch of rollouts and demonstrations are computed in one pass over the logits, or
without materializing them. This repository has the Triton kernels and the PyTorch reference; the
package `gac-kernels` on PyPI also has native CPU and CUDA kernels.

```python
from kernels import get_kernel

gac_kernels = get_kernel("{repository}", version={version}, trust_remote_code=True)
out = gac_kernels.fused_linear_gac_loss(hidden, weight, targets, advantages, is_demo, mu=0.5)
out.loss.backward()
```

## Functions and types

{names}
"""
TEST = """import kernels
import pytest
import torch

gac_kernels = kernels.get_kernel("{repository}", version={version}, trust_remote_code=True)


@pytest.mark.kernels_ci
def test_gradient_equals_the_reference():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(2, 5, 77, device=device, requires_grad=True)
    targets = torch.randint(77, (2, 5), device=device)
    is_demo, advantages = torch.tensor([False, True]), torch.tensor([1.0, 0.0])
    gradients = []
    for backend in ("auto", "reference"):
        logits.grad = None
        batch = targets, advantages, is_demo
        out = gac_kernels.fused_gac_loss(logits, *batch, mu=0.5, backend=backend)
        out.loss.backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)
"""


def write(folder: Path, repository: str) -> None:
    """Write the whole layout to `folder`, which must not exist."""
    version = int(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"].split(".")[0]
    )
    values = {"name": NAME, "version": version, "repository": repository}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", PACKAGE]
    files = subprocess.check_output(listed, cwd=ROOT, text=True).splitlines()
    sources = {
        name: (ROOT / PACKAGE / name).read_bytes()
        for name in sorted(str(Path(f).relative_to(PACKAGE)) for f in files if f.endswith(".py"))
        if not name.startswith(LEFT_OUT) and (ROOT / PACKAGE / name).exists()
    }
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    texts = {
        "build.toml": BUILD.format(backends=backends, **values),
        "flake.nix": FLAKE,
        "CARD.md": CARD.format(names=_public_names(sources["__init__.py"].decode()), **values),
        f"tests/test_{PACKAGE}.py": TEST.format(**values),
        "tests/__init__.py": "",
    }
    folder.mkdir(parents=True)
    for name, text in texts.items():
        _put(folder / name, text.encode())
    for name, content in sources.items():
        _put(folder / "torch-ext" / PACKAGE / name, content)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    digest = hashlib.sha256(b"".join(name.encode() + sources[name] for name in sources))
    for backend in BACKENDS:
        _build(folder / "build" / f"torch-{backend}", sources, backend, digest.hexdigest(), values)


def _build(
    variant: Path, sources: dict[str, bytes], backend: str, digest: str, values: dict[str, object]
) -> None:
    """Write one variant: its sources, a module with its unique operator namespace, its metadata."""
    identifier = f"_{PACKAGE}_{backend}_{digest[:7]}"
    built = sources | {"_ops.py": OPS.format(id=identifier).encode()}
    for name, content in built.items():
        _put(variant / name, content)
    hashes = {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in sorted(built.items())
    }
    metadata = {
        "name": values["name"],
        "id": identifier,
        "version": values["version"],
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    _put(variant / "metadata.json", (json.dumps(metadata, indent=2) + "\n").encode())


def _public_names(source: str) -> str:
    names = source.partition("__all__ = [")[2].partition("]")[0].replace('"', "`").split(",")
    return "\n".join(f"- {name.strip()}" for name in names if name.strip())


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.hub", description="Write the hub layout."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", default="gac/gac-kernels", help="OWNER/NAME on the hub")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name a new folder")
    write(arguments.folder, arguments.repository)
    print(arguments.folder)


if __name__ == "__main__":
    main()
