"""The layout on a GPU: the same rows as Transformer Engine's partition, and no wait but the one it tells of."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from patchset.bench.picture import load_layout  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENS = [5, 700, 37, 1, 2048]


def layout_on_gpu(rank: int, cp: int, bucket: int | None = None):
    offsets = torch.tensor([0, *LENS], device="cuda").cumsum(0)
    return load_layout().thd_layout(offsets, tp_size=2, cp_size=cp, cp_rank=rank, pad_to_length_bucket=bucket)


@pytest.mark.parametrize("bucket", [None, 512])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_rows_are_those_of_transformer_engine(cp, bucket):
    engine = pytest.importorskip("transformer_engine_torch", reason="needs Transformer Engine")
    for rank in range(cp):
        layout = layout_on_gpu(rank, cp, bucket)
        total = layout.local_rows * cp
        wanted = engine.thd_get_partitioned_indices(layout.cu_seqlens_padded, total, cp, rank)
        starts = layout.cu_seqlens_padded[:-1]
        rows = starts.index_select(0, layout._sequence) + layout.position
        assert torch.equal(rows.long(), wanted.long())


def test_a_made_layout_never_waits_for_the_gpu():
    values = torch.arange(sum(LENS), device="cuda")
    layout = layout_on_gpu(1, 4, 512)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = layout.pack(values), layout.pack_next(values), layout.position_ids, layout.next_position_ids
        layout.unpack(rows[0].float(), rows[0].float().expand(4, -1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cpu = load_layout().thd_layout(
        torch.tensor([0, *LENS]).cumsum(0), tp_size=2, cp_size=4, cp_rank=1, pad_to_length_bucket=512
    )
    assert torch.equal(rows[0].cpu(), cpu.pack(values.cpu()))
    assert torch.equal(rows[1].cpu(), cpu.pack_next(values.cpu()))
