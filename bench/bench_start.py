"""Peak host memory of loading a sharded model and of exporting it: `python -m bench.bench_start`.

Runs real processes over gloo on this machine. Each rank's peak (VmHWM, which includes mapped files)
is measured relative to its memory before the work and reported as a fraction of the model size.
*full* loads the full model on every rank, then shards it, and exports by loading it again;
*sharded* is what gac does: it shards while loading. Then it measures the step time lost to a
checkpoint that is saved synchronously or asynchronously (`dcp.async_save`), and the time and memory
of reading and tokenizing rows: in a first start, and in a second one that finds them in the cache.
Writes bench/results/start.json; a part that is not run keeps its results.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import itertools
import json
import os
import random
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
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from gac.data import DataConfig, load_prompts
from gac.demo.task import make_tokenizer
from gac.faults import checkpoint
from gac.models.causal_lm import load_model, load_tokenizer, make_model
from gac.models.config import ModelConfig
from gac.models.head import check_head
from gac.parallel import process_group, sharding
from gac.parallel.config import ParallelConfig
from gac.training.export import export_checkpoint

from .peak_memory import resident
from .record import RESULTS, copy_out, device_name, environment

SHARDED = ParallelConfig(mode="fsdp")
SHARD = 32 << 20  # bytes per exported file
DEADLINE = 3600  # seconds per job
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
    loading = sharding.sharded_loading(accelerator, SHARDED)
    if mode == "full":
        return sharding.prepare(load_model(config), accelerator, SHARDED, None, loading)
    return sharding.prepare(make_model(config, 0, loading), accelerator, SHARDED, None, loading)


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
    sharding.reshard(model)
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
    sharding.reshard(model)  # gathered parameters are different objects
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


def write_rows(folder: Path, number: int) -> Path:
    """Write `number` rows of about 500 bytes, and a tokenizer with 8,000 BPE tokens for them."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(20000)]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length))

    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(number):
            row = {"id": f"{i}", "prompt": text(30), "answer": f"{i % 997}", "solution": text(36)}
            file.write(json.dumps(row) + "\n")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["</s>"], show_progress=False)
    bpe.train_from_iterator((text(60) for _ in range(5000)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(folder)
    return path


def loading(job: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Read and tokenize rows, or find them in the cache."""
    tokenizer = load_tokenizer(ModelConfig(path=job["base"]))
    config = DataConfig(prompts=str(Path(job["base"]) / "rows.jsonl"))
    accelerator.wait_for_everyone()
    before = os.times()
    rows, usage = peak(lambda: load_prompts(config, tokenizer, training=True))
    after = os.times()
    cpu = after.user + after.system - before.user - before.system
    return {"rows": len(rows), "cpu_seconds": round(cpu, 1)} | {
        key: round(value, 1) for key, value in usage.items()
    }


def worker(job: dict[str, Any]) -> None:
    """Run one rank of a job."""
    torch.set_num_threads(1)
    accelerator = process_group.make_accelerator(SHARDED, (), job["folder"])
    works = {"saving": saving, "memory": memory, "loading": loading}
    result = works[job["work"]](job, accelerator)
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
        variables["HF_HOME"] = job.get("home", folder)
        subprocess.run(command, check=True, timeout=DEADLINE, env=variables)
        return [json.loads((Path(folder) / f"rank-{r}.json").read_text()) for r in range(ranks)]


def measure(layers: int, counts: list[int], rows: int, parts: list[str]) -> None:
    """Run the jobs of `parts`; the results so far are saved after each one."""
    document: dict[str, Any] = json.loads((RESULTS / "start.json").read_text())
    about = {"device": device_name("cpu"), "date": str(datetime.date.today()), **environment("cpu")}
    if "model" in parts:
        document |= {**about, "layers": layers, "export_shard_mib": SHARD / 2**20}
        document |= {"memory": [], "checkpoints": []}
        measure_model(document, layers, counts)
    if "data" in parts:
        document["data"] = {**about, "loads": []}
        measure_data(document, rows)


def measure_model(document: dict[str, Any], layers: int, counts: list[int]) -> None:
    """Memory of loading and exporting the model, and the cost of checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        bases = [Path(folder) / "float32", Path(folder) / "bfloat16"]
        for base in bases:
            write_base(base, layers, getattr(torch, base.name))
        for base, ranks, mode in itertools.product(bases, counts, ("full", "sharded")):
            results = run(ranks, work="memory", base=str(base), mode=mode)
            document["memory"].append(row(ranks, mode, base.name, results))
            save(document, document["memory"])
        for ranks in counts:
            first, *_ = run(ranks, work="saving", base=str(bases[0]))
            document["checkpoints"].append({"ranks": ranks, **first})
            save(document, document["checkpoints"])


def measure_data(document: dict[str, Any], number: int) -> None:
    """The first and the second start with `number` rows, of one rank and of two."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder), number)
        for ranks, start in itertools.product((1, 2), ("first", "second")):
            home = f"{folder}/cache-{ranks}"
            results = run(ranks, work="loading", base=folder, home=home)
            cached = sum(file.stat().st_size for file in Path(home).rglob("*.examples"))
            sizes = {"file_mb": path.stat().st_size / 1e6, "cache_mb": cached / 1e6}
            load = {"ranks": ranks, "start": start, **sizes, "by_rank": results}
            document["data"]["loads"].append(load)
            save(document, document["data"]["loads"])


def save(document: dict[str, Any], rows: list[Any]) -> None:
    """Save the results so far and print the latest one."""
    path = RESULTS / "start.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    copy_out(path)
    print(rows[-1], flush=True)


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
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of rows of data")
    parser.add_argument("--parts", nargs="+", default=["model", "data"])
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(options.worker)
        return
    measure(options.layers, options.ranks, options.rows, options.parts)


if __name__ == "__main__":
    main()
