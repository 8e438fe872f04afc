"""Does it matter for training that a head's weight gradient is summed up in bfloat16?

`python -m research.rounded_sums --data DIR` trains SmolLM2-135M-Instruct, whose head is tied to its
embeddings, on the solutions of GSM8K. Its arms see the same batches and differ only in how the
gradient of the head's weight is added up over the chunks of a batch. It trains the arms whose
results or weights are missing, and writes the table of research/rounded_sums.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac.demo.real_model import fetch_model
from gac.evaluation.estimates import paired_difference
from gac.evaluation.table import markdown_table
from gac_kernels import DemoWeight, LossSpec, fused_gac_loss, linear_token_logprobs
from research.page_sections import update_pages
from tools.origin import origin

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "rounded_sums.md", HERE / "results" / "rounded_sums.jsonl"
STEPS, ROWS, HELD_OUT, WARM_UP, LEARNING_RATE = 150, 2, 32, 20, 5e-5
CACHED = 1024  # entries of the vocabulary at a time
CHUNKS = 12  # of 32,768 tokens in 1000 MiB, at the head of Qwen2.5-7B by `gac_kernels.epilogue`


class Arm(NamedTuple):
    """How the gradient of the weight is added up."""

    dtype: torch.dtype
    """Of the running sum, rounded after each chunk."""
    chunks: int = CHUNKS
    result: torch.dtype = torch.bfloat16
    """Of the gradient."""


ARMS = {
    "float32": Arm(torch.float32, result=torch.float32),
    "float32, rounded once": Arm(torch.float32),
    "bfloat16, 12 chunks": Arm(torch.bfloat16),
    "bfloat16, 48 chunks": Arm(torch.bfloat16, 48),
}
EXACT, ONCE = "float32", "float32, rounded once"


class Row(NamedTuple):
    """A question with its solution."""

    ids: list[int]
    start: int  # of the solution


def read(tokenizer: Any, path: Path, count: int) -> list[Row]:
    """The first `count` questions, with the model's chat template."""
    rows = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            question = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
            start = len(prompt["input_ids"])
            solution = tokenizer(row["solution"], add_special_tokens=False)["input_ids"]
            rows.append(Row([*prompt["input_ids"], *solution, tokenizer.eos_token_id], start))
            if len(rows) == count:
                break
    return rows


def collate(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, attention mask and targets [B, T]; -100 outside the solutions."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        length = len(row.ids)
        ids[i, :length] = torch.tensor(row.ids)
        mask[i, :length] = 1
        targets[i, row.start - 1 : length - 1] = ids[i, row.start : length]
    return ids, mask, targets


def backward(model: Any, batch: tuple[Tensor, Tensor, Tensor], arm: Arm) -> float:
    """Compute the gradients of the mean negative log-likelihood; returns it."""
    ids, mask, targets = batch
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = model.lm_head.weight
    states, labels = hidden[targets != -100], targets[targets != -100]
    rows = states.detach()
    logits = (rows @ weight.detach().T).requires_grad_()
    demos, spec = torch.ones(1, dtype=torch.bool), LossSpec(demo_weight=DemoWeight.ONE)
    loss = fused_gac_loss(logits[None], labels[None], is_demo=demos, mu=1.0, spec=spec).loss
    (d_logits,) = torch.autograd.grad(loss, logits)
    states.backward(d_logits @ weight.detach())  # the embeddings, which are the weight, get a part
    for columns in range(0, len(weight), CACHED):
        part = slice(columns, columns + CACHED)
        weight.grad[part] += weight_gradient(d_logits[:, part], rows, arm)
    return loss.item()


def weight_gradient(d_logits: Tensor, rows: Tensor, arm: Arm) -> Tensor:
    """The gradient [V', H] of some entries' weights, float32, added up chunk by chunk.

    As in a GEMM that adds to its output, each sum is computed in float32, and the result rounded.
    """
    total = torch.zeros(d_logits.shape[1], rows.shape[1], dtype=arm.dtype)
    for own, x in zip(
        d_logits.tensor_split(arm.chunks), rows.tensor_split(arm.chunks), strict=True
    ):
        total.copy_(torch.addmm(total.float(), own.T, x))
    return total.to(arm.result).float()


@torch.no_grad()
def evaluate(model: Any, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Mean entropy and mean negative log-likelihood of each held-out solution, in nats."""
    entropies, losses = [], []
    for row in rows:
        ids, mask, targets = collate([row])
        hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        logps, entropy = linear_token_logprobs(hidden, model.lm_head.weight, targets)
        entropies.append(entropy[targets != -100].mean().item())
        losses.append(-logps[targets != -100].mean().item())
    return entropies, losses


def batches(rows: Sequence[Row]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same ones for every arm."""
    order = random.Random(0).sample(range(len(rows)), STEPS * ROWS)
    for step in range(STEPS):
        yield collate([rows[i] for i in order[step * ROWS : (step + 1) * ROWS]])


def train(name: str, data: Path, weights: Path) -> dict[str, Any]:
    """Train one arm; its weights are kept in `weights` for the distances."""
    path, started = str(fetch_model()), time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = read(tokenizer, data / "gsm8k_train.jsonl.gz", STEPS * ROWS)
    held_out = read(tokenizer, data / "gsm8k_test.jsonl.gz", HELD_OUT)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    losses, curve = [], {}
    before = evaluate(model, held_out)
    for step, batch in enumerate(batches(rows), 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(step / WARM_UP, 1.0)
        losses.append(backward(model, batch, ARMS[name]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"{name}: step {step}, loss {sum(losses[-25:]) / 25:.4f}", flush=True)
        if step in (STEPS // 3, STEPS):
            curve[step] = evaluate(model, held_out)
    torch.save(model.state_dict(), weights / f"{name}.pt")
    return {
        **origin(),
        "arm": name,
        "losses": losses,
        "before": before,
        "after": curve,
        "cpu_seconds": time.process_time() - started,
    }


def distances(weights: Path) -> dict[str, float]:
    """Distance of each arm's weights to the exact arm's, relative to that one's path."""

    def load(path: Path) -> Tensor:
        state = torch.load(path, weights_only=True)
        return torch.cat([x.flatten() for x in state.values()])

    start = AutoModelForCausalLM.from_pretrained(str(fetch_model()), dtype=torch.float32)
    initial = torch.cat([x.flatten() for x in start.state_dict().values()])
    exact = load(weights / f"{EXACT}.pt")
    length = (exact - initial).norm()
    return {
        name: ((load(weights / f"{name}.pt") - exact).norm() / length).item()
        for name in ARMS
        if name != EXACT
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The arms beside the exact one and the one that is rounded once."""
    lines = []
    for name, row in results.items():
        cells = [name, _number(row.get("distance"))]
        for i in (0, 1):
            values = row["after"][str(STEPS)][i]
            cells.append(f"{sum(values) / len(values):.4f}")
            cells += [_difference(values, results, base, i) for base in (EXACT, ONCE)]
        lines.append(cells)
    differences = ("less float32, 1e-5", "less rounded once, 1e-5")
    head = ("running sum", "distance, 1e-3", "entropy", *differences, "held-out loss", *differences)
    return markdown_table(head, lines)


def _difference(values: list[float], results: dict[str, Any], base: str, i: int) -> str:
    """The mean difference to an arm's values in 1e-5 nats; empty for the arm itself."""
    others = results[base]["after"][str(STEPS)][i]
    if others == values:
        return ""
    difference = paired_difference(values, others)
    low, high = difference.ci95
    mean, low, high = (1e5 * x for x in (difference.difference, low, high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{1e3 * value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m research.rounded_sums", description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with gsm8k_train.jsonl.gz")
    parser.add_argument("--weights", type=Path, default=Path("runs/rounded_sums"))
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    options = parser.parse_args(argv)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = {row["arm"]: row for row in map(json.loads, lines)}
    if options.data is not None:
        options.weights.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        for name in ARMS:
            if name not in results or not (options.weights / f"{name}.pt").exists():
                results[name] = train(name, options.data, options.weights)
                _write(results)
        for name, distance in distances(options.weights).items():
            results[name]["distance"] = distance
        _write(results)
        results = {row["arm"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
    check = ["--check"] if options.check else []
    sections = {"table": table(results)}
    return update_pages("research.rounded_sums", __doc__, [PAGE], sections, check)


def _write(results: dict[str, dict[str, Any]]) -> None:
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
