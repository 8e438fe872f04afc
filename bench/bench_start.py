"""Peak host memory of loading a sharded model and of exporting it: `python -m bench.bench_start`.

Runs real processes over gloo on this machine. Each rank's peak (VmHWM, which includes mapped files)
is measured relative to its memory before the work and reported as a fraction of the model size.
*full* loads the full model on every rank, then shards it, and exports by loading it again;
*sharded* is what gac does: it shards while loading. Finally, it measures the step time lost to a
checkpoint that is saved synchronously or asynchronously (`dcp.async_save`). Writes
bench/results/start.json.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, Qwen2Config

from gac.demo.task import make_tokenizer
from gac.faults import checkpoint
from gac.models.causal_lm import check_head, load_model, load_tokenizer, make_model
from gac.models.config import ModelConfig
from gac.parallel import setup
from gac.parallel.config import ParallelConfig
from gac.training.export import export_checkpoint

from .peak_memory import resident
from .record import RESULTS, copy_out, device_name, environment

SHARDED = ParallelConfig(mode="fsdp")
SHARD = 32 << 20  # bytes per exported file
DEADLINE = 900  # seconds per job
SAVES = 3


def write_base(folder: Path, layers: int, dtype: torch.dtype) -> None:
    """Write a Qwen2 model with 26 MB per layer and a 51 MB embedding in float32."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=16640,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="100MB")


def peak(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Run `work`; returns its result, its peak memory growth in MiB and its time in seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, start = resident("VmRSS"), time.perf_counter()
    result = work()
    usage = {"mib": resident("VmHWM") - before, "seconds": time.perf_counter() - start}
    return result, usage


def start(config: ModelConfig, accelerator: Accelerator, mode: str) -> nn.Module:
    """Load the model and shard it: after loading (mode "full") or while loading ("sharded")."""
    loading = setup.sharded_loading(accelerator, SHARDED)
    if mode == "full":
        return setup.prepare(load_model(config), accelerator, SHARDED, None, loading)
    return setup.prepare(make_model(config, 0, loading), accelerator, SHARDED, None, loading)


def export_full(config: ModelConfig, path: Path, out: Path) -> None:
    """Load the full model, fill it from the checkpoint and save it."""
    model = load_model(config)
    checkpoint.load_weights(path, model)
    model.__dict__.pop("forward")
    model.save_pretrained(out)
    load_tokenizer(config).save_pretrained(out)


def memory(job: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Peak memory of this rank while loading the model, and while exporting it after a run."""
    config, folder = ModelConfig(path=job["base"]), Path(job["folder"])
    model, started = peak(lambda: start(config, accelerator, job["mode"]))
    total = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    _, first = peak(lambda: check_head(model))  # gathers layer by layer, like every forward pass
    setup.reshard(model)
    path = checkpoint.save(folder / "run", 1, model, torch.optim.SGD(model.parameters()), {})
    exported = None
    if accelerator.is_main_process:  # the other ranks wait, as in a run
        if job["mode"] == "full":
            _, exported = peak(lambda: export_full(config, path, folder / "out"))
        else:
            _, exported = peak(lambda: export_checkpoint(config, path, folder / "out", SHARD))
    dist.barrier()
    return {"model_mib": total, "start": started, "forward": first, "export": exported}


def saving(job: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Measure the cost of synchronous and asynchronous checkpoints.

    The cost is the delay of the next steps, in seconds, and the peak memory growth, in MiB.
    """
    model = start(ModelConfig(path=job["base"]), accelerator, "sharded")
    check_head(model)
    setup.reshard(model)  # gathered parameters are different objects
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.arange(64)[None] % 16
    save_group = dist.new_group(backend="gloo")  # the steps' collectives continue during the save

    def step() -> float:
        began = time.perf_counter()
        model(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - began

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def save_sync(folder: Path) -> float:
        began = time.perf_counter()
        dcp.save(state(), checkpoint_id=folder)
        dist.barrier()
        return time.perf_counter() - began

    def save_async(folder: Path) -> float:
        began, steps = time.perf_counter(), 0
        future = dcp.async_save(state(), checkpoint_id=folder, process_group=save_group)
        assert isinstance(future, Future)
        while True:  # all ranks must run the same number of steps
            done = torch.tensor(float(future.done()))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                break
            step()
            steps += 1
        future.result()
        return time.perf_counter() - began - steps * typical

    for _ in range(3):
        step()
    typical = sorted(step() for _ in range(7))[3]
    saves: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    for number in range(SAVES):
        for name, save in (("sync", save_sync), ("async", save_async)):
            folder = Path(job["folder"]) / f"{name}-{number}"
            delay, usage = peak(functools.partial(save, folder))
            saves[name].append({"delay": delay, "mib": usage["mib"]})
    return {"step": typical, "saves": saves}


def worker(job: dict[str, Any]) -> None:
    """Run one rank of a job."""
    torch.set_num_threads(1)
    accelerator = setup.make_accelerator(SHARDED, (), job["folder"])
    result = (saving if job["work"] == "saving" else memory)(job, accelerator)
    path = Path(job["folder"]) / f"rank-{accelerator.process_index}.json"
    path.write_text(json.dumps(result))


def run(ranks: int, **job: Any) -> list[dict[str, Any]]:
    """Run a job in `ranks` new processes; returns the results of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        job_json = json.dumps({**job, "folder": folder})
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "bench.bench_start",
            "--worker",
            job_json,
        ]
        # return freed memory to the system, so that only live memory is measured
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        subprocess.run(command, check=True, timeout=DEADLINE, env=variables)
        return [json.loads((Path(folder) / f"rank-{r}.json").read_text()) for r in range(ranks)]


def measure(layers: int, counts: list[int]) -> None:
    """Run all jobs; the results so far are saved after each one."""
    document: dict[str, Any] = {
        "device": device_name("cpu"),
        "date": str(datetime.date.today()),
        **environment("cpu"),
        "layers": layers,
        "export_shard_mib": SHARD / 2**20,
        "memory": [],
        "checkpoints": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        bases = [Path(folder) / "float32", Path(folder) / "bfloat16"]
        for base in bases:
            write_base(base, layers, getattr(torch, base.name))
        for base, ranks, mode in itertools.product(bases, counts, ("full", "sharded")):
            results = run(ranks, work="memory", base=str(base), mode=mode)
            document["memory"].append(row(ranks, mode, base.name, results))
            save(document)
        for ranks in counts:
            first, *_ = run(ranks, work="saving", base=str(bases[0]))
            document["checkpoints"].append({"ranks": ranks, **first})
            save(document)


def save(document: dict[str, Any]) -> None:
    """Save the results so far and print the latest one."""
    path = RESULTS / "start.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    copy_out(path)
    print((document["checkpoints"] or document["memory"])[-1], flush=True)


def row(ranks: int, mode: str, stored: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Row of results: the largest peak memory of any rank, also as a fraction of the model size."""
    total = results[0]["model_mib"]
    start, exported = max(r["start"]["mib"] for r in results), results[0]["export"]
    return {
        "ranks": ranks,
        "mode": mode,
        "stored": stored,
        "model_mib": round(total, 1),
        "start_mib": round(start, 1),
        "start_share": round(start / total, 3),
        "forward_share": round(max(r["forward"]["mib"] for r in results) / total, 3),
        "start_seconds": round(max(r["start"]["seconds"] for r in results), 2),
        "export_mib": round(exported["mib"], 1),
        "export_share": round(exported["mib"] / total, 3),
        "export_seconds": round(exported["seconds"], 2),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--layers", type=int, default=8, help="number of model layers; 8 give 265 MiB"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker)
        return
    measure(options.layers, options.ranks)


if __name__ == "__main__":
    main()
