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
"""Bucketed packed lengths under every topology, against a layout written from its definition."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from thd_reference import assert_holds, layout, nested, pack, preprocess_thd, takes_bucket, util, value


def skip_without_bucket(bucket):
    if bucket is not None and not takes_bucket:
        pytest.skip("this packer knows no bucket")


BATCHES = [[1], [10], [700, 37], [5, 3, 1], [1000, 1]]


def check_rank(monkeypatch, lens, rank, tp, cp, fp8, bucket):
    skip_without_bucket(bucket)
    expected = layout(lens, tp, cp, fp8, bucket)
    rows = expected.rows[rank]
    kwargs = {"use_fp8_padding": fp8, **({"pad_to_length_bucket": bucket} if bucket else {})}
    packed, params, positions = pack(monkeypatch, nested(lens), rank, tp, cp, **kwargs)

    bounds = expected.cu_seqlens
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == bounds
    assert params.max_seqlen_q == params.max_seqlen_kv == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    assert packed.shape == positions.shape == (len(rows),)
    assert len(rows) % tp == 0 and (cp == 1 or len(rows) % 2 == 0)

    real = torch.tensor([pos < lens[seq] for seq, pos in rows])
    assert_holds(packed[real], [value(seq, pos) for seq, pos in rows if pos < lens[seq]])
    assert not packed[~real].any(), "padding rows hold zeros"


@pytest.mark.parametrize("bucket", [None, 64, 100, 512])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_every_rank_of_every_topology(monkeypatch, cp, tp, fp8, bucket):
    for lens in BATCHES:
        for rank in {0, 1 % cp, cp // 2, cp - 1}:
            check_rank(monkeypatch, lens, rank, tp, cp, fp8, bucket)


# (tp, cp, lens, bucket, padded boundaries), worked out by hand
REPORTED = [
    pytest.param(1, 8, [10], 24, [0, 48], id="C20-bucket-no-multiple-of-2cp"),
    pytest.param(4, 4, [700, 37], 1000, [0, 704, 4000], id="C21-bucket-no-multiple-of-2cp-tp"),
    pytest.param(2, 8, [10], 512, [0, 512], id="C22-default-bucket-short-sequence"),
    pytest.param(2, 2, [1000, 1], 512, [0, 1000, 1024], id="C24-default-bucket-one-token-last"),
    pytest.param(16, 1, [700, 37], 1000, [0, 704, 2000], id="C27-total-divisible-by-tp"),
    pytest.param(2, 2, [9], 10, [0, 40], id="bucket-10"),
    pytest.param(3, 1, [600], 512, [0, 1536], id="tp-3"),
]


@pytest.mark.parametrize(("tp", "cp", "lens", "bucket", "bounds"), REPORTED)
def test_reported_buckets(monkeypatch, tp, cp, lens, bucket, bounds):
    skip_without_bucket(bucket)
    for rank in range(cp):
        packed, params, _ = pack(monkeypatch, nested(lens), rank, tp, cp, pad_to_length_bucket=bucket)
        assert params.cu_seqlens_q_padded.tolist() == bounds
        assert packed.shape == (bounds[-1] // cp,)
        check_rank(monkeypatch, lens, rank, tp, cp, False, bucket)


@pytest.mark.parametrize("lens", [[1013, 9], [700, 301], [512, 1], [900, 124]], ids=str)
def test_different_batches_share_a_length(monkeypatch, lens):
    skip_without_bucket(512)
    packed, _, _ = pack(monkeypatch, nested(lens), tp=2, pad_to_length_bucket=512)
    assert packed.shape == (1024,)


# (tp, cp, lens, fp8, padded boundaries) of reports that need no bucket
UNBUCKETED = [
    pytest.param(1, 2, [5], True, [0, 512], id="C02-fp8-short-sequence"),
    pytest.param(1, 4, [698], False, [0, 704], id="C07"),
    pytest.param(1, 2, [7], False, [0, 8], id="C08-last-real-token-survives"),
    pytest.param(1, 2, [1], False, [0, 4], id="C10-one-token"),
    pytest.param(1, 2, [16, 16], False, [0, 16, 32], id="C11-labels-across-chunks"),
    pytest.param(1, 2, [5, 3], False, [0, 8, 12], id="C13-positions-roll-along"),
    pytest.param(1, 2, [6, 9], False, [0, 8, 20], id="C61"),
    pytest.param(16, 4, [38], False, [0, 128], id="C40-much-shorter-than-its-slot"),
    pytest.param(2, 2, [2], False, [0, 8], id="C42-two-tokens"),
    pytest.param(1, 2, [7, 5], False, [0, 8, 16], id="C103"),
    pytest.param(4, 1, [31936], True, [0, 32256], id="C87-fp8-total-per-tp-rank"),
    pytest.param(2, 1, [1436] * 7 + [1434], True, [*range(0, 10081, 1440), 11520], id="C88-fp8-total"),
]


@pytest.mark.parametrize(("tp", "cp", "lens", "fp8", "bounds"), UNBUCKETED)
def test_reported_batches_without_bucket(monkeypatch, tp, cp, lens, fp8, bounds):
    for rank in range(cp):
        _, params, _ = pack(monkeypatch, nested(lens), rank, tp, cp, use_fp8_padding=fp8)
        assert params.cu_seqlens_q_padded.tolist() == bounds
        check_rank(monkeypatch, lens, rank, tp, cp, fp8, None)


@pytest.mark.parametrize("bucket", [None, 512])
@pytest.mark.parametrize(("cp", "lens"), [(2, [1]), (1, [600]), (4, [3, 40])])
def test_trailing_dimensions(monkeypatch, cp, lens, bucket):
    skip_without_bucket(bucket)
    expected = layout(lens, 1, cp, False, bucket)
    for rank, rows in enumerate(expected.rows):
        kwargs = {"pad_to_length_bucket": bucket} if bucket else {}
        packed, _, _ = pack(monkeypatch, nested(lens, dims=(6, 2)), rank, 1, cp, **kwargs)
        assert packed.shape == (len(rows), 6, 2)
        wanted = torch.tensor([value(seq, pos) if pos < lens[seq] else 0 for seq, pos in rows])
        assert torch.equal(packed, wanted[:, None, None].expand(-1, 6, 2))


@pytest.mark.parametrize(
    ("tp", "bucket", "bounds"),
    [(1, None, [0, 6, 10, 20]), (1, 12, [0, 6, 10, 24]), (3, 16, [0, 6, 12, 48])],
    ids=["C30-no-bucket", "bucket-12", "tp-3-bucket-16"],
)
def test_contiguous_layout_aligns_to_tp_and_cp(monkeypatch, tp, bucket, bounds):
    skip_without_bucket(bucket)
    if "cp_layout" not in inspect.signature(preprocess_thd).parameters:
        pytest.skip("this verl has no contiguous layout")
    lens = [5, 3, 9]
    # Megatron-Core's class has no partition mode before 0.17
    monkeypatch.setattr(util, "PackedSeqParams", lambda **kwargs: SimpleNamespace(**kwargs))
    monkeypatch.setattr(util, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", True, raising=False)
    held = []
    for rank in range(2):
        packed, params, _ = pack(
            monkeypatch, nested(lens), rank, tp, cp=2, pad_to_length_bucket=bucket, cp_layout="contiguous"
        )
        assert params.cu_seqlens_q_padded.tolist() == bounds
        assert packed.shape == (bounds[-1] // 2,)
        held += packed.tolist()
    wanted = [0] * bounds[-1]
    for seq, length in enumerate(lens):
        wanted[bounds[seq] : bounds[seq] + length] = [value(seq, pos) for pos in range(length)]
    assert held == wanted


def test_minimum_of_local_rows_comes_before_the_bucket(monkeypatch):
    skip_without_bucket(512)
    if "min_local_rows" not in inspect.signature(preprocess_thd).parameters:
        pytest.skip("this verl has no minimum of local rows")
    packed, params, _ = pack(monkeypatch, nested([10]), tp=1, cp=2, min_local_rows=65, pad_to_length_bucket=64)
    assert params.cu_seqlens_q_padded.tolist() == [0, 192]
    assert packed.shape == (96,)


@pytest.mark.parametrize("bucket", [0, -512])
def test_packer_refuses_a_bucket_that_is_not_positive(monkeypatch, bucket):
    skip_without_bucket(bucket)
    with pytest.raises(ValueError, match="pad_to_length_bucket"):
        pack(monkeypatch, nested([5]), pad_to_length_bucket=bucket)
