"""Runs the packers of a pristine and of a patched tree on random batches, bucketed where both can, and judges both.

    compare_packers.py PATCHED_TREE BATCHES

Runs with the pristine tree on PYTHONPATH, in a process of its own, since two verl packages cannot be imported in one.
Prints JSON: how many (batch, rank) cases the pristine packer had right, had wrong in which part, or crashed on, and
every case in which the patched one broke a promise. Right is what the definition in `thd_reference` says.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

patched_root = Path(sys.argv[1])
sys.path.insert(0, str(patched_root / "tests/models/mcore"))

import thd_reference  # noqa: E402

import verl.models.mcore.util as pristine_util  # noqa: E402


def load_patched() -> ModuleType:
    spec = importlib.util.spec_from_file_location("patched_util", patched_root / "verl/models/mcore/util.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packer(util: ModuleType) -> Any:
    return getattr(util, "preprocess_thd_engine", None) or util.preprocess_thd_no_padding


def seen(
    util: ModuleType,
    lens: list[int],
    tp: int,
    cp: int,
    rank: int,
    fp8: bool,
    bucket: int | None,
    rows: list[tuple[int, int]],
) -> Any:
    """What a packer says: metadata and all values on real rows; the last row of a sequence has no next token."""
    util.mpu.get_tensor_model_parallel_world_size = lambda: tp
    util.mpu.get_context_parallel_world_size = lambda: cp
    util.mpu.get_context_parallel_rank = lambda: rank
    batch = thd_reference.nested(lens)
    kwargs = {"use_fp8_padding": fp8, **({"pad_to_length_bucket": bucket} if bucket else {})}
    ids, params, positions = packer(util)(batch, **kwargs)
    labels, _, rolled = packer(util)(batch, need_roll=True, **kwargs)
    real = [row for row, (seq, pos) in enumerate(rows) if pos < lens[seq]]
    inner = [row for row, (seq, pos) in enumerate(rows) if pos < lens[seq] - 1]
    if ids.shape[1] != len(rows):
        real = inner = []
    return {
        "metadata": (
            params.cu_seqlens_q_padded.tolist(), params.cu_seqlens_kv.tolist(), int(params.max_seqlen_q),
            int(params.max_seqlen_kv), str(params.cu_seqlens_q.dtype), list(ids.shape), str(ids.dtype),
        ),
        "tokens": ids[0][real].tolist(),
        "labels": labels[0][inner].tolist(),
        "positions": positions[0][real].tolist(),
        "rolled positions": rolled[0][inner].tolist() if cp > 1 else [],
    }  # fmt: skip


def right(lens: list[int], cp: int, rank: int, bounds: list[int], rows: list[tuple[int, int]]) -> Any:
    """The same, by the definition."""
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    real = [(seq, pos) for seq, pos in rows if pos < lens[seq]]
    inner = [(seq, pos) for seq, pos in real if pos < lens[seq] - 1]
    return {
        "metadata": (bounds, bounds, longest, longest, "torch.int32", [1, len(rows)], "torch.int64"),
        "tokens": [thd_reference.value(*at) for at in real],
        "labels": [thd_reference.value(seq, pos + 1) for seq, pos in inner],
        "positions": [pos for _, pos in real],
        "rolled positions": [pos + 1 for _, pos in inner] if cp > 1 else [],
    }


def main() -> None:
    torch.set_num_threads(1)
    patched_util, draw = load_patched(), random.Random(0)
    bucketed = "pad_to_length_bucket" in inspect.signature(packer(pristine_util)).parameters
    count, broken = Counter[str](), []
    for _ in range(int(sys.argv[2])):
        tp, cp, fp8 = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4, 8]), draw.random() < 0.2
        lens = [draw.choice([1, 2, 5, draw.randint(1, 40), draw.randint(1, 400)]) for _ in range(draw.randint(1, 6))]
        bucket = draw.choice([None, 64, 100, 512]) if bucketed and not fp8 else None
        rank = draw.randrange(cp)
        layout = thd_reference.layout(lens, tp, cp, fp8, bucket)
        wanted = right(lens, cp, rank, layout.cu_seqlens, layout.rows[rank])
        case = (lens, tp, cp, rank, fp8, bucket, layout.rows[rank])
        try:
            before = seen(pristine_util, *case)
        except (RuntimeError, IndexError):
            before = None
        after = seen(patched_util, *case)
        for part, value in wanted.items():
            if after[part] != value:
                broken.append(f"{part} of {case[:6]}: not what the definition says")
            if before is not None and before[part] == value and before[part] != after[part]:
                broken.append(f"{part} of {case[:6]}: differs from the pristine packer, which had it right")
        if before is None:
            count["crashed"] += 1
        else:
            # Values on the rows of a wrong total cannot be right; the total alone is counted then
            wrong = [part for part, value in wanted.items() if before[part] != value]
            count.update(["metadata"] if "metadata" in wrong else wrong or ["right"])
    print(json.dumps({"pristine": count, "broken": broken}))


main()
