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
"""The packers as thin callers of one layout: what they cost, and the reports that a loop over sequences got wrong."""

import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from thd_reference import assert_holds, layout, nested, pack, preprocess_thd, util, value

postprocess_thd = getattr(util, "postprocess_thd_engine", None) or util.postprocess_thd_no_padding


def takes(name):
    return name in inspect.signature(preprocess_thd).parameters


def with_bucket(bucket):
    """Keywords for a bucket; the layout comes before the packer takes one."""
    if bucket is not None and not takes("pad_to_length_bucket"):
        pytest.skip("this packer knows no bucket")
    return {"pad_to_length_bucket": bucket} if bucket is not None else {}


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_micro_batch_waits_for_the_device_once(monkeypatch, batch):
    waits = []
    for name in ("tolist", "item", "__int__", "__bool__", "__index__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, name=name, real=real: (waits.append(name), real(self, *a))[1]
        )
    ids = nested([16] * batch)
    waits.clear()
    packed, params, _ = pack(monkeypatch, ids, rank=1, tp=2, cp=4)
    for tensor in (ids.clone(), ids * 2, ids.float()):
        pack(monkeypatch, tensor, rank=1, tp=2, cp=4, need_roll=True)
    monkeypatch.setattr(util.mpu, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *_, **__: None)
    postprocess_thd(packed.unsqueeze(0).float(), params, ids, batch)
    assert waits == ["tolist"]


@pytest.mark.parametrize("lens", [[5, 3], [7], [1, 40, 2]], ids=str)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rolled_labels_and_positions_agree(monkeypatch, cp, lens):
    # C13
    for rank, rows in enumerate(layout(lens, 1, cp).rows):
        labels, _, positions = pack(monkeypatch, nested(lens), rank, cp=cp, need_roll=True)
        for row, (seq, pos) in enumerate(rows):
            if pos < lens[seq]:
                following = (pos + 1) % lens[seq]
                assert (labels[row], positions[row]) == (value(seq, following), following)


@pytest.mark.parametrize("bucket", [None, 512])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_padding_rows_have_no_position_past_their_sequence(monkeypatch, cp, bucket):
    lens = [5, 3, 17]
    for rank, rows in enumerate(layout(lens, 1, cp, bucket=bucket).rows):
        _, _, positions = pack(monkeypatch, nested(lens), rank, cp=cp, **with_bucket(bucket))
        assert all(position < lens[seq] for position, (seq, _) in zip(positions.tolist(), rows, strict=True))


@pytest.mark.parametrize(("least", "rows"), [(7, 8), (65, 68)])
def test_least_rows_keep_rows_divisible(monkeypatch, least, rows):
    if not takes("min_local_rows"):
        pytest.skip("this verl has no minimum of local rows")
    packed, _, _ = pack(monkeypatch, nested([10]), tp=2 if least == 65 else 1, cp=2, min_local_rows=least)
    assert packed.shape == (rows,)


@pytest.mark.parametrize(("kwargs", "rows"), [({"use_fp8_padding": True}, 256), ({"pad_to_length_bucket": 512}, 512)])
def test_mindspeed_is_told_positions_after_all_padding(monkeypatch, kwargs, rows):
    # C90: it was told 32 positions for 256 rows
    if not hasattr(util, "preprocess_for_mindspeed"):
        pytest.skip("this verl has no MindSpeed hook")
    told, kwargs = {}, kwargs | with_bucket(kwargs.get("pad_to_length_bucket"))
    for name, functions in {
        "mindspeed": {},
        "mindspeed.core": {},
        "mindspeed.core.context_parallel": {},
        "mindspeed.core.context_parallel.get_batch_utils": {"set_actual_seq_len": lambda x: told.update(lens=x)},
        "mindspeed.utils": {"set_position_ids": lambda x: told.update(positions=x)},
    }.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(util, "is_npu_available", True)
    packed, params, _ = pack(monkeypatch, nested([5, 3]), tp=2, **kwargs)
    assert packed.shape == (rows,)
    assert told["positions"].numel() == rows
    assert told["lens"].tolist() == params.cu_seqlens_q_padded.tolist()


@pytest.mark.parametrize("fresh", [False, True], ids=["same-boundaries", "copied-boundaries"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_unpacking_gives_every_token_back_and_gradients_to_own_rows(monkeypatch, cp, fresh):
    lens, dims, bucket = [5, 3, 40], (3,), with_bucket(100) if takes("pad_to_length_bucket") else {}
    batch = nested(lens, dims, torch.float64)
    packs = [pack(monkeypatch, batch, rank, tp=2, cp=cp, **bucket) for rank in range(cp)]
    monkeypatch.setattr(util.mpu, "get_context_parallel_group", lambda: "group")

    def all_gather(outputs, own, group):
        assert group == "group"
        assert not own.requires_grad
        for output, (rows, _, _) in zip(outputs, packs, strict=True):
            output.copy_(rows.unsqueeze(0))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    weights = torch.rand(sum(lens), *dims, dtype=torch.float64)
    for rank, (rows, params, _) in enumerate(packs):
        monkeypatch.setattr(util.mpu, "get_context_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(util.mpu, "get_context_parallel_world_size", lambda: cp)
        if fresh:
            params = SimpleNamespace(cu_seqlens_q_padded=params.cu_seqlens_q_padded.clone())
        own = rows.unsqueeze(0).clone().requires_grad_()
        back = postprocess_thd(own, params, batch, len(lens))
        assert back.is_nested
        assert back.dtype == torch.float64
        assert torch.equal(back.values(), batch.values())
        assert torch.equal(back.offsets(), batch.offsets())
        (grad,) = torch.autograd.grad((back.values() * weights).sum(), own)
        weighted = torch.nested.nested_tensor_from_jagged(weights, batch.offsets())
        wanted, _, _ = pack(monkeypatch, weighted, rank, tp=2, cp=cp, **bucket)
        assert torch.equal(grad[0], wanted)


def test_value_heads_shape(monkeypatch):
    # The value model squeezes the last dimension of what it gets back
    batch = nested([5, 3])
    rows, params, _ = pack(monkeypatch, batch, tp=4)
    monkeypatch.setattr(util.mpu, "get_context_parallel_group", lambda: None)
    back = postprocess_thd(rows.float().reshape(1, -1, 1), params, batch, 2)
    assert torch.equal(back.squeeze(-1).values(), batch.values().float())


def test_what_is_no_jagged_batch_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="must be a jagged nested tensor"):
        pack(monkeypatch, torch.zeros(2, 3))


def test_contiguous_rows_need_a_megatron_core_that_knows_of_them(monkeypatch):
    # C32
    if not takes("cp_layout"):
        pytest.skip("this verl has no contiguous layout")
    monkeypatch.setattr(util, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", False, raising=False)
    with pytest.raises(ValueError, match="PackedSeqParams.cp_partition_mode"):
        pack(monkeypatch, nested([5, 3]), cp=2, cp_layout="contiguous")


def test_dynamic_context_parallelism_goes_by_its_own_size_and_group(monkeypatch):
    if not takes("local_cp_size"):
        pytest.skip("this verl has no dynamic context parallelism")
    lens, ranks = [7, 3], {}
    monkeypatch.setattr(
        util.mpu, "get_dynamic_data_context_parallel_groups", lambda group_size: f"of {group_size}", raising=False
    )
    # Megatron-Core 0.16.1's class has no fields for it
    monkeypatch.setattr(util, "PackedSeqParams", lambda **kwargs: SimpleNamespace(**kwargs))
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        ranks[rank] = pack(monkeypatch, nested(lens), cp=1, local_cp_size=2)
        rows = layout(lens, 1, 2).rows[rank]
        assert_holds(ranks[rank][0], [value(seq, pos) if pos < lens[seq] else 0 for seq, pos in rows])
    params = ranks[0][1]
    assert (params.local_cp_size, params.cp_group) == (2, "of 2")

    def all_gather(outputs, own, group):
        assert group == "of 2"
        for output, (packed, _, _) in zip(outputs, ranks.values(), strict=True):
            output.copy_(packed.unsqueeze(0))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    back = postprocess_thd(ranks[1][0].unsqueeze(0), params, nested(lens), 2, local_cp_size=2)
    assert torch.equal(back.values(), nested(lens).values())
