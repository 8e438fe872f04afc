"""Synchronization in the CUDA row kernels: cluster order is irrelevant, errors are detected.

The kernels run on emulated threads; a broken one is the same source with one statement changed.
"""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gac_kernels.backends import cuda
from gac_kernels.contract import LossSpec
from tests.kernels import cuda_emulation as emulation

VOCAB = 12011  # odd, so that neighboring rows share a 16-byte word; two tiles per slice
SPLIT = 2, 2  # two blocks per row, and full ring buffers


def in_place(logits: Tensor) -> list[Tensor]:
    """Gradient and per-token terms of a loss that overwrites a copy of the logits."""
    storage = torch.zeros(logits.numel() + 64, dtype=logits.dtype)  # padding after the last row
    buffer = storage[: logits.numel()].view(logits.shape).copy_(logits)
    torch.manual_seed(1)
    tokens = emulation.batch(logits[..., :4000], LossSpec())  # targets in the first tile of a row
    return [buffer, *cuda.row_loss(buffer, tokens, LossSpec(), buffer)]


@pytest.mark.parametrize(("launched", "resident"), [(1, 1), (5, 2), (6, 6), (10, 3)])
def test_results_do_not_depend_on_cluster_count_or_order(
    kernels: ctypes.CDLL, split_rows, launched: int, resident: int
) -> None:
    """Results are bitwise identical, even if neighboring rows are written concurrently."""
    split_rows(*SPLIT)
    logits = torch.randn(2, 4, VOCAB).bfloat16()
    expected = in_place(logits)
    emulation.set_clusters(kernels, launched, resident)
    for seed in range(3):
        kernels.gac_emulate_seed(seed)
        assert all(map(torch.equal, in_place(logits), expected))


BROKEN = {
    "all of an edge word is read and written back": (
        "gradient.h",
        "if (valid(e)) row[first + e] = from_float<Out>(g[e]);",
        "{ const Out old = row[first + e]; for (int i = 0; i < 50; ++i) emulator().yield();"
        " row[first + e] = valid(e) ? from_float<Out>(g[e]) : old; }",
    ),
    "the source of a copy is overwritten when the copy is issued, not when it completes": (
        "rows.h",
        "words * kWordBytes, shared.full[at.slot]);",
        "words * kWordBytes, shared.full[at.slot]); if (first > s.begin && words > 9)"
        " std::memset(const_cast<char*>(s.base) + int64_t(first) * kWordBytes, 0, 128);",
    ),
    "no wait for the sums of other blocks": (
        "rows.h",
        "wait<true>(shared.exchange[parity], phase);",
        "(void)phase;",
    ),
    "the target is read after another block may have overwritten it": (
        "rows.h",
        "const Sums sums = collect(shared, round % 2, round / 2 % 2, a.exp2_scale);",
        "Sums sums = collect(shared, round % 2, round / 2 % 2, a.exp2_scale);"
        " sums.target = target_logit<In>(a, s, y);",
    ),
    "a tile is released after the first pass": ("rows.h", "if (!kHeld) release", "release"),
}


@pytest.mark.full(reason="compiles the kernels five times, to test the emulation")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_synchronization_is_detected(
    split_rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    file, correct, wrong = BROKEN[name]
    shutil.copytree(emulation.SOURCES, tmp_path / "csrc")
    source = tmp_path / "csrc" / "cuda" / file
    assert source.read_text().count(correct) == 1, f"{file} has changed: update this mutation"
    source.write_text(source.read_text().replace(correct, wrong))
    broken = emulation.load(emulation.build(source.parent, tmp_path / "broken.so", "-O0"))
    logits = torch.randn(2, 4, VOCAB).bfloat16()
    split_rows(*SPLIT)
    expected = in_place(logits)
    monkeypatch.setattr(cuda, "library", lambda: broken)
    emulation.set_clusters(broken, launched=4, resident=4)
    assert any(differs_or_deadlocks(broken, seed, logits, expected) for seed in range(6))


def differs_or_deadlocks(
    library: ctypes.CDLL, seed: int, logits: Tensor, expected: list[Tensor]
) -> bool:
    library.gac_emulate_seed(seed)
    try:
        return not all(map(torch.equal, in_place(logits), expected))
    except RuntimeError as error:
        assert "deadlock" in str(error) or "barrier" in str(error)
        return True


def launched_clusters(
    rows: int, resident: int, vocab: int = 152064, blocks: int = 4, dtype: int = 1
) -> int:
    arguments = cuda.Arguments(rows=rows, vocab=vocab, cluster=blocks, dtype=dtype)
    return emulation.library().gac_cuda_clusters(ctypes.byref(arguments), ctypes.c_int64(resident))


def test_waiting_clusters_finish_at_most_one_turn_late() -> None:
    """Simulate a launch, with time in rows: the hardware starts the next cluster when one exits."""
    resident = 66
    for rows in (1, 50, 500, 2048, 8192, 32768):
        count = launched_clusters(rows, resident)
        assert count <= rows
        assert count >= resident or count == rows
        rows_per_cluster = [len(range(i, rows, count)) for i in range(count)]
        turn = max(rows_per_cluster)
        for running in (resident, 60, 40):  # number of clusters that can run at once
            ends = [0] * running
            for cluster_rows in rows_per_cluster:
                ends[ends.index(min(ends))] += cluster_rows
            assert max(ends) <= rows / running + turn
    assert launched_clusters(2048, resident) == 4 * resident  # 8 rows per cluster
    assert launched_clusters(32768, resident) == 8 * resident


def test_a_turn_has_at_least_64_tiles_per_block() -> None:
    """Rows per resident cluster x tiles per block of a row, at both limits of two and eight.

    So a cluster's start-up time is negligible compared with its rows, also if they are short.
    """
    assert launched_clusters(2048, 264, vocab=1000, blocks=1) == 264
    assert launched_clusters(2048, 264, vocab=32000, blocks=1) == 264
    for tiles in (16, 3):
        vocab = (tiles - 1) * 512 * 8 * 4 + 8 * 4  # one word in the last tile
        for turns in (2, 8):
            rows = 66 * -(-turns * 64 // tiles)
            assert launched_clusters(rows - 1, 66, vocab) == 66 * (turns - 1)
            assert launched_clusters(rows, 66, vocab) == 66 * turns
            assert launched_clusters(rows, 66, vocab // 2, dtype=0) == 66 * turns
    assert launched_clusters(100 * rows, 66, vocab) == 66 * 8
