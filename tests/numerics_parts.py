"""Parts of the numerics bench that fork; run by test_numerics in a process of its own. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from patchset.numerics import attention, layout
from patchset.numerics.processes import Group, GroupFailed

#: Padded boundaries of three sequences, and the sizes of queries and keys.
CU_SEQLENS, HEADS, KEY_HEADS, DIM = [0, 8, 12, 24], 4, 2, 3


def whole() -> dict[str, torch.Tensor]:
    """Attention a sequence at a time and a row at a time, in float64, with gradients."""
    draw = torch.Generator().manual_seed(0)
    total = CU_SEQLENS[-1]
    q, k, v = (
        torch.randn(total, heads, DIM, generator=draw, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    out = torch.zeros(total, HEADS, DIM, dtype=torch.float64)
    for start, end in pairwise(CU_SEQLENS):
        for row in range(start, end):
            for head in range(HEADS):
                shared = head // (HEADS // KEY_HEADS)
                weights = torch.softmax(k[start : row + 1, shared] @ q[row, head] / DIM**0.5, 0)
                out[row, head] = weights @ v[start : row + 1, shared]
    weight = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    (out * weight).sum().backward()
    return {"q": q, "k": k, "v": v, "out": out.flatten(1), "weight": weight.flatten(1)}


def sharded(right: dict[str, Any]) -> float:
    """Largest difference on this rank, of outputs and of gradients."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    sequence, position = layout.rows(CU_SEQLENS, size, rank)
    own = torch.tensor(CU_SEQLENS)[sequence] + position
    q, k, v = (right[name].detach()[own].clone().requires_grad_() for name in "qkv")
    module = SimpleNamespace(scale=None, cp_group=group)
    module._attend = lambda *tensors: attention.ReferenceAttention._attend(module, *tensors)
    packed = SimpleNamespace(cp_group=None, cu_seqlens_q=None, cu_seqlens_q_padded=torch.tensor(CU_SEQLENS))
    out = attention.ReferenceAttention.forward(module, q, k, v, packed_seq_params=packed)
    (out * right["weight"][own]).sum().backward()
    pairs = [
        (out, right["out"][own]),
        *((x.grad, right[name].grad[own]) for name, x in zip("qkv", (q, k, v), strict=True)),
    ]
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


_right = whole()


def attend() -> float:
    return sharded(_right)


def fail_on_the_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this one")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def sleep_too_long() -> None:
    time.sleep(60)


def failure(world: int, function: Any, limit: float) -> dict[str, Any]:
    group, started = Group(world, limit), time.perf_counter()
    try:
        group.run(function)
    except GroupFailed as error:
        return {"message": str(error), "details": error.details, "seconds": time.perf_counter() - started}
    return {"message": "returned"}


def main() -> None:
    if sys.argv[1] == "attention":
        found = []
        for world in (1, 2):
            group = Group(world, limit=60)
            found.append(group.run(attend))
            group.close()
        print(json.dumps(found))
    else:
        told = {
            "raised": failure(2, fail_on_the_last, 30),
            "died": failure(2, die, 30),
            "hung": failure(1, sleep_too_long, 2),
        }
        print(json.dumps(told))


if __name__ == "__main__":
    main()
