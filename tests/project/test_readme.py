"""The README's code runs as written; what README and CONTRIBUTING.md list exists."""

import re
from pathlib import Path

import torch

from gac.methods import GAC, METHODS
from gac.methods.base import OURS
from tests.project.test_architecture import ROOMS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_diff_runs_as_written():
    """Run the diff's added lines and the controller example with a real model."""
    from tests.models.test_model import make

    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1)
    added = "\n".join(line[2:] for line in diff.splitlines() if line[:1] in "+ ")
    trl, controller = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[:2]
    namespace = {
        "model": make("qwen2"),
        "input_ids": torch.randint(3, 61, (2, 5)),
        "targets": torch.randint(3, 61, (2, 5)),
        "adv": torch.tensor([1.0, 0.0]),
        "is_demo": torch.tensor([False, True]),
        "mu": 0.5,
        "old_logps": torch.full((2, 5), -4.0),
    }
    exec(compile("\n".join((added, controller, trl)), "README.md", "exec"), namespace)
    namespace["apply_fused_head"]().undo()  # the tests that follow see TRL as it is
    assert namespace["loss"].isfinite()
    assert 0 <= namespace["mu"] <= 1
    assert namespace["model"].lm_head.weight.grad.abs().sum() > 0


def test_the_number_of_published_methods() -> None:
    """Not counted: variants of this project, and the controller that they are compared with."""
    published = [m for m in METHODS.values() if m.family not in (OURS, GAC.family)]
    for text in (README, (ROOT / "docs" / "index.md").read_text()):
        assert f"{len(published)} published methods" in text


def tree() -> dict[str, list[str]]:
    """The code layout of CONTRIBUTING.md: root entries -> the entries below the last one."""
    block = re.search(r"## Code layout\n.*?```\n(.*?)```", CONTRIBUTING, re.DOTALL).group(1)
    entries: dict[str, list[str]] = {}
    for line in block.splitlines():
        if line.startswith("  "):
            entries[list(entries)[-1]].append(line.split()[0].rstrip("/"))
        else:
            entries |= {name.rstrip("/"): [] for name in line.split("  ")[0].split()}
    return entries


def test_the_tree_lists_existing_files_and_the_packages_in_import_order():
    for folder, names in tree().items():
        for path in (ROOT / folder, *(ROOT / folder / name for name in names)):
            assert path.exists(), path
    assert [name.removesuffix(".py") for name in tree()["gac"]] == ROOMS


def test_walkthroughs_name_existing_files():
    walkthroughs = re.search(r"## Walkthroughs\n(.*?)\n## ", CONTRIBUTING, re.DOTALL).group(1)
    roots = [ROOT, *(ROOT / name for name in ("gac", "gac_kernels", "gac/rollouts"))]
    for name in re.findall(r"`([\w/]+(?:/|\.py|\.h))`", walkthroughs):
        assert any((root / name).exists() for root in roots), name


def test_every_make_target_and_link_exists_and_the_readme_is_short():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    lines = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", README, flags=re.DOTALL).splitlines()
    assert sum(not line.startswith("|") for line in lines) < 112
