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
"""Position ids of context-parallel ranks, against a layout written from its definition."""

import pytest
import torch
from thd_reference import assert_holds, layout, nested, pack, value

BATCHES = [[4803], [64, 97, 130], [33, 200, 48]]


@pytest.mark.parametrize("lens", BATCHES, ids=str)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_real_rows_hold_their_token_and_its_position(monkeypatch, cp, tp, lens):
    expected = layout(lens, tp, cp)
    for rank, rows in enumerate(expected.rows):
        packed, params, positions = pack(monkeypatch, nested(lens), rank, tp, cp)
        real = [(row, seq, pos) for row, (seq, pos) in enumerate(rows) if pos < lens[seq]]
        at = [row for row, _, _ in real]
        assert_holds(params.cu_seqlens_q_padded, expected.cu_seqlens)
        assert_holds(packed[at], [value(seq, pos) for _, seq, pos in real])
        assert_holds(positions[at], [pos for _, _, pos in real])


def test_second_chunk_of_4803_tokens_on_two_ranks(monkeypatch):
    # The batch of the original report; 4803 tokens are padded to 4804
    _, _, first = pack(monkeypatch, nested([4803]), rank=0, cp=2)
    _, _, second = pack(monkeypatch, nested([4803]), rank=1, cp=2)
    assert_holds(first[:-1], [*range(1201), *range(3603, 4803)])
    assert first[-1] < 4803, "a padding row has no position past the sequence"
    assert_holds(second, list(range(1201, 3603)))


def test_short_second_chunk_is_clamped(monkeypatch):
    # 5 tokens padded to 8: rank 1 holds 2..5, of which 5 is padding; rank 0's second chunk is padding alone
    _, _, second = pack(monkeypatch, nested([5]), rank=1, cp=2)
    assert second.tolist()[:3] == [2, 3, 4] and second[3] < 5
    _, _, first = pack(monkeypatch, nested([5]), rank=0, cp=2)
    assert first.tolist()[:2] == [0, 1] and all(first[2:] < 5)


@pytest.mark.parametrize("cp", [1, 2])
def test_positions_are_one_dimensional_for_tensors_with_trailing_dimensions(monkeypatch, cp):
    packed, _, positions = pack(monkeypatch, nested([65, 32], dims=(3, 2)), cp=cp)
    assert packed.shape == (100 // cp if cp > 1 else 97, 3, 2)
    assert positions.shape == packed.shape[:1]
    assert positions.dtype == torch.long
