"""Log-probabilities from bfloat16 and from float32 logits: `python -m bench.head_precision MODEL`.

Hidden states and the head's weight are in bfloat16; the truth is the head in float64 on the same
values. bfloat16 logits are what a model returns; they are converted to float32 before the softmax.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gac_kernels import linear_token_logprobs

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"


def errors(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, dict[str, float]]:
    """Errors of the targets' log-probabilities, from hidden [N, H] and weight [V, H].

    Also the share of the positions whose likeliest token differs.
    """
    exact, rounded = hidden.double() @ weight.double().T, hidden @ weight.T
    likeliest = exact.argmax(-1)
    ours, _ = linear_token_logprobs(hidden, weight, targets)
    _, _, agrees = linear_token_logprobs(hidden, weight, likeliest, outputs=("is_top1",))
    truth, theirs = (
        x.log_softmax(-1).gather(-1, targets[:, None])[:, 0] for x in (exact, rounded.float())
    )
    found = {"bfloat16": (theirs, rounded.argmax(-1) == likeliest), "float32": (ours, agrees)}
    return {
        name: {
            "largest error": (logps - truth).abs().max().item(),
            "mean error": (logps - truth).abs().mean().item(),
            "another likeliest token": (~same).double().mean().item(),
        }
        for name, (logps, same) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a name of transformers")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file whose tokens are scored")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    ids = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[:, : options.tokens]
    with torch.no_grad():
        hidden = model.get_decoder()(ids[:, :-1]).last_hidden_state[0]
        weight = model.get_output_embeddings().weight
        found = errors(hidden, weight, ids[0, 1:])
    print(f"{len(hidden)} tokens, H = {weight.shape[1]}, V = {weight.shape[0]}")
    for name, values in found.items():
        print(f"{name:>8} logits: " + ", ".join(f"{k} {v:.2g}" for k, v in values.items()))


if __name__ == "__main__":
    main()
