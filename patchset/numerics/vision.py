"""What verl packs for a vision model, and what the model packs itself: rows have to meet, and positions to fit."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

from . import layout, toys, upstream
from .comparison import LIMIT, Case, Difference, Topology, compare_tokens, enter
from .reference import Batch

#: Case C52 of the bug reports: two sequences of text.
LENGTHS = (6, 4)
#: A report of upstream (its #7948): with bucket 512 the model has 2,212 rows and the metadata says 2,560.
LONG, LONG_BUCKET = (1200, 1012), 512


def cases(short: bool) -> list[Case]:
    """With and without context parallelism, with and without a bucket; positions, actor and value head."""
    buckets = (None,) if short else (None, 64)
    found = [
        Case("vision", kind, topology.world, topology, bucket, run, (kind, LENGTHS))
        for kind, run in (("mrope", run_positions), ("actor", run_actor), ("values", run_values))
        for topology in (Topology(1), Topology(2))
        for bucket in buckets
    ]
    one = Topology(1)
    for kind, run in (("actor", run_actor), ("values", run_values)):
        found.append(Case("vision", f"{kind} long", one.world, one, LONG_BUCKET, run, (kind, LONG)))
    return found


class VisionModel(torch.nn.Module):
    """As much of a vision model as decides on rows and positions.

    It takes the positions that it gets, or makes them from the mask. It packs its dense rows by the mask, to an
    alignment of its own and over the CP ranks, as Megatron-Bridge's Qwen3-VL does; what the packed metadata says of
    lengths it does not read. A row's value is its token.

    Args:
        head: whether it has an output layer, which the positions alone don't need.
        values: whether that is a value head, [1, R, 1], or logits, [1, R].
    """

    pre_process = True

    def __init__(self, head: bool = True, values: bool = False) -> None:
        super().__init__()
        self.post_process, self.values = head, values
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
        rows = self._pack(input_ids.float(), attention_mask)
        return rows.unsqueeze(-1) if self.values else rows

    @staticmethod
    def _pack(dense: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Rows of this rank, [1, R], from dense values and their mask, [B, S] each."""
        tp, cp = mpu.get_tensor_model_parallel_world_size(), mpu.get_context_parallel_world_size()
        align = tp * cp * 2 if cp > 1 else tp
        lengths = mask.sum(1).tolist()
        bounds = list(accumulate((-(-length // align) * align for length in lengths), initial=0))
        sequences, positions = layout.rows(bounds, cp, mpu.get_context_parallel_rank())
        inside = positions < torch.tensor(lengths)[sequences]
        held = dense[sequences, positions.clamp(max=dense.shape[1] - 1)]
        return held.masked_fill(~inside, 0).unsqueeze(0)


def _forward(case: Case, model: VisionModel, **named: Any) -> tuple[Batch, Any]:
    assert isinstance(case.topology, Topology)
    enter(case.topology)
    made = Batch.of(case.options[1], toys.VOCABULARY)
    given = {"vision_model": True, "pad_token_id": 0, "bucket": case.bucket}
    if "logits_processor" in named:
        named["logits_processor_args"] = {"label": made.nested()}
    return made, upstream.forward(model, made.nested(), {}, **given, **named)


def run_positions(case: Case) -> list[Difference]:
    """`gptmodel_forward_*` on a vision model that trains MTP; the first angle of a token is its position."""
    model = VisionModel(head=False)
    made, _ = _forward(case, model, mtp_enable_train=True)
    got = [model.angles[:length, number, 0, 0] for number, length in enumerate(made.lengths)]
    return [compare_tokens("positions", got, [torch.arange(length) for length in made.lengths], LIMIT)]


def run_actor(case: Case) -> list[Difference]:
    """What stands beside each token of the model among what verl packed for it: its next one."""

    def meet(logits: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        # As the engine's own processor has it
        assert logits.shape == label.shape, f"{tuple(logits.shape)} rows of the model, {tuple(label.shape)} labels"
        return {"tokens": logits, "labels": label}

    made, output = _forward(case, VisionModel(), logits_processor=meet)
    tokens, labels = (output[name].unbind() for name in ("tokens", "labels"))
    return [
        compare_tokens("tokens", list(tokens), list(made.ids), 0),
        compare_tokens("labels", [label[:-1] for label in labels], [ids[1:] for ids in made.ids], 0),
    ]


def run_values(case: Case) -> list[Difference]:
    """What the value head gives each token, in its place."""
    made, output = _forward(case, VisionModel(values=True), value_model=True)
    return [compare_tokens("values", list(output.unbind()), list(made.ids), 0)]
