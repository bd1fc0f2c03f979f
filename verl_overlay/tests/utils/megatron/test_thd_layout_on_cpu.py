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
"""The THD layout by itself: literals, properties against a reference from the definition, gradients, errors, costs."""

import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl.utils.megatron.thd_layout import jagged_offsets, thd_layout, thd_layout_of_padded


def offsets_of(lens):
    return torch.tensor([0, *lens]).cumsum(0)


def make(lens, tp=1, cp=1, rank=0, **kwargs):
    return thd_layout(offsets_of(lens), tp_size=tp, cp_size=cp, cp_rank=rank, **kwargs)


# 7 and 3 tokens over two ranks: slots of 8 and 4 rows, chunks of 2 and 1. Tokens are 11..17 and 21..23.
TOKENS = torch.tensor([11, 12, 13, 14, 15, 16, 17, 21, 22, 23])


@pytest.mark.parametrize(
    ("rank", "rows", "following", "positions", "next_positions"),
    [
        (0, [11, 12, 17, 0, 21, 0], [12, 13, 11, 11, 22, 21], [0, 1, 6, 0, 0, 0], [1, 2, 0, 0, 1, 0]),
        (1, [13, 14, 15, 16, 22, 23], [14, 15, 16, 17, 23, 21], [2, 3, 4, 5, 1, 2], [3, 4, 5, 6, 2, 0]),
    ],
)
def test_zigzag_by_hand(rank, rows, following, positions, next_positions):
    layout = make([7, 3], cp=2, rank=rank)
    assert layout.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert layout.cu_seqlens_padded.dtype == torch.int32
    assert (layout.max_seqlen, layout.local_rows, layout.tokens) == (8, 6, 10)
    assert layout.pack(TOKENS).tolist() == rows
    assert layout.pack_next(TOKENS).tolist() == following
    assert layout.position_ids.tolist() == positions
    assert layout.next_position_ids.tolist() == next_positions


def test_contiguous_by_hand():
    layouts = [make([7, 3], cp=2, rank=rank, cp_layout="contiguous") for rank in range(2)]
    assert layouts[0].cu_seqlens_padded.tolist() == [0, 8, 12]
    assert layouts[0].pack(TOKENS).tolist() == [11, 12, 13, 14, 15, 16]
    assert layouts[1].pack(TOKENS).tolist() == [17, 0, 21, 22, 23, 0]
    assert layouts[1].pack_next(TOKENS).tolist() == [11, 11, 22, 23, 21, 21]
    assert layouts[1].position_ids.tolist() == [6, 0, 0, 1, 2, 0]


def test_padding_between_the_last_token_and_the_last_row_is_zero():
    layout = make([3], pad_to_length_bucket=8)
    assert layout.pack_next(torch.tensor([5, 6, 7])).tolist() == [6, 7, 5, 0, 0, 0, 0, 5]
    assert layout.next_position_ids.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


# 10 tokens, worked out by hand: (least rows, tp, cp, rows). The alignment of the total is tp*cp*2, or tp without CP.
@pytest.mark.parametrize(
    ("least", "tp", "cp", "rows"), [(7, 1, 2, 8), (13, 4, 1, 16), (65, 2, 2, 68), (3, 2, 2, 8)], ids=str
)
def test_least_rows_stay_divisible(least, tp, cp, rows):
    # Upstream gives odd numbers of rows, which neither tp nor two chunks divide
    layout = make([10], tp, cp, min_local_rows=least)
    assert layout.local_rows == rows


def slow_layout(lens, tp, cp, cp_layout, fp8, least, bucket):
    """Padded lengths and each rank's (sequence, position) rows, by trying totals one alignment after another."""
    align = tp * cp * (2 if cp > 1 and cp_layout == "zigzag" else 1)
    total_of_fp8 = 128 * align
    if fp8:
        while align % 16:
            align += tp * cp * (2 if cp > 1 and cp_layout == "zigzag" else 1)
    padded = [length + -length % align for length in lens]

    def fits(total):
        plain = total == sum(padded) and not bucket and not fp8
        return total >= cp * (least or 0) and (
            plain or total % (bucket or 1) == 0 == total % (total_of_fp8 if fp8 else 1)
        )

    total = sum(padded)
    while not fits(total):
        total += align
        if total > 2_000_000:
            return None
    padded[-1] += total - sum(padded)
    rows = [[] for _ in range(cp)]
    if cp_layout == "contiguous" or cp == 1:
        block = [(seq, pos) for seq, length in enumerate(padded) for pos in range(length)]
        return padded, [block[total // cp * rank : total // cp * (rank + 1)] for rank in range(cp)]
    for seq, length in enumerate(padded):
        chunk = length // (2 * cp)
        for rank in range(cp):
            for first in (rank * chunk, length - (rank + 1) * chunk):
                rows[rank] += [(seq, pos) for pos in range(first, first + chunk)]
    return padded, rows


def check_everything(lens, tp, cp, cp_layout, fp8, least, bucket, dims):
    slow = slow_layout(lens, tp, cp, cp_layout, fp8, least, bucket)
    if slow is None or sum(slow[0]) > 60_000:
        return False
    padded, rows = slow
    offsets, tokens = offsets_of(lens), sum(lens)
    starts = offsets.tolist()
    ids = torch.arange(1, tokens + 1)
    values = (ids.reshape(-1, *[1] * len(dims)) * 2 + torch.arange(math.prod(dims)).reshape(dims)).double()
    every, weights = [], torch.rand(tokens, *dims, dtype=torch.double)
    layouts = [
        thd_layout(
            offsets, tp_size=tp, cp_size=cp, cp_rank=rank, cp_layout=cp_layout, use_fp8_padding=fp8,
            min_local_rows=least, pad_to_length_bucket=bucket,
        )
        for rank in range(cp)
    ]  # fmt: skip
    for layout, held in zip(layouts, rows, strict=True):
        assert layout.cu_seqlens_padded.tolist() == [sum(padded[:n]) for n in range(len(lens) + 1)]
        assert layout.max_seqlen == max(padded)
        assert layout.local_rows == len(held)
        assert layout.local_rows % tp == 0
        real = [pos < lens[seq] for seq, pos in held]
        wanted = [starts[seq] + pos + 1 if pos < lens[seq] else 0 for seq, pos in held]
        assert torch.equal(layout.pack(ids), torch.tensor(wanted))
        assert torch.equal(layout.position_ids, torch.tensor([pos if pos < lens[seq] else 0 for seq, pos in held]))
        following = [
            starts[seq] + pos + 2
            if pos + 1 < lens[seq]
            else starts[seq] + 1
            if pos + 1 in (lens[seq], padded[seq])
            else 0
            for seq, pos in held
        ]
        assert torch.equal(layout.pack_next(ids), torch.tensor(following))
        next_positions = [pos + 1 if pos + 1 < lens[seq] else 0 for seq, pos in held]
        assert torch.equal(layout.next_position_ids, torch.tensor(next_positions))
        every.append(layout.pack(values))
        assert not every[-1][~torch.tensor(real, dtype=torch.bool)].any()
    seen = sorted(token for layout in layouts for token in layout.pack(ids).tolist() if token)
    assert seen == list(range(1, tokens + 1)), "every token lies on exactly one rank, once"
    gathered = torch.stack(every)
    for rank, layout in enumerate(layouts):
        own = every[rank].clone().requires_grad_()
        back = layout.unpack(own, gathered)
        assert torch.equal(back, values)
        (grad,) = torch.autograd.grad((back * weights).sum(), own)
        assert torch.equal(grad, layout.pack(weights))
    return True


def test_random_layouts_of_every_kind():
    draw, checked = random.Random(0), 0
    while checked < 150:
        lens = [draw.choice([1, draw.randint(1, 9), draw.randint(1, 300)]) for _ in range(draw.randint(1, 12))]
        tp, cp = draw.randint(1, 16), draw.randint(1, 16)
        kind = draw.choice(["zigzag", "contiguous"])
        least, bucket = draw.choice([None, draw.randint(1, 99)]), draw.choice([None, draw.randint(1, 99), 512, 1000])
        dims = draw.choice([(), (3,), (2, 2)])
        checked += check_everything(lens, tp, cp, kind, draw.random() < 0.2, least, bucket, dims)


def test_properties():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(
        lens=st.lists(st.integers(1, 60) | st.integers(1, 5000), min_size=1, max_size=64),
        tp=st.integers(1, 16),
        cp=st.integers(1, 16),
        cp_layout=st.sampled_from(["zigzag", "contiguous"]),
        fp8=st.booleans(),
        least=st.none() | st.integers(1, 3000),
        bucket=st.none() | st.integers(1, 2048),
        dims=st.sampled_from([(), (2,), (3, 2)]),
    )
    def run(lens, tp, cp, cp_layout, fp8, least, bucket, dims):
        hypothesis.assume(sum(lens) < 20_000)
        hypothesis.assume(check_everything(lens, tp, cp, cp_layout, fp8, least, bucket, dims))

    run()


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_chunks_are_those_of_megatron_cores_rope(cp):
    rope = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    if not hasattr(rope, "_get_thd_freqs_on_this_cp_rank"):
        pytest.skip("this Megatron-Core has another helper")
    lens = [5, 64, 17, 1]
    for rank in range(cp):
        layout = make(lens, cp=cp, rank=rank)
        cut = []
        for length in layout.cu_seqlens_padded.diff().tolist():
            angles = torch.arange(length, dtype=torch.float).view(-1, 1, 1, 1)
            rows = torch.zeros(length // cp, 1, 1)
            cut.append(rope._get_thd_freqs_on_this_cp_rank(rank, cp, rows, angles).flatten())
        assert torch.equal(layout.position, torch.cat(cut).to(layout.position.dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.long, torch.bool, torch.bfloat16, torch.float64])
def test_every_dtype_there_and_back(dtype):
    values = torch.arange(10).to(dtype)
    layouts = [make([7, 3], cp=2, rank=rank) for rank in range(2)]
    rows = torch.stack([layout.pack(values) for layout in layouts])
    assert rows.dtype == dtype
    back = layouts[1].unpack(rows[1], rows)
    assert back.dtype == dtype
    assert torch.equal(back, values)


def test_a_layout_is_made_once_for_its_offsets_and_goes_with_them():
    offsets = offsets_of([7, 3])
    settings = {"tp_size": 1, "cp_size": 2, "cp_rank": 0}
    layout = thd_layout(offsets, **settings)
    assert thd_layout(offsets, **settings) is layout
    assert thd_layout(offsets, **settings, pad_to_length_bucket=32) is not layout
    assert thd_layout(offsets.clone(), **settings) is not layout
    assert thd_layout_of_padded(offsets, layout.cu_seqlens_padded, cp_size=2, cp_rank=0) is layout
    other = thd_layout_of_padded(offsets, layout.cu_seqlens_padded.clone(), cp_size=2, cp_rank=0)
    assert other is not layout
    assert other.pack(TOKENS).tolist() == layout.pack(TOKENS).tolist()
    kept = [tensor for tensor in vars(layout).values() if isinstance(tensor, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
    assert offsets.untyped_storage().data_ptr() not in storages, "offsets would live as long as their layout"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        # [T, F, T] and [T]: slots of 4 and 2 rows, of 4 and 2 in all under tp=2
        ({"tp": 2}, [[0, 1, 0, 0, 0, 0]]),
        # slots of 4 rows each over two ranks, chunks of one row
        ({"cp": 2}, [[0, 0, 0, 0], [1, 0, 0, 0]]),
        ({"cp": 2, "cp_layout": "contiguous"}, [[0, 1, 0], [0, 0, 0]]),
    ],
    ids=["tp2", "cp2", "contiguous"],
)
def test_a_mask_does_not_wrap(settings, wanted):
    values = torch.tensor([True, False, True, True])
    for rank, rows in enumerate(wanted):
        layout = make([3, 1], rank=rank, **settings)
        assert layout.pack_next(values).tolist() == [bool(row) for row in rows]


@pytest.mark.parametrize("known", [False, True], ids=["made", "from-boundaries"])
@pytest.mark.parametrize("rows", [2212, 2560, 3000])
def test_without_cp_a_model_may_end_with_another_padding(rows, known):
    # A vision model packs by its mask and does not see the bucket: 2,212 rows where the layout has 2,560
    offsets = offsets_of([1200, 1012])
    layout = thd_layout(offsets, tp_size=1, cp_size=1, cp_rank=0, pad_to_length_bucket=512)
    assert layout.cu_seqlens_padded.tolist() == [0, 1200, 2560]
    if known:
        layout = thd_layout_of_padded(offsets, layout.cu_seqlens_padded.clone(), cp_size=1, cp_rank=0)
    own = torch.arange(2.0 * rows).view(rows, 2).requires_grad_()
    tokens = layout.unpack(own)
    assert torch.equal(tokens, own[:2212])
    (grad,) = torch.autograd.grad((tokens * 3).sum(), own)
    assert torch.equal(grad, torch.cat((torch.full((2212, 2), 3.0), torch.zeros(rows - 2212, 2))))


def test_rows_that_lack_a_token_are_refused():
    layout = make([1200, 1012], pad_to_length_bucket=512)
    with pytest.raises(ValueError, match=r"rows must be at least 2212, got shape \(2211,\)"):
        layout.unpack(torch.zeros(2211))


class Count(TorchDispatchMode):
    """Counts dispatched operations, and those that wait for the device."""

    def __init__(self):
        super().__init__()
        self.ops, self.waits = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops += 1
        self.waits += function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
        return function(*args, **(kwargs or {}))


def cost(call, monkeypatch):
    waits = [0]
    real = torch.Tensor.tolist
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "tolist", lambda self: (waits.__setitem__(0, waits[0] + 1), real(self))[1])
        with Count() as count:
            call()
    return count.ops, count.waits + waits[0]


@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
def test_cost_does_not_depend_on_the_batch_and_waits_once(monkeypatch, cp_layout):
    costs = []
    for batch in (1, 16, 300):
        values, offsets, others = torch.arange(8 * batch), offsets_of([8] * batch), offsets_of([8] * batch)
        settings = {"tp_size": 2, "cp_size": 4, "cp_rank": 1, "cp_layout": cp_layout, "pad_to_length_bucket": 512}

        def micro_batch(offsets=offsets, values=values, settings=settings):
            for _ in range(3):
                layout = thd_layout(offsets, **settings)
                layout.pack(values), layout.pack_next(values), layout.position_ids, layout.next_position_ids

        def one_tensor(offsets=others, values=values, settings=settings):
            thd_layout(offsets, **settings).pack_next(values)

        ops, waits = cost(one_tensor, monkeypatch)
        assert ops <= 60
        assert waits == 1
        costs.append((ops, *cost(micro_batch, monkeypatch)))
    one, three, waits = zip(*costs, strict=True)
    # A slice that takes all of its tensor is no operation, hence the two
    assert max(one) - min(one) <= 2, f"operations grow with the batch: {costs}"
    assert max(three) - min(three) <= 2, f"operations grow with the batch: {costs}"
    assert set(waits) == {1}, "three tensors of one micro-batch wait once"


def test_a_reused_layout_costs_a_gather(monkeypatch):
    values, layout = torch.arange(10), make([7, 3], cp=2)
    layout.pack(values), layout.pack_next(values)
    assert cost(lambda: layout.pack(values), monkeypatch)[0] <= 5
    assert cost(lambda: layout.pack_next(values), monkeypatch)[0] <= 5


GOOD = {"tp_size": 1, "cp_size": 2, "cp_rank": 0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp_size": 0}, "tp_size must be a positive integer, got 0"),
        ({"cp_size": -1}, "cp_size must be a positive integer, got -1"),
        ({"tp_size": 1.5}, "tp_size must be a positive integer, got 1.5"),
        ({"cp_rank": 2}, r"cp_rank must be in 0..1, got 2"),
        ({"cp_rank": -1}, r"cp_rank must be in 0..1, got -1"),
        ({"cp_layout": "interleaved"}, "cp_layout must be one of .*, got 'interleaved'"),
        ({"min_local_rows": 0}, "min_local_rows must be a positive integer, got 0"),
        ({"pad_to_length_bucket": -512}, "pad_to_length_bucket must be a positive integer, got -512"),
        ({"pad_to_length_bucket": True}, "pad_to_length_bucket must be a positive integer, got True"),
        ({"offsets": torch.tensor([0])}, r"offsets must be integers of shape \[B\+1\], got torch.int64 \(1,\)"),
        ({"offsets": torch.tensor([0.0, 1.0])}, "offsets must be integers"),
        ({"offsets": torch.tensor([[0, 1]])}, "offsets must be integers"),
        ({"offsets": torch.tensor([0, 5, 3])}, "offsets must rise from 0, got first 0 and shortest sequence -2"),
        ({"offsets": torch.tensor([1, 5])}, "offsets must rise from 0, got first 1"),
    ],
)
def test_bad_arguments_are_named_with_their_value(changes, says):
    arguments = {"offsets": offsets_of([7, 3]), **GOOD, **changes}
    with pytest.raises(ValueError, match=says):
        thd_layout(**arguments)


def test_bad_tensors_are_named_with_their_shape():
    layout = make([7, 3], cp=2)
    with pytest.raises(ValueError, match=r"values must be 10 tokens long, got shape \(9,\)"):
        layout.pack(torch.arange(9))
    with pytest.raises(ValueError, match=r"rows must have shape \(6, 2\), got \(5, 2\)"):
        layout.unpack(torch.zeros(5, 2))
    with pytest.raises(ValueError, match=r"all_rows must have shape \(2, 6\), got None"):
        layout.unpack(torch.zeros(6))
    with pytest.raises(ValueError, match=r"all_rows must have shape \(2, 6\), got \(1, 6\)"):
        layout.unpack(torch.zeros(6), torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"cu_seqlens_padded must have shape \(3,\), got \(2,\)"):
        thd_layout_of_padded(offsets_of([7, 3]), torch.tensor([0, 12]), cp_size=2, cp_rank=0)


def test_batches_that_are_not_jagged_are_refused():
    with pytest.raises(ValueError, match="batch must be a jagged nested tensor, got Tensor"):
        jagged_offsets(torch.zeros(2, 3))
    holes = torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([0, 5, 10]), torch.tensor([3, 5]))
    with pytest.raises(ValueError, match="without holes"):
        jagged_offsets(holes)


def test_sequences_without_tokens_have_rows_only_where_the_bucket_needs_them():
    layout = make([0, 3, 0], pad_to_length_bucket=8)
    assert layout.cu_seqlens_padded.tolist() == [0, 0, 3, 8]
    assert layout.pack(torch.tensor([1, 2, 3])).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert make([0]).pack(torch.zeros(0)).shape == (0,)
