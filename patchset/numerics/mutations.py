"""Faults put into a tree on purpose: a comparison that sees none of them would prove nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from verl.models.mcore import mtp_patch

from . import attention, upstream
from .comparison import Case, Difference

#: What a packer returns: rows [1, R, ...], packed parameters, positions [1, R]; either may be None.
Packed = tuple[Any, Any, Any]


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _packer(mutant: Callable[..., Packed]) -> Iterator[None]:
    """Puts `mutant(packer, *arguments, **named)` in the place of every name that the packer is called by."""
    with contextlib.ExitStack() as stack:
        for module in upstream.CALLERS:
            packer = getattr(module, upstream.PACKER)

            def call(*arguments: Any, packer: Any = packer, **named: Any) -> Packed:
                return mutant(packer, *arguments, **named)

            stack.enter_context(_set(module, upstream.PACKER, call))
        yield


def wrong_rank() -> Any:
    """Every rank packs what belongs to the next one."""

    def mutant(packer: Any, *arguments: Any, **named: Any) -> Packed:
        rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        with _set(mpu, "get_context_parallel_rank", lambda: (rank + 1) % size):
            return packer(*arguments, **named)

    return _packer(mutant)


def _by_sequence(rows: torch.Tensor, packed: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Changes the rows [1, R, ...] of every sequence on this rank."""
    size = mpu.get_context_parallel_world_size()
    bounds = [bound // size for bound in packed.cu_seqlens_q_padded.tolist()]
    return torch.cat([change(rows[:, start:end]) for start, end in pairwise(bounds)], 1)


def wrong_order() -> Any:
    """The two chunks of every sequence change places."""

    def swapped(rows: torch.Tensor) -> torch.Tensor:
        first, second = rows.chunk(2, 1)
        return torch.cat([second, first], 1)

    def mutant(packer: Any, *arguments: Any, **named: Any) -> Packed:
        rows, packed, positions = packer(*arguments, **named)
        rows = _by_sequence(rows, packed, swapped)
        return rows, packed, None if positions is None else _by_sequence(positions, packed, swapped)

    return _packer(mutant)


def no_bounds() -> Any:
    """Attention is told of one sequence where there are several."""
    forward = attention.ReferenceAttention.forward

    def mutant(self: Any, *arguments: Any, **named: Any) -> Any:
        told = copy.copy(named["packed_seq_params"])
        if told is not None:
            told.cu_seqlens_q_padded = told.cu_seqlens_q_padded[[0, -1]]
        return forward(self, *arguments, **named | {"packed_seq_params": told})

    return _set(attention.ReferenceAttention, "forward", mutant)


def old_positions() -> Any:
    """Positions of the second chunk are counted back from the padded end, as verl 0.7.1 does."""

    def mutant(packer: Any, ids: Any, *arguments: Any, **named: Any) -> Packed:
        rows, packed, positions = packer(ids, *arguments, **named)
        size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        if positions is None or named.get("need_roll") or size == 1:
            return rows, packed, positions
        positions = positions.clone()
        lengths = ids.offsets().diff().tolist()
        for (start, end), length in zip(pairwise(packed.cu_seqlens_q_padded.tolist()), lengths, strict=True):
            chunk = (end - start) // (2 * size)
            real = max(0, min(length, end - start - chunk * rank) - (end - start - chunk * (rank + 1)))
            second = start // size + chunk
            positions[0, second : second + real] = torch.arange(end - start - real, end - start)
        return rows, packed, positions

    return _packer(mutant)


def bucket_forgotten() -> Any:
    """One call, that of the labels, does not pass the bucket on."""

    def mutant(packer: Any, *arguments: Any, **named: Any) -> Packed:
        if named.get("need_roll"):
            named.pop("pad_to_length_bucket", None)
        return packer(*arguments, **named)

    return _packer(mutant)


def labels_rolled_in_shard() -> Any:
    """Every rank rolls the labels of its own rows, chunk ends and all."""

    def mutant(packer: Any, *arguments: Any, **named: Any) -> Packed:
        if not named.pop("need_roll", False):
            return packer(*arguments, **named)
        rows, packed, positions = packer(*arguments, **named)
        return _by_sequence(rows, packed, lambda part: part.roll(-1, 1)), packed, positions

    return _packer(mutant)


def no_key_gradients() -> Any:
    """Gradients of keys and values stay on the rank that used them."""

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size, rank = torch.distributed.get_world_size(ctx.group), torch.distributed.get_rank(ctx.group)
        return gradient.chunk(size)[rank], None

    return _set(attention.GatherRows, "backward", staticmethod(backward))


def tokens_of_one_rank() -> Any:
    """Every CP rank divides its part of the MTP loss by its own tokens."""
    return _set(mtp_patch, "tokens_per_cp_rank", lambda count, group: count.float().clamp(min=1))


MUTATIONS: dict[str, Callable[[], Any]] = {
    "wrong CP rank": wrong_rank,
    "wrong zigzag order": wrong_order,
    "sequence bounds ignored": no_bounds,
    "positions of verl 0.7.1": old_positions,
    "bucket dropped from one call": bucket_forgotten,
    "labels rolled inside the shard": labels_rolled_in_shard,
    "K/V gradients not summed": no_key_gradients,
    "MTP tokens of one rank": tokens_of_one_rank,
}


def names() -> list[str]:
    """Mutations that this tree can have."""
    return [name for name in MUTATIONS if name != "MTP tokens of one rank" or hasattr(mtp_patch, "tokens_per_cp_rank")]


def run(case: Case, name: str) -> list[Difference]:
    """A case, with a fault in the tree."""
    with MUTATIONS[name]():
        return case.run(case)
