"""Every shipped kernel cross-compiles for GPUs, without register spills."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

_CODE = """
import json
from bench.sass import per_logit, wide_accesses
from gac_kernels import inspect
reports = []
kernels = {}
for i, configuration in enumerate(inspect.triton_configurations()):
    if inspect.needs_hopper(configuration):
        continue
    name = configuration[1].kernel.__name__
    architectures = [inspect.ARCHITECTURES[len(kernels) % 3 if name not in kernels else i % 3]]
    if kernels.setdefault(name, i) == i:
        architectures.append("gfx942")
    for arch in architectures:
        report = inspect.compile_triton(configuration, arch)
        counts = {} if arch == "gfx942" else per_logit(report)._asdict()
        counts["wide_loads"], counts["wide_stores"] = wide_accesses(report)
        reports.append(report._replace(code="")._asdict() | counts)
print(json.dumps(reports))
"""

_SPECIALIZE = """
import json, torch
from itertools import product
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from gac_kernels import LossSpec, inspect
from gac_kernels.backends import triton
from gac_kernels.tokens import BatchInputs, Scaling, Upstream, plan

plain = plan(BatchInputs(torch.zeros(2, 4).long(), torch.ones(2), torch.ones(2) > 0), LossSpec())
backend = make_backend(GPUTarget("cuda", 90, 32))

def key(launch):
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return str(bind(**launch.arguments)[1])

keys = {}
for (group, shapes), dtype in product(SHAPES.items(), (torch.float32, torch.bfloat16)):
    for shape in shapes:
        out = torch.empty(*shape, dtype=dtype, device="meta")
        logits, row = out.float(), out[..., 0].flatten().float()
        targets = row.long()
        tokens = plain._replace(
            targets=targets, demo=targets > 0, advantages=row, old=row, scale=row)
        calls = (
            (triton.row_stats, logits, targets, Scaling(1.0)),
            (triton.row_grads, logits, targets, Scaling(1.0), Upstream(row, row, row, row), out),
            (triton.row_loss, logits, tokens, LossSpec(), out),
            (triton.row_loss, logits, tokens, LossSpec(), None),
            (triton.scale_, out, row[0]),
        )
        for i, call in enumerate(calls):
            (_, launch), = inspect.launches("", *call)
            name = f"{group}: {launch.kernel.__name__} {i} {dtype}"
            keys.setdefault(name, set()).add(key(launch))
print(json.dumps({name: len(different) for name, different in keys.items()}))
"""

ROW_KERNELS = {"stats_kernel", "grads_kernel", "loss_kernel", "scale_kernel"}


_EPILOGUE = """
import json
from gac_kernels import inspect
print(json.dumps([
    inspect.compile_triton(configuration, "90")._replace(code="")._asdict()
    for configuration in inspect.triton_configurations() if inspect.needs_hopper(configuration)
]))
"""


def _run(code: str) -> Any:
    """The JSON printed by a process without Triton's interpreter, in which nothing is compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=500
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


FULL = pytest.mark.full(reason="compiles dozens of kernels")


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Each configuration compiled for one of NVIDIA's three architectures, round-robin, and the
    first of each kernel for an AMD GPU; all combinations would take minutes.
    """
    return _run(_CODE)


@FULL
@pytest.mark.slow(reason="compiles every Triton kernel")
def test_no_shipped_kernel_spills(reports: list[dict[str, Any]]) -> None:
    assert {r["arch"] for r in reports} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    kernels = {
        *ROW_KERNELS,
        "lengths_kernel",
        "tokens_kernel",
        "sequences_kernel",
        "totals_kernel",
        "reference_kernel",
        "sums_kernel",
        "guard_kernel",
        "widen_kernel",
        "finish_kernel",
    }
    assert {r["kernel"] for r in reports} == kernels
    assert {r["kernel"] for r in reports if r["arch"] == "gfx942"} == kernels
    for report in reports:
        # a thread of an AMD GPU has up to 256 VGPRs if its program has 512 threads
        # and rows that are computed again are rare
        wide = report["arch"] == "gfx942" or report["kernel"] == "guard_kernel"
        registers = 256 if wide else 128
        assert report["spills"] == report["stack"] == 0, report
        assert 0 < report["registers"] <= registers, report


@FULL
@pytest.mark.slow(reason="compiles every Triton kernel")
def test_aligned_rows_move_in_16_byte_accesses(reports: list[dict[str, Any]]) -> None:
    """Of other rows, only the sums are read so, because their first logits are read separately."""
    for report in (r for r in reports if r["kernel"] in ROW_KERNELS):
        kernel, config = report["kernel"], report["config"]
        # scale_kernel treats a contiguous tensor as flat, so row alignment does not matter
        aligned = not config.startswith("V=50257 bfloat16") or kernel == "scale_kernel"
        sums = kernel in {"stats_kernel", "loss_kernel"}
        writes = kernel != "stats_kernel" and "no gradient" not in config
        assert (report["wide_loads"] > 0) == (aligned or sums), report
        assert (report["wide_stores"] > 0) == (aligned and writes), report


@FULL
@pytest.mark.slow(reason="compiles every Triton kernel")
def test_two_programs_share_a_multiprocessor(reports: list[dict[str, Any]]) -> None:
    """Twice a program's shared memory fits on sm_80 (163 KiB)."""
    for report in (r for r in reports if r["arch"] != "gfx942"):
        assert 2 * (report["shared"] + 1024) <= 163 * 1024, report


@FULL
@pytest.mark.slow(reason="compiles every Triton kernel")
def test_instructions_per_logit_are_counted(reports: list[dict[str, Any]]) -> None:
    """The lower bounds are the arithmetic per logit: 6 instructions for its sums, 4 for its
    gradient. A softcap takes as many again.
    """
    of_rows = (r for r in reports if r["kernel"] in ROW_KERNELS)
    for report in (r for r in of_rows if r["arch"] != "gfx942"):
        reads = report["kernel"] in {"stats_kernel", "loss_kernel"}
        writes = report["kernel"] == "grads_kernel" or (
            report["kernel"] == "loss_kernel" and "no gradient" not in report["config"]
        )
        most = 25 + 25 * ("softcap" in report["config"])
        assert (6 < report["sums"] < most) == reads, report
        assert (4 < report["gradient"] < most) == writes, report


@FULL
@pytest.mark.slow(reason="compiles three large kernels")
def test_the_epilogue_gemm_does_not_spill() -> None:
    """One program of 8 warps has a multiprocessor to itself, so a thread has 255 registers."""
    reports = _run(_EPILOGUE)
    assert len(reports) == len(inspect_epilogues())
    for report in reports:
        assert report["spills"] == report["stack"] == 0, report
        assert report["registers"] <= 255, report
        assert report["shared"] <= 227 * 1024, report


def inspect_epilogues() -> dict[str, dict[str, bool]]:
    from gac_kernels import inspect

    return inspect._EPILOGUES


LOOPS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDS.128 R4, [R0] ;
        /*0020*/                   FSETP.GT.AND P0, PT, R4, R8, PT ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   FMUL R9, R9, R9 ;
        /*0050*/                   FMUL R9, R9, R9 ;
.L_x_2:
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   MUFU.EX2 R5, R5 ;
        /*0080*/                   MUFU.EX2 R6, R6 ;
        /*0090*/                   MUFU.EX2 R7, R7 ;
        /*00a0*/               @P1 MUFU.EX2 R7, R7 ;
        /*00b0*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   MUFU.EX2 R4, R4 ;
        /*00d0*/                   MUFU.EX2 R5, R5 ;
        /*00e0*/                   MUFU.EX2 R6, R6 ;
        /*00f0*/                   MUFU.EX2 R7, R7 ;
        /*0100*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0110*/               @P2 BRA `(.L_x_3) ;
        /*0120*/                   EXIT ;
.L_x_4:
        /*0130*/                   BRA `(.L_x_4);
"""


def test_passes_are_the_cheapest_loops() -> None:
    """Code that a branch skips is not counted; a predicated exponential is not a logit, nor is a
    predicated store or the second exponential of a logit that is stored.
    """
    from bench.sass import passes

    assert passes(LOOPS) == (9 / 4, 6 / 4)
    assert passes(LOOPS, 16) == (9 / 4, 6 / 8)
    more = 4 * "MUFU.EX2 R7, R7 ;\n/*0000*/ " + "@P2 STG.E.U8 [R2.64], R4 ;\n/*0000*/ STG"
    assert passes(LOOPS.replace("STG", more)) == (9 / 4, 11 / 4)


@pytest.mark.parametrize(
    ("arch", "interpret", "problem"),
    [
        ("hopper", "0", "--arch hopper: use a number such as 90"),
        ("90", "1", "TRITON_INTERPRET=1: unset it"),
    ],
)
def test_what_cannot_be_compiled_is_rejected(
    arch: str, interpret: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from gac_kernels import inspect

    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(SystemExit):
        inspect.main(["--arch", arch])
    assert problem in capsys.readouterr().err


SHAPES = {
    "chunks of odd rows": [(1, m, 257) for m in (1, 2, 15, 16, 17, 48)],  # 16 x 257 is aligned
    "batches of odd rows": [(b, t, 257) for b, t in ((1, 16), (2, 1), (2, 8), (3, 16), (16, 5))],
    "aligned rows": [(1, m, 256) for m in (1, 2, 15, 16)],
}


def test_one_kernel_serves_every_number_of_rows() -> None:
    """Compare Triton's cache keys. A separate kernel per kind of stride would be compiled during
    training and could not be captured in a CUDA graph.
    """
    kernels = _run(_SPECIALIZE.replace("SHAPES", repr(SHAPES)))
    assert len(kernels) == 30, kernels
    assert set(kernels.values()) == {1}, kernels
