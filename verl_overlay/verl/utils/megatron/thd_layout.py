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
"""Where each token of a micro-batch lies in the packed (THD) rows of its context-parallel ranks.

A layout is made once for a micro-batch and used for every tensor of it: ids, labels, masks, temperatures, teacher
tensors, routes. It knows no process group; rank and sizes are plain arguments, so that one process can look at every
rank of every topology.

Source of the layout: the THD partition of Megatron-Core and Transformer Engine. Each sequence is padded to a multiple
of its alignment. Under ``zigzag`` it is cut into 2*cp equal chunks, of which rank r holds chunks r and 2*cp-1-r, which
balances causal attention; under ``contiguous`` the padded block as a whole is cut into cp equal intervals. The last
sequence takes what the total needs: FP8's alignment, a least number of rows, a bucket.

Dimensions: T tokens of B sequences, R rows of a rank, * any trailing dimensions. Indices are int32, as cu_seqlens are:
a micro-batch has less than 2**31 rows, and half the bytes are half the time.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nested._internal.nested_tensor import NestedTensor

__all__ = ["THDLayout", "jagged_offsets", "thd_layout", "thd_layout_of_padded"]

_LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True, eq=False, repr=False)
class THDLayout:
    """Layout of one micro-batch on one rank; made by :func:`thd_layout`.

    A rank's rows are a run of chunks: two of every sequence under zigzag CP, one otherwise. Whatever differs between
    chunks stands in small tables [C], and a row finds it by the number of its chunk.

    Args:
        cu_seqlens_padded: starts of the padded sequences among the rows of all ranks, and their total; int32 [B+1].
        max_seqlen: longest padded sequence, in rows of all ranks.
        local_rows: R.
        least_rows: rows of all ranks up to the last real token; what lies behind it is padding.
        tokens: T.
        starts, lengths, padded: first token, real and padded length of every sequence; int32 [B].
        chunk: chunk of every row of this rank; int32 [R].
        shift: position of a row in its padded sequence less the row's number, by chunk; int32 [C].
    """

    cu_seqlens_padded: torch.Tensor
    max_seqlen: int
    local_rows: int
    least_rows: int
    tokens: int
    cp_size: int
    cp_layout: str
    starts: torch.Tensor
    lengths: torch.Tensor
    padded: torch.Tensor
    chunk: torch.Tensor
    shift: torch.Tensor

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's rows, [T, *] -> [R, *], in the dtype of the values; padding rows are zero.

        Raises:
            ValueError: the values are not T long.
        """
        return self._take(values, self._source, self._padding)

    def pack_next(self, values: torch.Tensor) -> torch.Tensor:
        """The next token of each of this rank's rows, [T, *] -> [R, *]: the rolled labels.

        Each row gets its sequence's next token, across the ends of chunks and ranks. The last token of a sequence has
        none: its row gets the sequence's first token, and so does the sequence's last padded row, as if the padded
        sequence were rolled. Other padding rows are zero. A mask, told by its dtype of bool, does not wrap: as a label
        the first token is harmless there, in the loss it is not.

        Raises:
            ValueError: the values are not T long.
        """
        wraps = values.dtype != torch.bool
        return self._take(values, self._next_source, self._next_padding if wraps else self._next_nothing)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """Position of every row's token in its sequence, int64 [R]; zero on padding rows."""
        return self.position.masked_fill(self._padding, 0).long()

    @cached_property
    def next_position_ids(self) -> torch.Tensor:
        """Position of the token that :meth:`pack_next` gives to every row, int64 [R]; zero on padding rows."""
        return self._next_position.masked_fill(self._next_padding, 0).long()

    def unpack(self, rows: torch.Tensor, all_rows: torch.Tensor | None = None) -> torch.Tensor:
        """All tokens in their original order, [T, *], in the dtype of the rows.

        Gradients go to this rank's own rows alone: every other rank has its own copy of the loss.

        Args:
            rows: this rank's rows [R, *]; without CP any number from `least_rows` on, since a model that packs by its
                mask ends with another padding.
            all_rows: every rank's rows [cp, R, *], without gradient; may be left out where cp is 1.

        Raises:
            ValueError: a shape is not that of this layout.
        """
        if all_rows is None and self.cp_size == 1:
            if rows.shape[0] < self.least_rows:
                raise ValueError(f"rows must be at least {self.least_rows}, got shape {tuple(rows.shape)}")
            return _Unpack.apply(rows, rows.detach(), self)
        wanted = (self.local_rows, *rows.shape[1:])
        if tuple(rows.shape) != wanted:
            raise ValueError(f"rows must have shape {wanted}, got {tuple(rows.shape)}")
        if all_rows is None or tuple(all_rows.shape) != (self.cp_size, *wanted):
            got = None if all_rows is None else tuple(all_rows.shape)
            raise ValueError(f"all_rows must have shape {(self.cp_size, *wanted)}, got {got}")
        return _Unpack.apply(rows, all_rows.flatten(0, 1), self)

    def _take(self, values: torch.Tensor, source: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        if values.shape[0] != self.tokens:
            raise ValueError(f"values must be {self.tokens} tokens long, got shape {tuple(values.shape)}")
        if self.tokens == 0:
            return values.new_zeros((self.local_rows, *values.shape[1:]))
        rows = values.index_select(0, source)
        return rows.masked_fill_(padding if rows.dim() == 1 else padding.view(-1, *[1] * (rows.dim() - 1)), 0)

    @cached_property
    def position(self) -> torch.Tensor:
        """Position of every row in its padded sequence, int32 [R]."""
        return torch.arange(self.local_rows, dtype=torch.int32, device=self.chunk.device) + self.shift.index_select(
            0, self.chunk
        )

    @cached_property
    def _sequence(self) -> torch.Tensor:
        return self.chunk if self.shift.shape[0] == self.lengths.shape[0] else self.chunk >> 1

    @cached_property
    def _start(self) -> torch.Tensor:
        return self.starts.index_select(0, self._sequence)

    @cached_property
    def _length(self) -> torch.Tensor:
        return self.lengths.index_select(0, self._sequence)

    @cached_property
    def _padding(self) -> torch.Tensor:
        return self.position >= self._length

    @cached_property
    def _source(self) -> torch.Tensor:
        # Padding rows read token 0 and are cleared after: no sentinel row has to be copied in for them
        return (self._start + self.position).masked_fill_(self._padding, 0)

    @cached_property
    def _next_position(self) -> torch.Tensor:
        following = self.position + 1
        past_padding = following == self.padded.index_select(0, self._sequence)
        return following.masked_fill((following == self._length) | past_padding, 0)

    @cached_property
    def _next_padding(self) -> torch.Tensor:
        return self._next_position >= self._length

    @cached_property
    def _next_nothing(self) -> torch.Tensor:
        # A row whose next token is a first one has none: the token that it would get is where its sequence begins
        return self._next_padding | (self._next_position == 0)

    @cached_property
    def _next_source(self) -> torch.Tensor:
        return (self._start + self._next_position).masked_fill_(self._next_padding, 0)

    @cached_property
    def _row_of_token(self) -> torch.Tensor:
        """Row of every token among the rows of all ranks, rank after rank; int32 [T]."""
        device, cp = self.lengths.device, self.cp_size
        first_row = self.cu_seqlens_padded[:-1]
        if cp == 1 or self.cp_layout == "contiguous":
            counts, shift = self.lengths, first_row - self.starts
        else:
            # Tokens come chunk after chunk, 2*cp of them a sequence, the last ones short or empty
            number = torch.arange(2 * cp, dtype=torch.int32, device=device)
            rank = torch.minimum(number, 2 * cp - 1 - number)
            size = (self.padded // (2 * cp)).unsqueeze(1)
            before = number * size
            counts = (self.lengths.unsqueeze(1) - before).clamp(min=0).minimum(size).flatten()
            row = rank * self.local_rows + (first_row // cp).unsqueeze(1) + (number >= cp) * size
            shift = (row - before - self.starts.unsqueeze(1)).flatten()
        chunk = torch.repeat_interleave(counts, output_size=self.tokens)
        return torch.arange(self.tokens, dtype=torch.int32, device=device) + shift.index_select(0, chunk)


class _Unpack(torch.autograd.Function):
    """Gathers tokens from all ranks' rows. The gradient is a pack: a gather as well, so both ways are deterministic."""

    @staticmethod
    def forward(ctx, rows, all_rows, layout):
        ctx.layout, ctx.rows = layout, rows.shape[0]
        return all_rows.index_select(0, layout._row_of_token)

    @staticmethod
    def backward(ctx, grad):
        own = ctx.layout.pack(grad)
        extra = ctx.rows - own.shape[0]
        if extra > 0:
            own = torch.cat((own, own.new_zeros((extra, *own.shape[1:]))))
        return own[: ctx.rows], None, None


def jagged_offsets(batch: torch.Tensor) -> torch.Tensor:
    """Offsets of a jagged batch, [B+1].

    Raises:
        ValueError: the batch is not a jagged nested tensor, or its values have holes.
    """
    if not isinstance(batch, NestedTensor):
        raise ValueError(f"batch must be a jagged nested tensor, got {type(batch).__name__}")
    if batch.lengths() is not None:
        raise ValueError("batch must be a jagged nested tensor without holes; make it contiguous")
    return batch.offsets()


def thd_layout(
    offsets: torch.Tensor,
    *,
    tp_size: int,
    cp_size: int,
    cp_rank: int,
    cp_layout: str = "zigzag",
    use_fp8_padding: bool = False,
    min_local_rows: int | None = None,
    pad_to_length_bucket: int | None = None,
) -> THDLayout:
    """Layout of a micro-batch on one rank; the same object again for the same offsets tensor and settings.

    Making one takes a fixed number of tensor operations and waits for the device once. The total is the smallest that
    every constraint allows: each padded sequence is a multiple of its alignment, which is tp*cp*2 under zigzag CP and
    tp*cp otherwise, with FP8 the least common multiple of that and 16; and the total is a multiple of the bucket, with
    FP8 of 128 alignments, and holds at least cp*min_local_rows rows.

    Args:
        offsets: starts of the sequences among the tokens, and T; integer [B+1], on the device to work on.
        tp_size, cp_size: sizes of the tensor- and the context-parallel group.
        cp_rank: rank in the context-parallel group.
        cp_layout: "zigzag" or "contiguous".
        use_fp8_padding: whether FP8 kernels will read the rows.
        min_local_rows: least R.
        pad_to_length_bucket: tokens, over all ranks, that the total is a multiple of.

    Raises:
        ValueError: an argument is out of its range; told with its name and value.
    """
    key = (tp_size, cp_size, cp_rank, cp_layout, use_fp8_padding, min_local_rows, pad_to_length_bucket)
    made = _made_for(offsets)
    if key in made:
        return made[key]

    for name, value in (("tp_size", tp_size), ("cp_size", cp_size)):
        _check_positive(name, value)
    for name, value in (("min_local_rows", min_local_rows), ("pad_to_length_bucket", pad_to_length_bucket)):
        if value is not None:
            _check_positive(name, value)
    if cp_layout not in _LAYOUTS:
        raise ValueError(f"cp_layout must be one of {_LAYOUTS}, got {cp_layout!r}")
    _check_rank(cp_rank, cp_size)
    _check_offsets(offsets)

    alignment = tp_size * cp_size * (2 if cp_layout == "zigzag" and cp_size > 1 else 1)
    per_sequence, multiple = alignment, pad_to_length_bucket or 1
    if use_fp8_padding:
        per_sequence, multiple = math.lcm(16, alignment), math.lcm(multiple, 128 * alignment)
    multiple = math.lcm(multiple, per_sequence)

    lengths = offsets.diff().int()
    padded = (lengths + (per_sequence - 1)) // per_sequence * per_sequence
    # The one time that the host waits for the device
    facts = (padded.sum(), padded.max(), padded[-1], lengths[-1], lengths.min(), offsets[0], offsets[-1])
    total, longest, last, last_real, shortest, first, tokens = torch.stack(facts).tolist()
    if shortest < 0 or first != 0:
        raise ValueError(f"offsets must rise from 0, got first {first} and shortest sequence {shortest}")

    least_rows = total - last + last_real
    least = max(total, cp_size * min_local_rows if min_local_rows else 0)
    if pad_to_length_bucket or use_fp8_padding or least > total:
        extra = -(-least // multiple) * multiple - total
        padded[-1].add_(extra)
        total, longest = total + extra, max(longest, last + extra)
    made[key] = _make(offsets, lengths, padded, total, longest, least_rows, tokens, cp_size, cp_rank, cp_layout)
    return made[key]


def thd_layout_of_padded(
    offsets: torch.Tensor, cu_seqlens_padded: torch.Tensor, *, cp_size: int, cp_rank: int, cp_layout: str = "zigzag"
) -> THDLayout:
    """Layout with padded boundaries that are known already, such as those in PackedSeqParams.

    Waits for the device only where no layout of these offsets has made the boundaries.

    Args:
        offsets: as for :func:`thd_layout`.
        cu_seqlens_padded: starts of the padded sequences and their total; int32 [B+1].
        cp_size, cp_rank, cp_layout: as for :func:`thd_layout`.

    Raises:
        ValueError: an argument is out of its range; told with its name and value.
    """
    if cp_layout not in _LAYOUTS:
        raise ValueError(f"cp_layout must be one of {_LAYOUTS}, got {cp_layout!r}")
    _check_positive("cp_size", cp_size)
    _check_rank(cp_rank, cp_size)
    _check_offsets(offsets)
    if cu_seqlens_padded.shape != offsets.shape:
        want, got = tuple(offsets.shape), tuple(cu_seqlens_padded.shape)
        raise ValueError(f"cu_seqlens_padded must have shape {want}, got {got}")
    for key, layout in _made_for(offsets).items():
        if layout.cu_seqlens_padded is cu_seqlens_padded and key[1:4] == (cp_size, cp_rank, cp_layout):
            return layout
    lengths, padded = offsets.diff().int(), cu_seqlens_padded.diff().int()
    facts = (padded.sum(), padded.max(), padded[-1], lengths[-1], offsets[-1])
    total, longest, last, last_real, tokens = torch.stack(facts).tolist()
    return _make(
        offsets, lengths, padded, total, longest, total - last + last_real, tokens, cp_size, cp_rank, cp_layout
    )


def _make(offsets, lengths, padded, total, longest, least_rows, tokens, cp_size, cp_rank, cp_layout) -> THDLayout:
    local_rows = total // cp_size
    ends = padded.cumsum(0, dtype=torch.int32)
    cu_seqlens_padded = torch.nn.functional.pad(ends, (1, 0))
    if cp_size == 1 or cp_layout == "contiguous":
        first_row = cp_rank * local_rows
        chunk = torch.repeat_interleave(padded, output_size=total)[first_row : first_row + local_rows]
        shift = first_row + padded - ends
    else:
        size = padded // (2 * cp_size)
        before = (ends - padded) // cp_size
        chunk = torch.repeat_interleave(torch.stack((size, size), dim=1).flatten(), output_size=local_rows)
        shift = torch.stack((size * cp_rank - before, size * (2 * cp_size - 2 - cp_rank) - before), dim=1).flatten()
    # A copy: the layout is kept with its offsets and must not keep them alive
    starts = offsets[:-1].to(torch.int32, copy=True)
    return THDLayout(
        cu_seqlens_padded,
        longest,
        local_rows,
        least_rows,
        tokens,
        cp_size,
        cp_layout,
        starts,
        lengths,
        padded,
        chunk,
        shift,
    )


def _made_for(offsets: torch.Tensor) -> dict[tuple, THDLayout]:
    """Layouts made for an offsets tensor, kept with it, so that they go when the micro-batch goes."""
    made = getattr(offsets, "_verl_thd_layouts", None)
    if made is None:
        made = offsets._verl_thd_layouts = {}
    return made


def _check_positive(name: str, value: int) -> None:
    if type(value) is not int or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_rank(cp_rank: int, cp_size: int) -> None:
    if type(cp_rank) is not int or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in 0..{cp_size - 1}, got {cp_rank!r}")


def _check_offsets(offsets: torch.Tensor) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.is_floating_point():
        raise ValueError(f"offsets must be integers of shape [B+1], got {offsets.dtype} {tuple(offsets.shape)}")
