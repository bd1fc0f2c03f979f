"""What a comparison is, and how two results are held against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from .layout import holder

#: In float32, for log-probs, values, entropies and losses; and for gradients, relative to the gradient.
LIMIT, GRADIENT_LIMIT = 1e-5, 1e-5

#: In float64: verl takes log-probs in float32 even then.
DOUBLE_LIMIT, DOUBLE_GRADIENT_LIMIT = 1e-6, 1e-7


@dataclass(frozen=True)
class Topology:
    """Sizes of the context- and tensor-parallel groups, and whether sequence parallelism is on."""

    cp: int
    tp: int = 1
    sp: bool = False

    @property
    def world(self) -> int:
        return self.cp * self.tp

    def __str__(self) -> str:
        return f"cp{self.cp} tp{self.tp}" + (" sp" if self.sp else "")


@dataclass(frozen=True)
class Case:
    """One comparison: what runs, on which ranks, with which bucket.

    Args:
        family: of comparisons, for instance "forward".
        model: which model or engine.
        world: number of processes.
        topology: for the table; a Topology, or the words for what is none.
        bucket: None for none.
        run: called in every process with this case; returns its differences.
        options: whatever else `run` reads.
    """

    family: str
    model: str
    world: int
    topology: Topology | str
    bucket: int | None
    run: Callable[[Case], list[Difference]]
    options: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.family} {self.model}, {self.topology}, bucket {self.bucket or 'none'}"


@dataclass(frozen=True)
class Difference:
    """Largest difference of one quantity, what it may be, and where it first goes past that."""

    quantity: str
    value: float
    limit: float
    where: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def enter(topology: Topology) -> None:
    """Makes this process a rank of a topology, unless it is one already."""
    sizes = {
        "tensor_model_parallel_size": topology.tp,
        "context_parallel_size": topology.cp,
        "expert_tensor_parallel_size": 1,
    }
    if not mpu.is_initialized():
        mpu.initialize_model_parallel(**sizes)
    made = Topology(mpu.get_context_parallel_world_size(), mpu.get_tensor_model_parallel_world_size(), topology.sp)
    if made != topology:
        raise RuntimeError(f"this process is of {made}, not of {topology}")


def compare_tokens(
    quantity: str, got: list[torch.Tensor], want: list[torch.Tensor], limit: float, cu_seqlens: list[int] | None = None
) -> Difference:
    """Holds per-token values against the right ones, in absolute terms.

    Args:
        quantity: for the table.
        got, want: one tensor [length] a sequence.
        limit: largest difference allowed.
        cu_seqlens: padded boundaries of what was packed, to tell which rank held a token.
    """
    worst, where = 0.0, ""
    for sequence, (ours, right) in enumerate(zip(got, want, strict=True)):
        if ours.shape != right.shape:
            return Difference(quantity, math.inf, limit, f"sequence {sequence}: {tuple(ours.shape)} values")
        apart = (ours.detach().cpu().double() - right.double()).abs().nan_to_num(nan=math.inf)
        worst = max(worst, apart.max().item())
        if not where and (apart > limit).any():
            position = int((apart > limit).nonzero()[0])
            values = f"{ours[position]:.6g} for {right[position]:.6g}"
            where = (
                f"{quantity}, sequence {sequence}, position {position}{_held(cu_seqlens, sequence, position)}: {values}"
            )
    return Difference(quantity, worst, limit, where)


def _held(cu_seqlens: list[int] | None, sequence: int, position: int) -> str:
    if cu_seqlens is None:
        return ""
    cp_size = mpu.get_context_parallel_world_size()
    rank, row = holder(cu_seqlens, cp_size, sequence, position)
    return f" (row {row} of CP rank {rank})"


def compare_weights(
    quantity: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float
) -> Difference:
    """Holds tensors of the same names against each other: each difference's norm, relative to the right one's.

    A tensor whose norm is below a hundredth of the largest is held against that hundredth: the rest is rounding noise.
    """
    if got.keys() != want.keys():
        return Difference(quantity, math.inf, limit, f"{quantity} of {', '.join(sorted(got.keys() ^ want.keys()))}")
    least = max(tensor.double().norm().item() for tensor in want.values()) / 100
    worst, where = 0.0, ""
    for name, right in want.items():
        apart = got[name].cpu().double() - right.double()
        relative = (apart.norm() / right.double().norm().clamp(min=least)).nan_to_num(nan=math.inf).item()
        worst = max(worst, relative)
        if relative > limit and not where:
            rows = apart.reshape(apart.shape[0], -1).abs().nan_to_num(nan=math.inf).amax(1)
            row = int((rows >= rows.max() / 2).nonzero()[0])
            where = f"{quantity} of {name}, row {row}: off by {relative:.2g} of its norm"
    return Difference(quantity, worst, limit, where)


def compare_number(quantity: str, got: float, want: float, limit: float) -> Difference:
    """Holds one number against the right one, relative to it."""
    apart = abs(got - want) / max(abs(want), 1e-30)
    apart = math.inf if math.isnan(apart) else apart
    return Difference(quantity, apart, limit, "" if apart <= limit else f"{quantity}: {got:.8g} for {want:.8g}")
