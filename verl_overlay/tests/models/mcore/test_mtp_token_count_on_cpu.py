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
"""The MTP loss of a micro-batch and its gradient do not depend on how the tokens fell onto the CP ranks."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import verl.models.mcore.mtp_patch as mtp_patch

#: Loss of every row, and whether it counts before and after rolling, on two CP ranks.
LOSSES = [[1.0, 2.0, 3.0, 9.0], [9.0, 9.0, 6.0, 9.0]]
BEFORE = [[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
AFTER = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
SCALE = 0.5


class Head(torch.nn.Module):
    sequence_parallel = False

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return hidden, None


class MTP:
    def forward(self, hidden_states, **kwargs):
        return torch.cat([hidden_states, hidden_states])

    def __call__(self, **kwargs):
        return self.forward(**kwargs)


#: 0.9 holds the count after rolling against the one before, where gradients are summed over tokens.
COUNTS_BEFORE = "original_num_tokens" in inspect.getsource(mtp_patch)


@pytest.fixture
def run(monkeypatch):
    """Runs the loss as one of two ranks; returns what it logs and what it gives to the gradient, row by row."""

    def run(rank, after=AFTER, per_token=False):
        told = SimpleNamespace(logged=None, scaled=None)
        others = [sum(side[1 - rank]) for side in ((BEFORE, after) if COUNTS_BEFORE else (after,))]

        def roll_tensor(tensor, **kwargs):
            rolled = torch.tensor([after[rank]]) if tensor.is_floating_point() else tensor
            return rolled, rolled.sum()

        def all_reduce(count, group=None):
            count += others.pop(0)

        monkeypatch.setattr(mtp_patch, "roll_tensor", roll_tensor)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        monkeypatch.setattr(mtp_patch.parallel_state, "get_data_parallel_group", lambda **kwargs: None)
        monkeypatch.setattr(
            mtp_patch.MTPLossLoggingHelper,
            "save_loss_to_tracker",
            lambda loss, *args, **kwargs: setattr(told, "logged", loss.item()),
        )

        def apply(hidden, scaled):
            told.scaled = scaled
            return hidden

        monkeypatch.setattr(mtp_patch.MTPLossAutoScaler, "apply", apply)
        losses = torch.tensor([LOSSES[rank]])
        model = SimpleNamespace(
            share_embeddings_and_output_weights=False,
            post_process=True,
            training=True,
            cp_group=object(),
            embedding=None,
            mtp=MTP(),
            output_layer=Head(),
            shared_embedding_or_output_weight=lambda: None,
            compute_language_model_loss=lambda labels, logits: losses,
            compute_output_layer_and_language_model_loss=lambda *args, **kwargs: losses,
            config=SimpleNamespace(mtp_num_layers=1, mtp_loss_scaling_factor=SCALE, calculate_per_token_loss=per_token),
        )
        mtp_patch._megatron_gptmodel_postprocess(
            model, torch.zeros(4, 1, 2), None, None, torch.zeros(1, 4, dtype=torch.long), None, None, None,
            mtp_in_postprocess=True, loss_mask=torch.tensor([BEFORE[rank]]),
        )  # fmt: skip
        return told.logged, told.scaled

    return run


def test_mean_over_both_ranks(run):
    # 12 over 4 tokens; the mean of each rank's own mean would be (2 + 6) / 2
    logged, scaled = zip(*(run(rank) for rank in range(2)), strict=True)
    assert sum(logged) / 2 == pytest.approx(12 / 4)
    assert sum(part.sum().item() for part in scaled) / 2 == pytest.approx(SCALE * 12 / 4)


def test_rank_without_a_token(run):
    after = [AFTER[0], [0.0] * 4]
    logged, scaled = zip(*(run(rank, after) for rank in range(2)), strict=True)
    assert sum(logged) / 2 == pytest.approx(6 / 3)
    assert sum(part.sum().item() for part in scaled) / 2 == pytest.approx(SCALE * 6 / 3)


def test_no_rank_has_a_token(run):
    logged, scaled = run(0, [[0.0] * 4] * 2)
    assert (logged, scaled.sum().item()) == (0.0, 0.0)


def test_gradients_that_are_summed_over_tokens(run):
    # Megatron divides by the 5 tokens before rolling; 4 are left
    scaled = [run(rank, per_token=True)[1] for rank in range(2)]
    expected = SCALE * 12 * 5 / 4 if COUNTS_BEFORE else SCALE * 12
    assert sum(part.sum().item() for part in scaled) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "own", "others", "expected"), [(1, 3, 0, 3.0), (2, 3, 1, 2.0), (4, 0, 1, 0.25), (4, 0, 0, 0.25)]
)
def test_tokens_of_a_rank(monkeypatch, ranks, own, others, expected):
    from verl.utils.megatron.mtp_loss import tokens_per_cp_rank

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda count, group=None: count.add_(others))
    count = torch.tensor(own)
    assert tokens_per_cp_rank(count, None if ranks == 1 else object()).item() == expected
    assert count.item() == own
