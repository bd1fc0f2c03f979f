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
"""Who gets explicit positions: a text model that trains MTP, and nobody else."""

from types import SimpleNamespace

import pytest
import torch

import verl.models.mcore.model_forward as plain
from tests.models.mcore.thd_reference import nested, pack


@pytest.mark.parametrize("mtp", [False, True], ids=["plain", "mtp"])
def test_vision_model_gets_dense_ids_and_no_packed_positions(monkeypatch, mtp):
    # C52: [6, 4] on rank 0 of 2; packed positions would be [1, 6], and of this rank alone
    got = {}

    class Model:
        pre_process, post_process, config = True, False, SimpleNamespace(fp8=None)

        def __call__(self, **kwargs):
            got.update(kwargs)
            return torch.zeros(1, 6)

    pack(monkeypatch, nested([6, 4]), cp=2)  # leaves rank and sizes as they are for the forward
    forward = getattr(plain, "gptmodel_forward_model_engine", None) or plain.gptmodel_forward_no_padding
    forward(Model(), nested([6, 4]), {}, vision_model=True, pad_token_id=0, mtp_enable_train=mtp)
    assert got["position_ids"] is None
    assert got["input_ids"].shape[0] == 2
    assert got["attention_mask"].sum(1).tolist() == [6, 4]


@pytest.mark.parametrize("mtp", [False, True], ids=["plain", "mtp"])
def test_text_model_gets_positions_only_when_mtp_trains(monkeypatch, mtp):
    # C53: [5, 3] on rank 1 of 2
    got = {}

    class Model:
        pre_process, post_process, config = True, False, SimpleNamespace(fp8=None)

        def __call__(self, **kwargs):
            got.update(kwargs)
            return torch.zeros(1, 6)

    _, _, packed = pack(monkeypatch, nested([5, 3]), rank=1, cp=2)  # leaves rank and sizes as they are for the forward
    forward = getattr(plain, "gptmodel_forward_model_engine", None) or plain.gptmodel_forward_no_padding
    forward(Model(), nested([5, 3]), {}, mtp_enable_train=mtp)
    assert got["position_ids"].tolist() == [packed.tolist()] if mtp else got["position_ids"] is None
