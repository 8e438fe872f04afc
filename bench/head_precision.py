"""Errors of log-probabilities of eager heads and of ours: `python -m bench.head_precision MODEL`.

Hidden states and the head's weight are in bfloat16; the truth is the head in float64 on the same
values. bfloat16 logits are what a model returns; they are converted to float32 before the softmax.
The float32 logits of an eager head multiply float32 copies of both. Without --text, the table of
docs/kernels.md is written anew.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac.evaluation.table import markdown_table
from gac_kernels import linear_token_logprobs
from tools.pages import ROOT, fill

TEXT = ROOT / "docs" / "architecture.md"
PAGE = ROOT / "docs" / "kernels.md"
HALF, FLOAT, OURS = "bfloat16, eager", "float32, eager", "float32, as here"


def errors(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, dict[str, float]]:
    """Errors of the targets' log-probabilities, from hidden [N, H] and weight [V, H].

    Also the share of the positions whose likeliest token differs.
    """
    exact = hidden.double() @ weight.double().T
    likeliest, truth = exact.argmax(-1), taken(exact, targets)
    eager = {
        HALF: (hidden @ weight.T).float(),
        FLOAT: hidden.float() @ weight.float().T,
    }
    logps, _ = linear_token_logprobs(hidden, weight, targets)
    _, _, agrees = linear_token_logprobs(hidden, weight, likeliest, outputs=("is_top1",))
    found = {name: (taken(z, targets), z.argmax(-1) == likeliest) for name, z in eager.items()}
    return {
        name: {
            "largest error": (values - truth).abs().max().item(),
            "mean error": (values - truth).abs().mean().item(),
            "another likeliest token": (~same).double().mean().item(),
        }
        for name, (values, same) in {**found, OURS: (logps, agrees)}.items()
    }


def taken(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [N] of the targets."""
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def markdown(found: dict[str, dict[str, float]]) -> str:
    """The table of docs/kernels.md."""
    return markdown_table(
        ("logits", "largest error, nats", "mean error", "positions with another likeliest token"),
        [
            (
                name,
                f"{row['largest error']:.2g}",
                f"{row['mean error']:.2g}",
                f"{100 * row['another likeliest token']:.2g}%",
            )
            for name, row in found.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a name of transformers")
    parser.add_argument("--text", type=Path, help="a file whose tokens are scored")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    ids = tokenizer((options.text or TEXT).read_text(), return_tensors="pt").input_ids[
        :, : options.tokens
    ]
    with torch.no_grad():
        hidden = model.get_decoder()(ids[:, :-1]).last_hidden_state[0]
        weight = model.get_output_embeddings().weight
        found = errors(hidden, weight, ids[0, 1:])
    print(f"{len(hidden)} tokens, H = {weight.shape[1]}, V = {weight.shape[0]}")
    print(markdown(found))
    if options.text is None:
        fill(PAGE, "head precision", markdown(found))


if __name__ == "__main__":
    main()
