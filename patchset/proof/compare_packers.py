"""Runs the packers of a pristine and of a patched tree on random batches, as far as both take them, and judges both.

    compare_packers.py PRISTINE_UTIL PATCHED_UTIL BATCHES [--loop]

Both `verl/models/mcore/util.py` are loaded from their files, with the patched tree on PYTHONPATH for what they import,
in a process of its own. Right is what the definition in `verl_overlay/tests/models/mcore/thd_reference.py` says.

Prints JSON:
    pristine: how many (batch, rank) cases the pristine packer had right, had wrong in which part, or crashed on.
    broken: every case in which the patched one broke a promise: it differs from the definition, or from the pristine
        packer where that was right.
    left: cases in which least rows alone decide the total and upstream leaves it unaligned. Small edits to upstream's
        loop (`--loop`) leave it so, and may: what they then say has to be what the pristine packer says. A layout has
        no such case.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

REFERENCE = Path(__file__).resolve().parents[2] / "verl_overlay/tests/models/mcore"
_HAS_MODE = "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE"
#: Part of what a packer says -> its value.
Said = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One batch, and the rank that looks at it."""

    lens: list[int]
    tp: int
    cp: int
    rank: int
    fp8: bool
    bucket: int | None
    least: int | None
    cp_layout: str
    dims: tuple[int, ...]


class Packer:
    """A tree's packer, loaded from its `util.py` under a name of its own."""

    def __init__(self, name: str, file: Path) -> None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        self._util = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._util)
        # 0.7.x calls it preprocess_thd_no_padding
        self._pack = getattr(self._util, "preprocess_thd_engine", None) or self._util.preprocess_thd_no_padding
        self.takes = set(inspect.signature(self._pack).parameters)
        self._real = {name: getattr(self._util, name, None) for name in ("PackedSeqParams", _HAS_MODE)}

    def __call__(self, case: Case, batch: torch.Tensor, need_roll: bool = False) -> tuple[torch.Tensor, Any, Any]:
        optional = {"pad_to_length_bucket": case.bucket, "min_local_rows": case.least}
        kwargs: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        fakes = self._real
        if case.cp_layout != "zigzag":
            kwargs["cp_layout"] = case.cp_layout
            # Megatron-Core's class has no partition mode before 0.17
            fakes = {"PackedSeqParams": lambda **fields: SimpleNamespace(**fields), _HAS_MODE: True}
        vars(self._util).update(fakes)
        self._util.mpu.get_tensor_model_parallel_world_size = lambda: case.tp
        self._util.mpu.get_context_parallel_world_size = lambda: case.cp
        self._util.mpu.get_context_parallel_rank = lambda: case.rank
        rows, params, positions = self._pack(batch, use_fp8_padding=case.fp8, need_roll=need_roll, **kwargs)
        return rows, params, positions


def draw_case(draw: random.Random, takes: set[str]) -> Case:
    """A random case of what a packer takes."""
    tp, cp, fp8 = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4, 8]), draw.random() < 0.2
    lens = [draw.choice([1, 2, 5, draw.randint(1, 40), draw.randint(1, 400)]) for _ in range(draw.randint(1, 6))]
    # A bucket that FP8's alignment has little in common with makes blocks of 200,000 rows
    bucket = draw.choice([None, 64, 512] if fp8 else [None, 64, 100, 512])
    least = draw.choice([None, None, draw.randint(1, 16), draw.randint(17, 200), draw.randint(200, 1000)])
    contiguous, rank = draw.random() < 0.3, draw.randrange(cp)
    return Case(
        lens, tp, cp, rank, fp8,
        bucket if "pad_to_length_bucket" in takes else None,
        least if "min_local_rows" in takes else None,
        "contiguous" if contiguous and "cp_layout" in takes else "zigzag",
        (3,) if draw.random() < 0.15 else (),
    )  # fmt: skip


def is_marked(values: torch.Tensor) -> torch.Tensor:
    """A bool mask of values as `nested` makes them, without a pattern that a shift would keep."""
    return values * values % 7 < 3


def seen(packer: Packer, reference: ModuleType, case: Case, rows: list[tuple[int, int]]) -> Said:
    """What a packer says: metadata and all values on real rows; the last row of a sequence has no next token."""
    lens, batch = case.lens, reference.nested(case.lens, case.dims)
    mask = torch.nested.nested_tensor_from_jagged(is_marked(batch.values()), batch.offsets())
    ids, params, positions = packer(case, batch)
    marks, _, _ = packer(case, mask)
    labels, _, rolled = packer(case, batch, need_roll=True)
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
        "mask": (str(marks.dtype), marks[0][real].tolist()),
        "labels": labels[0][inner].tolist(),
        "positions": positions[0][real].tolist(),
        "rolled positions": rolled[0][inner].tolist(),
    }  # fmt: skip


def right(reference: ModuleType, case: Case, bounds: list[int], rows: list[tuple[int, int]]) -> Said:
    """The same, by the definition."""
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    real = [(seq, pos) for seq, pos in rows if pos < case.lens[seq]]
    inner = [(seq, pos) for seq, pos in real if pos < case.lens[seq] - 1]

    def values(at: list[tuple[int, int]]) -> torch.Tensor:
        column = torch.tensor([reference.value(*place) for place in at], dtype=torch.long)
        return column.reshape(-1, *[1] * len(case.dims)).expand(-1, *case.dims)

    shape = [1, len(rows), *case.dims]
    return {
        "metadata": (bounds, bounds, longest, longest, "torch.int32", shape, "torch.int64"),
        "tokens": values(real).tolist(),
        "mask": ("torch.bool", is_marked(values(real)).tolist()),
        "labels": values([(seq, pos + 1) for seq, pos in inner]).tolist(),
        "positions": [pos for _, pos in real],
        "rolled positions": [pos + 1 for _, pos in inner],
    }


def asked(packer: Packer, reference: ModuleType, case: Case, rows: list[tuple[int, int]]) -> Said | str:
    """What a packer says, or its crash in one line."""
    try:
        return seen(packer, reference, case, rows)
    except (RuntimeError, IndexError, ValueError, TypeError, NameError, AttributeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def least_rows_decide(reference: ModuleType, case: Case) -> bool:
    """Whether the least number of rows alone makes a total that is no multiple of what it has to be."""
    if case.least is None or case.bucket is not None:
        return False
    without = reference.layout(case.lens, case.tp, case.cp, case.fp8, cp_layout=case.cp_layout).cu_seqlens[-1]
    wanted = reference.layout(
        case.lens, case.tp, case.cp, case.fp8, min_local_rows=case.least, cp_layout=case.cp_layout
    ).cu_seqlens[-1]  # fmt: skip
    return bool(without < case.cp * case.least != wanted)


def judge(case: Case, wanted: Said, before: Said | str, after: Said | str, excused: bool) -> list[str]:
    """Promises that the patched packer broke in one case."""
    if isinstance(after, str):
        return [] if excused and isinstance(before, str) else [f"{case}: {after}"]
    broken = []
    for part, value in wanted.items():
        was = None if isinstance(before, str) else before[part]
        if after[part] == value:
            continue
        if excused:
            if was not in (None, after[part]):
                broken.append(f"{part} of {case}: neither what the definition says nor what the pristine packer says")
        elif was == value:
            broken.append(f"{part} of {case}: differs from the pristine packer, which had it right")
        else:
            broken.append(f"{part} of {case}: not what the definition says")
    return broken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pristine", type=Path)
    parser.add_argument("patched", type=Path)
    parser.add_argument("batches", type=int)
    parser.add_argument("--loop", action="store_true")
    options = parser.parse_args()
    # verl warns of every batch that it pads, which would hide why a run failed
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.path.insert(0, str(REFERENCE))
    reference = importlib.import_module("thd_reference")
    pristine, patched = Packer("pristine_util", options.pristine), Packer("patched_util", options.patched)

    draw, count, broken, left = random.Random(0), Counter[str](), list[str](), 0
    for _ in range(options.batches):
        case = draw_case(draw, pristine.takes & patched.takes)
        layout = reference.layout(
            case.lens, case.tp, case.cp, case.fp8, case.bucket, min_local_rows=case.least, cp_layout=case.cp_layout
        )
        rows = layout.rows[case.rank]
        wanted = right(reference, case, layout.cu_seqlens, rows)
        before, after = (asked(packer, reference, case, rows) for packer in (pristine, patched))
        excused = options.loop and least_rows_decide(reference, case)
        left += excused
        broken += judge(case, wanted, before, after, excused)
        if isinstance(before, str):
            count["crashed"] += 1
        else:
            # Values on the rows of a wrong total cannot be right; the total alone is counted then
            wrong = [part for part, value in wanted.items() if before[part] != value]
            count.update(["metadata"] if "metadata" in wrong else wrong or ["right"])
    print(json.dumps({"pristine": count, "broken": broken, "left": left}))


if __name__ == "__main__":
    main()
