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
"""Which tokens a multi-token-prediction (MTP) loss is of, and how many it is a mean over."""

import torch


def tokens_per_cp_rank(num_tokens: torch.Tensor, cp_group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """Mean number of loss tokens of a context-parallel rank; what each rank's part of an MTP loss is divided by.

    Megatron averages gradients and logged losses over the CP ranks. Sums divided by each rank's own count would make
    that a mean of means, which depends on how the tokens fell onto the ranks, and 0/0 on a rank that holds none.

    Args:
        num_tokens: loss tokens of this rank, a scalar of any dtype.
        cp_group: the ranks that share the micro-batch; None for one rank.

    Returns:
        float32 scalar, never 0: where no rank has a token there is no loss to divide either.
    """
    num_tokens = num_tokens.detach().float()
    cp_size = 1 if cp_group is None else torch.distributed.get_world_size(cp_group)
    if cp_size > 1:
        num_tokens = num_tokens.clone()
        torch.distributed.all_reduce(num_tokens, group=cp_group)
    return num_tokens.clamp(min=1) / cp_size


def without_first_tokens(mask: torch.Tensor) -> torch.Tensor:
    """A loss mask without the first token of each sequence, which is no token's next one.

    Rolling wraps it to the end of its sequence, where the sequence would learn to predict its own beginning.

    Args:
        mask: jagged [B, j], any dtype; left as it is.

    Returns:
        jagged [B, j] with the offsets of the mask.

    Raises:
        ValueError: the mask is not a jagged nested tensor.
    """
    if not mask.is_nested or mask.layout != torch.jagged:
        raise ValueError(f"mask must be a jagged nested tensor, got {type(mask).__name__}")
    offsets = mask.offsets()
    # The start of an empty sequence is its neighbour's, or lies behind the last token: a row more takes that one
    values = torch.nn.functional.pad(mask.values(), (0, 1))
    values = values.index_fill(0, offsets[:-1], 0)[:-1]
    return torch.nested.nested_tensor_from_jagged(values, offsets)
