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
"""The router's padding mask of a rank has the rows of its layout, also where a least number of rows decides."""

import pytest
import torch

from verl.utils.megatron.thd_layout import thd_layout

scheduler = pytest.importorskip("verl.utils.dynamic_cp_scheduler", reason="no dynamic CP scheduler in this verl")
mask_of = getattr(scheduler, "_local_padding_mask", None)
pytestmark = pytest.mark.skipif(mask_of is None, reason="this verl makes no padding mask")


def both(lens, tp, cp, rank, cp_layout, least):
    named = {"cp_size": cp, "cp_rank": rank, "tp_size": tp, "cp_layout": cp_layout, "min_local_rows": least}
    offsets = torch.tensor([0, *lens]).cumsum(0)
    padding = thd_layout(offsets, **named).pack(torch.ones(sum(lens), dtype=torch.long)) == 0
    return mask_of(lens, **named), padding


@pytest.mark.parametrize(
    ("cp_layout", "tp", "least", "rows"), [("contiguous", 3, 128, 129), ("zigzag", 2, 127, 128)], ids=str
)
def test_least_rows_by_hand(cp_layout, tp, least, rows):
    for rank in range(2):
        mask, padding = both([40, 17], tp, 2, rank, cp_layout, least)
        assert mask.shape == padding.shape == (rows,)


@pytest.mark.parametrize("least", [None, 1, 7, 64, 127])
@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_mask_is_padding_of_the_layout(cp, tp, cp_layout, least):
    for lens in ([5], [40, 17], [1, 100, 3]):
        for rank in range(cp):
            mask, padding = both(lens, tp, cp, rank, cp_layout, least)
            assert torch.equal(mask, padding)
