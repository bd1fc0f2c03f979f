"""Where a token lies under THD with context parallelism, from the definition, without the tree under test."""

from __future__ import annotations

from itertools import pairwise

import torch


def rows(cu_seqlens: list[int], cp_size: int, cp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and position in it of every row of a rank, int64 [R] each.

    Megatron-Core and Transformer Engine cut every padded sequence into 2*cp equal chunks; rank r holds chunks r and
    2*cp-1-r of each, in the order of the sequences.

    Args:
        cu_seqlens: starts of the padded sequences among the rows of all ranks, and their total.
        cp_size, cp_rank: of the context-parallel group.

    Raises:
        ValueError: a padded sequence cannot be cut.
    """
    sequences, positions = [], []
    for number, (start, end) in enumerate(pairwise(cu_seqlens)):
        length = end - start
        chunks = 1 if cp_size == 1 else 2 * cp_size
        if length % chunks:
            raise ValueError(f"padded sequence {number} of {length} rows does not cut into {chunks} chunks")
        size = length // chunks
        firsts = [0] if cp_size == 1 else [cp_rank * size, (2 * cp_size - 1 - cp_rank) * size]
        own = torch.cat([torch.arange(first, first + size) for first in firsts])
        sequences.append(torch.full_like(own, number))
        positions.append(own)
    return torch.cat(sequences), torch.cat(positions)


def holder(cu_seqlens: list[int], cp_size: int, sequence: int, position: int) -> tuple[int, int]:
    """CP rank that holds a token, and its row there.

    Raises:
        ValueError: no rank holds it.
    """
    for rank in range(cp_size):
        sequences, positions = rows(cu_seqlens, cp_size, rank)
        found = ((sequences == sequence) & (positions == position)).nonzero()
        if len(found):
            return rank, int(found[0])
    raise ValueError(f"no rank holds position {position} of sequence {sequence}")
