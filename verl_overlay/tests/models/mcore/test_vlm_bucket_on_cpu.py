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
"""What a vision model packs by its mask and what is packed for it have one length, with a bucket as well."""

from types import SimpleNamespace

import pytest
import torch

import verl.models.mcore.model_forward as plain
import verl.models.mcore.model_forward_fused as fused
import verl.workers.engine.megatron.transformer_impl as engine_module
from tests.models.mcore.thd_reference import nested, pack
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

LENS = [1200, 1012]


class VisionModel:
    """Packs by its mask, as real ones do: 2,212 rows, whatever the metadata says. A row's value is its token."""

    post_process = pre_process = True
    config = SimpleNamespace(fp8=None)

    def __init__(self, value_head=False):
        self.value_head = value_head

    def __call__(self, input_ids, attention_mask, packed_seq_params, **kwargs):
        assert kwargs["position_ids"] is None
        self.told = packed_seq_params.cu_seqlens_q_padded.tolist()
        rows = input_ids[attention_mask].unsqueeze(0).float()
        if "temperature" in kwargs:
            return SimpleNamespace(log_probs=rows, entropy=rows)
        return rows.unsqueeze(-1) if self.value_head else rows


def forward(monkeypatch, **kwargs):
    pack(monkeypatch, nested([1]))  # one rank
    monkeypatch.setattr("verl.models.mcore.util.mpu.get_context_parallel_group", lambda *_, **__: None)
    function = getattr(plain, "gptmodel_forward_model_engine", None) or plain.gptmodel_forward_no_padding
    model = VisionModel(kwargs.get("value_model", False))
    return model, function(
        model, nested(LENS), {}, vision_model=True, pad_token_id=0, pad_to_length_bucket=512, **kwargs
    )


def test_actor_rows_and_labels_meet(monkeypatch):
    seen = {}

    def log_probs(logits, label):
        assert logits.shape == label.shape
        seen["rows"] = logits.shape[1]
        return {"log_probs": logits}

    model, output = forward(monkeypatch, logits_processor=log_probs, logits_processor_args={"label": nested(LENS)})
    assert seen["rows"] == 2212
    assert model.told == [0, 1200, 2212]
    assert torch.equal(output["log_probs"].values(), nested(LENS).values().float())


def test_value_head_gets_every_token_back(monkeypatch):
    _, output = forward(monkeypatch, value_model=True)
    assert torch.equal(output.values(), nested(LENS).values().float())


def test_fused_forward_leaves_the_bucket_out(monkeypatch):
    calls = []
    (name,) = {"preprocess_thd_engine", "preprocess_thd_no_padding"} & set(vars(fused))
    packer = getattr(fused, name)
    monkeypatch.setattr(fused, name, lambda *a, **k: (calls.append(k["pad_to_length_bucket"]), packer(*a, **k))[1])
    pack(monkeypatch, nested([1]))
    monkeypatch.setattr("verl.models.mcore.util.mpu.get_context_parallel_group", lambda *_, **__: None)
    monkeypatch.setattr(fused, "_use_output_processor_hook", lambda *_: False, raising=False)
    make = getattr(fused, "fused_forward_model_engine", None) or fused.fused_forward_no_padding_gen
    make(True)(VisionModel(), nested(LENS), nested(LENS), {}, 1.0, True, 0, pad_to_length_bucket=512)
    assert calls == [None, None]


class _Stop(Exception):
    """Ends the building of an engine after its configuration was looked at."""


@pytest.mark.parametrize("vision", [False, True])
def test_engine_says_once_that_the_option_has_no_effect(monkeypatch, vision):
    def stop(self):
        raise _Stop

    said = []
    monkeypatch.setattr(MegatronEngine, "_init_device_mesh", stop)
    monkeypatch.setattr(engine_module.logger, "warning", lambda message, *_, **__: said.append(message))
    hf_config = SimpleNamespace(vision_config=1) if vision else SimpleNamespace()
    for _ in range(2):
        with pytest.raises(_Stop):
            MegatronEngine(SimpleNamespace(hf_config=hf_config), McoreEngineConfig(pad_to_length=True), None, None)
    assert said == (["pad_to_length has no effect on vision models"] if vision else [])
