"""The layout of the kernels hub: its built folder loads next to the installed package."""

import importlib.util
import json
import sys
import tomllib

import pytest
import torch

from gac_kernels import fused_gac_loss, token_logprobs
from tools import hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "gac-kernels"
    hub.write(path, "owner/gac-kernels")
    return path


def load(folder):
    """Load the CPU variant, with the `kernels` package if it is installed."""
    if importlib.util.find_spec("kernels"):
        from kernels import get_local_kernel

        return get_local_kernel(folder, backend="cpu", trust_remote_code=True)
    variant = folder / "build" / "torch-cpu"
    spec = importlib.util.spec_from_file_location("hub_kernel", variant / "__init__.py")
    module = sys.modules["hub_kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layout_has_the_parts_that_kernel_builder_reads(folder):
    general = tomllib.loads((folder / "build.toml").read_text())["general"]
    assert (folder / "torch-ext" / general["name"].replace("-", "_") / "__init__.py").is_file()
    assert not (folder / "torch-ext" / "gac_kernels" / "_ops.py").exists()  # written by the builder
    assert not list(folder.rglob("heads"))  # the hub allows no import of a trainer
    assert "- `fused_linear_gac_loss`" in (folder / "CARD.md").read_text()
    for backend in general["backends"]:
        variant = folder / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["id"] in (variant / "_ops.py").read_text()
        listed = set(metadata["digest"]["files"]) | {"metadata.json"}
        assert listed == {str(p.relative_to(variant)) for p in variant.rglob("*") if p.is_file()}


@pytest.mark.filterwarnings("ignore:backend 'native' cannot run")
def test_built_folder_computes_the_same_loss(folder):
    kernel = load(folder)
    logits = torch.randn(2, 5, 77, generator=torch.Generator().manual_seed(0))
    batch = (torch.randint(77, (2, 5)), torch.tensor([1.0, 0.0]), torch.tensor([False, True]))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    kernel.fused_gac_loss(ours, *batch, mu=0.5).loss.backward()
    fused_gac_loss(theirs, *batch, mu=0.5, backend="reference").loss.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)

    compiled = torch.compile(kernel.token_logprobs, fullgraph=True, backend="aot_eager")
    expected = token_logprobs(logits, batch[0], backend="reference")
    torch.testing.assert_close(compiled(logits, batch[0]), expected)
    metadata = json.loads((folder / "build" / "torch-cpu" / "metadata.json").read_text())
    assert hasattr(getattr(torch.ops, metadata["id"]), "loss")
