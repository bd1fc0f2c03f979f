"""Attention over THD rows under context parallelism, written for clarity, in the place of a CUDA kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from .layout import rows


class GatherRows(torch.autograd.Function):
    """All ranks' rows, rank after rank. Every rank's loss reads them, so the gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class ReferenceAttention(MegatronModule):
    """Core attention for a ModuleSpec: causal within every sequence, over the keys of all CP ranks.

    Rows of a rank come as [R, heads, dim] with packed_seq_params, or as [S, B, heads, dim] without.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        attn_mask_type: Any = None,
        attention_type: Any = None,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.cp_group = mpu.get_context_parallel_group() if pg_collection is None else pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *, packed_seq_params: Any = None, **more: Any
    ) -> Tensor:
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            length = query.shape[0]
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            return self._attend(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
        group = packed_seq_params.cp_group or self.cp_group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        # What a kernel is told of the rows is what it goes by: the padded boundaries
        boundaries = packed_seq_params.cu_seqlens_q_padded
        cu_seqlens = (packed_seq_params.cu_seqlens_q if boundaries is None else boundaries).tolist()
        if size > 1:
            key, value = GatherRows.apply(key, group), GatherRows.apply(value, group)
        held = [rows(cu_seqlens, size, number) for number in range(size)]
        sequence, position = (torch.cat(part) for part in zip(*held, strict=True))
        if len(sequence) != size * query.shape[0]:
            raise ValueError(f"packed_seq_params tell of {len(sequence)} rows, {size} ranks hold {query.shape[0]} each")
        own = slice(rank * query.shape[0], (rank + 1) * query.shape[0])
        mask = (sequence[own, None] == sequence) & (position <= position[own, None])
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return self._attend(q, k, v, mask).transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """The formula, [..., heads, rows, dim]: the CPU's fused kernels round their exponentials too early."""
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value
