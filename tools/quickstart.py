"""Builds and executes examples/quickstart.ipynb from the cells below: `python -m tools.quickstart`.

Needs nbclient, nbformat and ipykernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"
CELLS = (
    (
        "markdown",
        """\
# Quickstart

The fused loss on a tiny model, and the controller that chooses the mixing weight mu. Runs on a
laptop in seconds; needs `pip install '.[train]'`.""",
    ),
    (
        "code",
        """\
import matplotlib.pyplot as plt
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gac import ControllerConfig, GuidedController
from gac_kernels import LossSpec, fused_linear_gac_loss

torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)""",
    ),
    (
        "markdown",
        """\
A batch holds rollouts and demonstrations, side by side. Here the demonstrations count upwards; a
rollout is rewarded for every token that is even. The model samples its own rollouts.""",
    ),
    (
        "code",
        """\
def batch(rows=16, length=12):
    start = torch.randint(1, 64, (rows, 1))
    demos = (start + torch.arange(length + 1)) % 64
    with torch.no_grad():
        rollouts = model.generate(start, max_new_tokens=length, min_new_tokens=length,
                                  do_sample=True, pad_token_id=0, eos_token_id=0)
    rewards = (rollouts[:, 1:] % 2 == 0).float().mean(1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    ids = torch.cat([rollouts, demos])
    is_demo = torch.arange(2 * rows) >= rows
    return ids, torch.cat([advantages, torch.zeros(rows)]), is_demo, rewards.mean().item()""",
    ),
    (
        "markdown",
        """\
One call returns the mixed loss with its gradients, and the statistics from which the controller
chooses the next mu. The full logits are never materialized.""",
    ),
    (
        "code",
        """\
controller = GuidedController(ControllerConfig(max_step=0.05, prior_blend=1.0, ema_decay=0.8))
history = {"mu": [], "mu*": [], "reward": [], "demo loss": []}
for _ in range(60):
    ids, advantages, is_demo, reward = batch()
    hidden = model.model(ids[:, :-1]).last_hidden_state
    out = fused_linear_gac_loss(hidden, model.lm_head.weight, ids[:, 1:], advantages, is_demo,
                                mu=controller.mu, spec=LossSpec(demo_weight="one"))
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    controller.update(signals=out.moments.signals(), kl=None)
    history["mu"].append(controller.mu)
    history["mu*"].append(controller.mu_star)
    history["reward"].append(reward)
    history["demo loss"].append(out.demo_loss.item())""",
    ),
    (
        "code",
        """\
figure, axes = plt.subplots(1, 3, figsize=(11, 2.8))
axes[0].plot(history["mu"], label="mu")
axes[0].plot(history["mu*"], label="mu*", alpha=0.5)
axes[0].legend()
axes[1].plot(history["reward"])
axes[1].set_title("fraction of even tokens")
axes[2].plot(history["demo loss"])
axes[2].set_title("demonstration loss")
for axis in axes:
    axis.set_xlabel("step")
plt.show()""",
    ),
    (
        "markdown",
        """\
Next: `gac train` runs the full loop from a file (docs/start.md), and docs/choose_mu.md shows how
much adapting mu helped in our studies.""",
    ),
)


def main() -> int:
    """Execute the cells and write the notebook with their output."""
    import nbclient
    import nbformat

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook(cells=[make[kind](text) for kind, text in CELLS])
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # random ids would differ from run to run
    nbclient.NotebookClient(notebook, timeout=300).execute()
    notebook.metadata = {"language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell["metadata"] = {}  # drop the execution times
        if "outputs" in cell:  # drop warnings, which depend on the machine
            cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]
    nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
