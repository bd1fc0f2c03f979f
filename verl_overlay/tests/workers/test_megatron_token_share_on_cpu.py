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
"""What context-parallel ranks report of a micro-batch's tokens adds up to its tokens."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

import verl.workers.engine.megatron.transformer_impl as transformer_impl

Engine = transformer_impl.MegatronEngineWithLMHead
pytestmark = pytest.mark.skipif(
    not hasattr(Engine, "_routed_num_tokens"), reason="this engine reports no shares of tokens"
)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("lens", [[7], [5, 3, 1], [64], [1]], ids=str)
def test_shares_of_all_ranks_add_up(monkeypatch, lens, cp):
    engine = object.__new__(Engine)
    engine.tf_config = SimpleNamespace(calculate_per_token_loss=True)
    engine.engine_config = SimpleNamespace(
        dynamic_context_parallel=False, use_remove_padding=True, context_parallel_size=cp
    )
    monkeypatch.setattr(engine, "get_data_parallel_group", lambda: None, raising=False)
    ids = torch.nested.as_nested_tensor([torch.zeros(n, dtype=torch.long) for n in lens], layout=torch.jagged)
    data = TensorDict({"input_ids": ids, "num_micro_batch": torch.ones(len(lens))}, batch_size=[len(lens)])
    shares = []
    for rank in range(cp):
        monkeypatch.setattr(transformer_impl.mpu, "get_context_parallel_rank", lambda rank=rank: rank)
        _, share, _ = engine.postprocess_micro_batch_func(
            {}, data, forward_only=False, loss_function=lambda **kwargs: (torch.ones(()), {})
        )
        assert share.dtype == torch.int
        shares.append(share.item())
    assert sum(shares) == sum(lens)
    assert max(shares) - min(shares) <= 1
