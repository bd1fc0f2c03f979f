"""What a vision model that trains MTP gets from verl, put through Megatron-Core's multimodal rotary embedding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

from . import toys, upstream
from .comparison import LIMIT, Case, Difference, Topology, compare_tokens, enter
from .reference import Batch

#: Case C52 of the bug reports: two sequences of text.
LENGTHS = (6, 4)


def cases(short: bool) -> list[Case]:
    """With and without context parallelism, with and without a bucket."""
    return [
        Case("vision", "mrope", topology.world, topology, bucket, run)
        for topology in (Topology(1), Topology(2))
        for bucket in ((None,) if short else (None, 64))
    ]


class VisionModel(torch.nn.Module):
    """As much of a vision model as decides on positions: it takes those that it gets, or makes them from the mask."""

    pre_process, post_process = True, False

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(fp8=None)
        self.rotary = MultimodalRotaryEmbedding(kv_channels=16, rotary_percent=1.0)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: Any, packed_seq_params: Any, **_: Any
    ) -> torch.Tensor:
        if position_ids is None:
            # Text alone: time, height and width count the same
            position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0).expand(3, *input_ids.shape)
        # Split over the CP ranks after the images are in place, which is not part of this
        whole = mpu.get_tensor_model_parallel_group()
        self.angles = self.rotary(position_ids, [2, 3, 3], cp_group=whole)
        return input_ids.new_zeros(
            1, packed_seq_params.cu_seqlens_q_padded[-1] // mpu.get_context_parallel_world_size()
        )


def run(case: Case) -> list[Difference]:
    """`gptmodel_forward_*` on a vision model; the first angle of a token is its position."""
    assert isinstance(case.topology, Topology)
    enter(case.topology)
    made = Batch.of(LENGTHS, toys.VOCABULARY)
    model = VisionModel()
    upstream.forward(
        model, made.nested(), {}, vision_model=True, pad_token_id=0, mtp_enable_train=True, bucket=case.bucket
    )
    got = [model.angles[:length, number, 0, 0] for number, length in enumerate(LENGTHS)]
    return [compare_tokens("positions", got, [torch.arange(length) for length in LENGTHS], LIMIT)]
