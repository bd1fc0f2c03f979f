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
"""No sequence learns to predict its own first token, though rolling wraps it to the sequence's end."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import roll_tensor

import verl.models.mcore.model_forward as plain
from tests.models.mcore.thd_reference import nested, pack
from verl.utils.megatron.mtp_loss import without_first_tokens


def mask_of(*rows, dtype=torch.long):
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32, torch.int32])
def test_first_tokens_leave_the_mask(dtype):
    mask = mask_of([1, 1, 0, 1], [1], [0, 1], dtype=dtype)
    left = without_first_tokens(mask)
    assert left.values().tolist() == [0, 1, 0, 1, 0, 0, 1]
    assert left.dtype == dtype
    assert left.offsets() is mask.offsets()
    assert mask.values().tolist() == [1, 1, 0, 1, 1, 0, 1], "the caller's mask stays"


@pytest.mark.parametrize(
    ("offsets", "wanted"), [([0, 0, 3], [0, 1, 1]), ([0, 2, 2, 3], [0, 1, 0]), ([0, 3, 3], [0, 1, 1])], ids=str
)
def test_empty_sequences_have_no_first_token(offsets, wanted):
    mask = torch.nested.nested_tensor_from_jagged(torch.ones(3, dtype=torch.long), torch.tensor(offsets))
    assert without_first_tokens(mask).values().tolist() == wanted


def test_what_is_not_jagged_is_refused():
    with pytest.raises(ValueError, match="mask must be a jagged nested tensor, got Tensor"):
        without_first_tokens(torch.ones(2, 3))


@pytest.mark.parametrize(("lens", "learned"), [([6, 5], 7), ([7], 5)], ids=str)
def test_what_is_left_after_megatron_rolls_too(monkeypatch, lens, learned):
    # Each sequence loses its last token to verl's roll and the one before to Megatron's
    mask = mask_of(*([1] * length for length in lens))
    rows, params, _ = pack(monkeypatch, without_first_tokens(mask), tp=4, need_roll=True)
    rolled, count = roll_tensor(rows.unsqueeze(0), shifts=-1, dims=-1, cp_group=None, packed_seq_params=params)
    assert (int(rolled.sum()), int(count)) == (learned, learned)


def test_model_gets_a_mask_that_does_not_wrap(monkeypatch):
    got = {}

    class Model:
        pre_process = post_process = True
        config = SimpleNamespace(fp8=None)

        def __call__(self, **kwargs):
            got.update(kwargs)
            return torch.zeros(1, 16)

    pack(monkeypatch, nested([1]), tp=4)  # leaves rank and sizes as they are for the forward
    monkeypatch.setattr("verl.models.mcore.util.mpu.get_context_parallel_group", lambda *_, **__: None)
    forward = getattr(plain, "gptmodel_forward_model_engine", None) or plain.gptmodel_forward_no_padding
    ids = nested([6, 5])
    arguments = {"label": ids.clone(), "loss_mask": mask_of([1] * 6, [1] * 5)}
    forward(Model(), ids, {}, lambda output, **_: {}, arguments, mtp_enable_train=True)
    assert got["loss_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]
    real = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert got["labels"][0, real].tolist() == [*range(100_002, 100_007), *range(200_002, 200_006)]
