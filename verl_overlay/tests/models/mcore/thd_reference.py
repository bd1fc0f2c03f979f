# Copyright 2025 Individual Contributor: the verl THD patch-set
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A slow THD layout written from its definition, to hold the packer against, and a way to call any rank's packer.

Megatron-Core and Transformer Engine cut each padded sequence into 2*cp equal chunks; rank r holds chunks r and
2*cp-1-r of every sequence, in order; under a contiguous layout the padded block as a whole is cut into cp equal
intervals. Nothing here is shared with the code under test.
"""

import inspect
import math
from dataclasses import dataclass

import torch

import verl.models.mcore.util as util

# 0.7.x calls it preprocess_thd_no_padding
preprocess_thd = getattr(util, "preprocess_thd_engine", None) or util.preprocess_thd_no_padding
takes_bucket = "pad_to_length_bucket" in inspect.signature(preprocess_thd).parameters


@dataclass(frozen=True)
class Layout:
    """Padded boundaries [B+1] of all sequences, and each rank's rows as (sequence, position in it)."""

    cu_seqlens: list[int]
    rows: list[list[tuple[int, int]]]


def layout(
    lens: list[int],
    tp: int = 1,
    cp: int = 1,
    fp8: bool = False,
    bucket: int | None = None,
    *,
    min_local_rows: int | None = None,
    cp_layout: str = "zigzag",
) -> Layout:
    """Layout of sequences of given real lengths on every rank of a CP group."""
    align = tp * cp * 2 if cp > 1 and cp_layout == "zigzag" else tp * cp
    multiples = [align]
    if fp8:
        # Per sequence a multiple of 16 as well, in total one of 128 alignments
        multiples, align = [align * 128], next(n for n in range(align, 16 * align + 1, align) if n % 16 == 0)
    padded = [math.ceil(length / align) * align for length in lens]
    multiples += [align, bucket or 1]
    total = sum(padded)
    while any(total % multiple for multiple in multiples) or total < cp * (min_local_rows or 0):
        total += align
    padded[-1] += total - sum(padded)

    if cp_layout == "contiguous":
        block = [(seq, pos) for seq, length in enumerate(padded) for pos in range(length)]
        rows = [block[rank * total // cp : (rank + 1) * total // cp] for rank in range(cp)]
        return Layout([sum(padded[:n]) for n in range(len(padded) + 1)], rows)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(cp)]
    for seq, length in enumerate(padded):
        chunk = length // (2 * cp)
        for rank in range(cp):
            if cp == 1:
                rows[rank] += [(seq, pos) for pos in range(length)]
                continue
            for first in (rank * chunk, (2 * cp - 1 - rank) * chunk):
                rows[rank] += [(seq, pos) for pos in range(first, first + chunk)]
    return Layout([sum(padded[:n]) for n in range(len(padded) + 1)], rows)


def nested(lens: list[int], dims: tuple[int, ...] = (), dtype: torch.dtype = torch.long) -> torch.Tensor:
    """A jagged batch in which token `pos` of sequence `seq` has the value 100_000 * (seq + 1) + pos + 1."""
    rows = [100_000 * (seq + 1) + 1 + torch.arange(length) for seq, length in enumerate(lens)]
    rows = [row.reshape(-1, *[1] * len(dims)).expand(-1, *dims).to(dtype).contiguous() for row in rows]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def value(seq: int, pos: int) -> int:
    """Value of a token of `nested`."""
    return 100_000 * (seq + 1) + pos + 1


def assert_holds(actual: torch.Tensor, expected: list) -> None:
    """Like `assert actual.tolist() == expected`, which pytest explains by a diff that takes minutes for long lists."""
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=0)


def pack(monkeypatch, batch: torch.Tensor, rank: int = 0, tp: int = 1, cp: int = 1, **kwargs):
    """Calls the packer as rank `rank` of a cp-sized group would; returns (rows, packed_seq_params, positions)."""
    monkeypatch.setattr(util.mpu, "get_tensor_model_parallel_world_size", lambda: tp)
    monkeypatch.setattr(util.mpu, "get_context_parallel_world_size", lambda: cp)
    monkeypatch.setattr(util.mpu, "get_context_parallel_rank", lambda: rank)
    packed, params, positions = preprocess_thd(batch, **kwargs)
    return packed[0], params, positions[0]
