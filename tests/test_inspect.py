"""Every shipped kernel compiles for a GPU that is not here, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

_CODE = """
import json
from gac_kernels import inspect
architectures = [80, 90, 100]
reports = []
configurations = (*inspect.triton_configurations(), *inspect.batch_configurations())
for i, configuration in enumerate(configurations):
    reports.append(inspect.compile_triton(configuration, architectures[i % 3])._asdict())
print(json.dumps(reports))
"""

ROW_KERNELS = {"stats_kernel", "grads_kernel", "loss_kernel", "scale_kernel"}


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Compiling needs a process in which Triton does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment
    )


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """Each configuration on one of the three architectures, in turn: all of them take minutes."""
    done = _run("-c", _CODE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_shipped_kernel_spills(reports: list[dict[str, Any]]) -> None:
    assert {r["arch"] for r in reports} == {"sm_80", "sm_90", "sm_100"}
    assert {r["kernel"] for r in reports} == {
        *ROW_KERNELS, "lengths_kernel", "tokens_kernel", "sequence_kernel", "merge_kernel",
    }  # fmt: skip
    for report in reports:
        assert report["spill_stores"] == report["spill_loads"] == report["stack"] == 0, report
        assert 0 < report["registers"] <= 128 and report["instructions"] > 100, report


@pytest.mark.slow
def test_aligned_rows_move_in_16_byte_accesses(reports: list[dict[str, Any]]) -> None:
    for report in (r for r in reports if r["kernel"] in ROW_KERNELS):
        aligned = "50257" not in report["config"]
        assert (report["wide_accesses"] > 0) == aligned, report


@pytest.mark.slow
def test_two_programs_share_a_multiprocessor(reports: list[dict[str, Any]]) -> None:
    """The shared memory of the tiles in flight fits twice into that of sm_80, 163 KiB."""
    for report in reports:
        assert 2 * (report["shared"] + 1024) <= 163 * 1024, report


@pytest.mark.slow
def test_instructions_per_logit_are_counted(reports: list[dict[str, Any]]) -> None:
    """At least the arithmetic of a logit: 6 for its sums, 4 for its gradient."""
    for report in reports:
        reads = report["kernel"] in {"stats_kernel", "loss_kernel"}
        writes = report["kernel"] == "grads_kernel" or (
            report["kernel"] == "loss_kernel" and "no gradient" not in report["config"]
        )
        assert (6 < report["sums"] < 25) == reads, report
        assert (4 < report["gradient"] < 25) == writes, report


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
    """What a branch skips is not counted; an exponential that a predicate guards is no logit."""
    from gac_kernels.inspect_sass import passes

    assert passes(LOOPS) == (9 / 4, 6 / 4)


def test_interpreted_kernels_are_refused() -> None:
    done = _run("-m", "gac_kernels.inspect", "--arch", "90", TRITON_INTERPRET="1")
    assert done.returncode != 0 and "TRITON_INTERPRET" in done.stderr
