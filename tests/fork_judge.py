"""Judges forks of one pin: a patched fork does what the fork does, wherever the patched pin does what the pin does.

    fork_judge.py PRISTINE_UTIL PATCHED_UTIL      with the patched tree on PYTHONPATH

Reads a line `FORK_UTIL PATCHED_FORK_UTIL` at a time, and answers each with a JSON list of disagreements.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from patchset.proof import compare_packers
from patchset.proof.compare_packers import Case, Packer, draw_case

sys.path.insert(0, str(compare_packers.REFERENCE))
import thd_reference as reference

CASES = 12

#: What the series repairs wherever a fork's rows take the repaired way; compared where the fork is as the pin is.
REPAIRED = {"labels", "rolled positions"}


def gather(outputs: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
    """What the ranks of a group would send, told apart by a constant."""
    for rank, output in enumerate(outputs):
        output.copy_(own + 1_000_000 * rank)


def said(packer: Packer, case: Case) -> Any:
    """All that a packer and its unpacker say of a case, or the kind of crash."""
    layout = reference.layout(
        case.lens, case.tp, case.cp, case.fp8, case.bucket, min_local_rows=case.least, cp_layout=case.cp_layout
    )
    try:
        parts = compare_packers.seen(packer, reference, case, layout.rows[case.rank])
        batch = reference.nested(case.lens, case.dims)
        rows, params, _ = packer(case, batch)
        util = packer._util
        unpack = getattr(util, "postprocess_thd_engine", None) or util.postprocess_thd_no_padding
        named = {"cp_layout": case.cp_layout} if case.cp_layout != "zigzag" else {}
        back = unpack(rows.double(), params, batch, len(case.lens), **named)
        return {**parts, "unpacked": [sequence.tolist() for sequence in back.unbind()]}
    except Exception as error:  # whatever a broken fork does
        return f"crash: {type(error).__name__}"


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.all_gather = gather
    # What a fork leaves unwritten is the same in both
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    pristine, patched = Packer("pristine", Path(sys.argv[1])), Packer("patched", Path(sys.argv[2]))
    for packer in (pristine, patched):
        packer._util.mpu.get_context_parallel_group = lambda: "group"
    draw, cases = random.Random(1), []
    while len(cases) < CASES:
        case = draw_case(draw, pristine.takes & patched.takes)
        if sum(case.lens) < 600:
            cases.append((case, said(pristine, case), said(patched, case)))
    for line in sys.stdin:
        fork, patched_fork = (
            Packer(name, Path(file)) for name, file in zip(("fork", "patched_fork"), line.split(), strict=True)
        )
        wrong = []
        for case, base, patched_base in cases:
            if isinstance(base, str) or isinstance(patched_base, str):
                continue
            ours, theirs = said(fork, case), said(patched_fork, case)
            if isinstance(ours, str):  # nothing to keep
                continue
            if isinstance(theirs, str):
                wrong.append(f"{case}: {theirs} after, none before")
                continue
            same = [
                part
                for part in base
                if base[part] == patched_base[part] and (part not in REPAIRED or ours[part] == base[part])
            ]
            wrong += [f"{part} of {case}" for part in same if ours[part] != theirs[part]]
        print(json.dumps(wrong), flush=True)


main()
