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
"""Rolled labels and positions of every real row come from its own sequence, whatever padding lies behind it."""

import pytest
import torch
from thd_reference import assert_holds, layout, nested, pack, takes_bucket, value

BATCHES = [[1], [10], [700, 37], [5, 3, 1], [1000, 1]]


@pytest.mark.parametrize("bucket", [None, 64, 100, 512])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_next_tokens_and_their_positions(monkeypatch, cp, tp, bucket):
    if bucket is not None and not takes_bucket:
        pytest.skip("this packer knows no bucket")
    kwargs = {"pad_to_length_bucket": bucket} if bucket else {}
    for lens in BATCHES:
        for rank in {0, 1, cp // 2, cp - 1}:
            rows = layout(lens, tp, cp, bucket=bucket).rows[rank]
            labels, _, positions = pack(monkeypatch, nested(lens), rank, tp, cp, need_roll=True, **kwargs)
            real = torch.tensor([pos < lens[seq] for seq, pos in rows])
            following = [(seq, (pos + 1) % lens[seq]) for seq, pos in rows if pos < lens[seq]]
            assert_holds(labels[real], [value(seq, pos) for seq, pos in following])
            assert_holds(positions[real], [pos for _, pos in following])


def test_two_ranks_by_hand(monkeypatch):
    # C13: rank 1 of 2 holds positions 2..5 of the first sequence, of which 5 is padding, and 1, 2 of the second
    labels, _, positions = pack(monkeypatch, nested([5, 3]), rank=1, cp=2, need_roll=True)
    real = [0, 1, 2, 4, 5]
    assert positions[real].tolist() == [3, 4, 0, 2, 0]
    assert labels[real].tolist() == [100_004, 100_005, 100_001, 200_003, 200_001]
