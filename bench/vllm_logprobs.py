"""Compares vLLM's log-probs with ours, on vLLM's samples: `python -m bench.vllm_logprobs`.

The model is a small untrained one. vLLM samples from it in bfloat16; our fused loss head computes
the log-probs of the same tokens from transformers' hidden states.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import torch

from gac_kernels import linear_token_logprobs

from .settings import DEVICE, skip

TOLERANCE = 0.05  # bfloat16 forward passes of two implementations


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise skip("no vllm")
    import vllm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gac.demo.task import write_task

    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), seed=0)
        start = Path(folder) / "init"
        from transformers import AutoConfig

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(start))
        model.to(torch.bfloat16).save_pretrained(start)
        tokenizer = AutoTokenizer.from_pretrained(start)
        prompt = tokenizer("12+34=").input_ids
        engine = vllm.LLM(str(start), dtype="bfloat16", gpu_memory_utilization=0.1, seed=0)
        options = vllm.SamplingParams(temperature=1.0, max_tokens=16, logprobs=0, ignore_eos=True)
        sample = engine.generate([{"prompt_token_ids": prompt}], options)[0].outputs[0]
    theirs = [entry[t].logprob for t, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    tokens = torch.tensor([[*prompt, *sample.token_ids]], device=DEVICE)
    model.to(DEVICE)
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, len(prompt) - 1 : -1]
        ours, _ = linear_token_logprobs(hidden, model.lm_head.weight, tokens[:, len(prompt) :])
    worst = (ours[0].cpu() - torch.tensor(theirs)).abs().max().item()
    print(f"largest difference of {len(theirs)} log-probs: {worst:.4f}")
    assert worst <= TOLERANCE, f"more than {TOLERANCE}"


if __name__ == "__main__":
    main()
