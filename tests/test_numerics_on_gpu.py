"""The engine on GPUs: Transformer Engine's attention, FP8 padding, NCCL, and nothing of the CPU's stand-ins.

One GPU: `PYTHONPATH=build/verl-0.9.1 python -m pytest -m gpu tests/test_numerics_on_gpu.py`; with
`torchrun --nproc-per-node 2 -m pytest ...` or 4, the ranks are context-parallel, and tensor-parallel from 4 on.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

torch = pytest.importorskip("torch")

WORLD = int(os.environ.get("WORLD_SIZE", "1"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD or not torch.cuda.is_available(), reason="needs a GPU a rank"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs a patched verl on PYTHONPATH"),
]

#: bfloat16 has 8 bits: log-probs of the toy model come to within 0.04 on a CPU in it. FP8 has 3 or 4.
LIMITS = {"bf16": (0.1, 0.05), "fp8": (0.5, 0.25)}


@pytest.fixture(scope="module")
def rank():
    """This process as a rank of an NCCL group."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update({key: os.environ.get(key, value) for key, value in defaults.items()})
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    yield torch.distributed.get_rank()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def truths(rank, tmp_path_factory):
    """The checkpoint, of which every rank makes its own copy, and the right values of actor and critic."""
    from patchset.numerics import engine, toys

    checkpoint = toys.make(tmp_path_factory.mktemp(f"rank-{rank}"), engine.KIND)
    return checkpoint, {head: engine.truth(checkpoint, head) for head in ("actor", "critic")}


@pytest.mark.parametrize("bucket", [None, 64, 512])
@pytest.mark.parametrize("head", ["actor", "critic"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_training_is_as_near_as_the_precision_allows(truths, precision, head, bucket):
    from patchset.numerics import engine
    from patchset.numerics.comparison import Topology

    tp = 2 if WORLD >= 4 else 1
    topology = Topology(WORLD // tp, tp, sp=tp > 1)
    checkpoint, right = truths
    limit, gradient_limit = LIMITS[precision]
    transformer = {"fp8": "hybrid"} if precision == "fp8" else {}
    machine = engine.Machine("bfloat16", transformer, limit, gradient_limit, update_limit=None)
    variant = engine.Variant(distributed_optimizer=True)
    found = engine.train(machine, checkpoint, head, topology, bucket, right[head], variant)
    assert [difference.where for difference in found if not difference.passed] == []
