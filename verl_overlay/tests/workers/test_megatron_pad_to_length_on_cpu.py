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
"""The bucket on its way from the engine config into every packing call, and the features that refuse it."""

import inspect
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict

import verl.models.mcore.model_forward as plain
import verl.models.mcore.model_forward_fused as fused
import verl.workers.engine.megatron.transformer_impl as engine_module
from verl.models import mcore
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

LENS = [3, 2]


def make_engine(kind, **config):
    engine = object.__new__(kind)
    options = {
        "use_remove_padding": True,
        "pad_to_length": True,
        "pad_to_length_bucket": 64,
        "use_fused_kernels": False,
        "dynamic_context_parallel": False,
        "router_replay": SimpleNamespace(mode="disabled"),
    }
    engine.engine_config = SimpleNamespace(**{**options, **config})
    engine.enable_routing_replay = engine.engine_config.router_replay.mode != "disabled"
    mtp = SimpleNamespace(enable=False, enable_train=False)
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(), tokenizer=SimpleNamespace(pad_token_id=0), mtp=mtp
    )
    engine.tf_config = SimpleNamespace(calculate_per_token_loss=False)
    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in LENS], layout=torch.jagged)
    engine.prepare_model_inputs = lambda batch: {
        "input_ids": ids,
        "attention_mask": None,
        "multi_modal_inputs": {},
        "loss_mask": ids.clone(),
        "routed_experts": None,
    }
    return engine


def step(engine, **flags):
    """Runs one forward step with the forward function replaced, and returns the keywords that it got."""
    # The fused path takes one temperature for all sequences
    temperatures = torch.ones(1 if flags.get("use_fused_kernels") else len(LENS))
    batch = TensorDict({"temperature": temperatures}, batch_size=temperatures.shape)
    tu.assign_non_tensor(batch, **flags)
    got = {}

    def forward(*args, **kwargs):
        got.update(kwargs)
        return {}

    model = SimpleNamespace(config=SimpleNamespace(), vp_stage=0)
    with ExitStack() as stack:
        for name in dir(mcore):
            if name.startswith("get_mcore_") and name.endswith("_fn"):
                stack.enter_context(patch.object(mcore, name, lambda *_: forward))
                if hasattr(engine_module, name):
                    stack.enter_context(patch.object(engine_module, name, lambda *_: forward))
        stack.enter_context(patch.object(engine_module, "get_device_id", lambda: "cpu"))
        # A fork may have no router replay
        replay = getattr(engine_module, "RouterReplayHelper", None)
        for name in dir(replay):
            if name.startswith("is_"):
                idle = staticmethod(lambda *_, **__: False)
                stack.enter_context(patch.object(replay, name, idle))
        arguments = [iter([batch]), model, None, lambda *_: None]
        if "logits_processor_func" not in inspect.signature(engine.forward_step).parameters:  # verl 0.7
            del arguments[2]
        engine.forward_step(*arguments)
    return got


@pytest.mark.parametrize("kind", [MegatronEngineWithLMHead, MegatronEngineWithValueHead])
@pytest.mark.parametrize(
    ("config", "bucket"),
    [({}, 64), ({"pad_to_length": False}, None), ({"use_remove_padding": False}, None)],
    ids=["on", "off", "no-packing"],
)
def test_step_passes_the_bucket(kind, config, bucket):
    assert step(make_engine(kind, **config))["pad_to_length_bucket"] == bucket


def test_fused_step_passes_the_bucket():
    engine = make_engine(MegatronEngineWithLMHead, use_fused_kernels=True)
    assert step(engine, use_fused_kernels=True)["pad_to_length_bucket"] == 64


def test_router_replay_is_refused():
    engine = make_engine(MegatronEngineWithLMHead, router_replay=SimpleNamespace(mode="R2"))
    with pytest.raises(RuntimeError, match="pad_to_length.*router replay"):
        step(engine)


def test_top_k_distillation_is_refused():
    if "distillation_use_topk" not in inspect.getsource(MegatronEngineWithLMHead):
        pytest.skip("this verl has no top-K distillation")
    with pytest.raises(RuntimeError, match="pad_to_length.*top-K distillation"):
        step(make_engine(MegatronEngineWithLMHead), distillation_use_topk=True)


def test_dynamic_context_parallelism_is_refused():
    if not hasattr(McoreEngineConfig, "dynamic_context_parallel"):
        pytest.skip("this verl has no dynamic context parallelism")
    with pytest.raises(NotImplementedError, match="dynamic_context_parallel.*pad_to_length"):
        config = McoreEngineConfig(dynamic_context_parallel=True, pad_to_length=True, max_seqlen_per_dp_cp_rank=1024)
        # Where the config does not refuse it, the engine does before it is built
        engine_module._check_dcp_unsupported_features(config, SimpleNamespace(model_type="language_model"))


def record_packing(monkeypatch, module):
    """Replaces the packer where a forward function looks it up, and returns the list of its calls' keywords."""
    calls = []
    (name,) = {"preprocess_thd_engine", "preprocess_thd_no_padding"} & set(vars(module))

    def packer(batch, **kwargs):
        calls.append(kwargs)
        return batch.values().unsqueeze(0), SimpleNamespace(), None

    monkeypatch.setattr(module, name, packer)
    monkeypatch.setattr(module, name.replace("pre", "post", 1), lambda output, *_, **__: output)
    return calls


class _Model:
    pre_process = post_process = True
    config = SimpleNamespace(fp8=None)

    def __call__(self, **kwargs):
        return SimpleNamespace(log_probs=torch.zeros(1, 5), entropy=torch.zeros(1, 5))


def _batch():
    return torch.nested.as_nested_tensor([torch.arange(n) for n in LENS], layout=torch.jagged)


@pytest.mark.parametrize("mtp", [False, True])
def test_plain_forward_packs_everything_with_the_bucket(monkeypatch, mtp):
    calls = record_packing(monkeypatch, plain)
    forward = getattr(plain, "gptmodel_forward_model_engine", None) or plain.gptmodel_forward_no_padding
    forward(
        _Model(),
        _batch(),
        {},
        logits_processor=lambda output, **_: {},
        logits_processor_args={"label": _batch(), "loss_mask": _batch(), "temperature": _batch()},
        mtp_enable_train=mtp,
        pad_to_length_bucket=96,
    )
    # input ids, label and temperature for the loss, and with MTP its label and loss mask
    assert [call["pad_to_length_bucket"] for call in calls] == [96] * (5 if mtp else 3)


def test_fused_forward_packs_everything_with_the_bucket(monkeypatch):
    calls = record_packing(monkeypatch, fused)
    make = getattr(fused, "fused_forward_model_engine", None) or fused.fused_forward_no_padding_gen
    make()(_Model(), _batch(), _batch(), {}, 1.0, False, 0, pad_to_length_bucket=96)
    assert [call["pad_to_length_bucket"] for call in calls] == [96, 96]
