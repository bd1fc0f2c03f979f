"""verl's forward pass and its gradients, plain and fused, against Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.models.mcore import model_forward_fused
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

from . import models, reference, toys, upstream
from .comparison import (
    DOUBLE_GRADIENT_LIMIT,
    DOUBLE_LIMIT,
    GRADIENT_LIMIT,
    LIMIT,
    Case,
    Difference,
    Topology,
    compare_tokens,
    compare_weights,
    enter,
)
from .processes import Group
from .reference import TEMPERATURE, Batch, Truth

#: Lengths that pack into every kind of row: ragged; hardly any, so that ranks hold padding alone; long and then short.
BATCHES = {"ragged": (7, 19, 3, 33, 12), "tiny": (1, 2, 1), "uneven": (61, 1, 5)}
BUCKETS = (None, 64, 100, 512)
TOPOLOGIES = (
    Topology(1), Topology(2), Topology(4), Topology(1, 2), Topology(1, 2, True), Topology(2, 2), Topology(2, 2, True),
)  # fmt: skip

#: Made before the processes are forked: checkpoints by kind, and right values by kind, batch and precision.
_checkpoints: dict[str, Path] = {}
_truths: dict[tuple[str, str, torch.dtype], Truth] = {}


def cases(short: bool) -> list[Case]:
    """All of it, or what fits into the time of a pin that isn't the main one."""
    topologies = (Topology(1), Topology(2), Topology(2, 2, True)) if short else TOPOLOGIES
    found = []
    for topology in topologies:
        for bucket in (None, 100) if short else BUCKETS:
            for kind in ("qwen3",) if short else toys.KINDS:
                if kind == "qwen3-moe" and topology.tp > 1 and not topology.sp:
                    # Megatron trains experts on TP ranks with sequence parallelism only
                    continue
                found.append(_case("forward", kind, topology, bucket, run_plain))
            # The kernel leaves adding up the hidden states' gradients to sequence parallelism
            if topology.tp == 1 or topology.sp:
                found.append(_case("fused", "qwen3", topology, bucket, run_fused))
    if not short:
        found.append(_case("forward", "qwen3", Topology(2, 2, True), 100, run_plain, torch.float64))
    return found


def _case(
    family: str, kind: str, topology: Topology, bucket: int | None, run: Callable[[Case], list[Difference]],
    dtype: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    name = kind if dtype == torch.float32 else f"{kind} {str(dtype).split('.')[1]}"
    return Case(family, name, topology.world, topology, bucket, run, (kind, dtype))


def prepare(checkpoints: dict[str, Path], cases: list[Case]) -> None:
    """Works out the right values of what the cases compare."""
    _checkpoints.update(checkpoints)
    wanted = {case.options for case in cases if case.run in (run_plain, run_fused)}
    for kind, dtype in wanted:
        if dtype == torch.float64:
            continue
        model = reference.load(checkpoints[kind])
        for name in BATCHES:
            _truths[kind, name, dtype] = reference.truth(model, batch(name))
    for kind, dtype in wanted:
        if dtype == torch.float64:
            # Hugging Face takes norms and rotations in float32, which is not exact enough here
            group = Group(1, limit=60)
            (found,) = group.run(plain_megatron, kind)
            group.close()
            _truths.update({(kind, name, dtype): truth for name, truth in found.items()})


def batch(name: str) -> Batch:
    """The batch of a name."""
    return Batch.of(BATCHES[name], toys.VOCABULARY)


def plain_megatron(kind: str) -> dict[str, Truth]:
    """Right values in float64 from Megatron-Core's model alone, a sequence at a time, without packing."""
    enter(Topology(1))
    bridge, model = models.build(_checkpoints[kind], torch.float64, sequence_parallel=False)
    found = {}
    for name in BATCHES:
        model.zero_grad()
        made, log_probs, entropies = batch(name), [], []
        for ids in made.ids:
            logits = model(ids[None], torch.arange(len(ids))[None], None)[0]
            pair = reference.log_probs_of(logits / TEMPERATURE, ids)
            log_probs.append(pair[0])
            entropies.append(pair[1])
        reference.loss(made, log_probs, entropies).backward()
        models.reduce_gradients(model)
        values = [x.detach() for x in log_probs], [x.detach() for x in entropies]
        found[name] = Truth(*values, models.exported_gradients(bridge, model))
    return found


def run_plain(case: Case) -> list[Difference]:
    """`gptmodel_forward_*` with log-probs and entropies taken from the logits as the engine does."""

    def forward(model: Any, made: Batch) -> Any:
        ids = made.nested()
        arguments = {"label": ids.clone(), "temperature": made.temperatures()}
        return upstream.forward(
            model, ids, {}, logits_processor=_from_logits, logits_processor_args=arguments, bucket=case.bucket
        )

    return _run(case, forward)


def _from_logits(logits: torch.Tensor, label: torch.Tensor, temperature: torch.Tensor) -> dict[str, torch.Tensor]:
    # Padding rows have temperature 0
    logits = logits / temperature.masked_fill(temperature == 0, 1).unsqueeze(-1).to(logits.dtype)
    entropy = vocab_parallel_entropy(logits)
    # verl's cross entropy works in place
    return {"log_probs": vocab_parallel_log_probs_from_logits(logits.clone(), label), "entropy": entropy}


def run_fused(case: Case) -> list[Difference]:
    """The fused forward, with its Triton kernel replaced by the same formula."""
    model_forward_fused.linear_cross_entropy = linear_cross_entropy

    def forward(model: Any, made: Batch) -> Any:
        ids = made.nested()
        model_forward_fused.patch_fused_forward(model)
        try:
            return upstream.fused_forward(model, ids, ids.clone(), {}, TEMPERATURE, True, 0, bucket=case.bucket)
        finally:
            model_forward_fused.unpatch_fused_forward(model)

    return _run(case, forward)


class _GatherVocabulary(torch.autograd.Function):
    """Logits of all TP ranks, which all take the same loss of them: the gradient is the own part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, reduction: str, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the labels, one value a row; what verl's kernel of this name computes."""
    logits = _GatherVocabulary.apply(hidden.reshape(-1, hidden.shape[-1]) @ weight.T, group) / temperature
    log_probs = torch.log_softmax(logits.float(), -1)
    own = log_probs.gather(-1, labels.reshape(-1, 1)).squeeze(-1)
    return own, -(log_probs.exp() * log_probs).sum(-1)


_built: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def _model(kind: str, dtype: torch.dtype, topology: Topology) -> tuple[Any, Any]:
    """The model of a topology; the last one is kept, since buckets follow one another."""
    enter(topology)
    key = (kind, dtype, topology)
    if key not in _built:
        _built.clear()
        _built[key] = models.build(_checkpoints[kind], dtype, topology.sp)
    return _built[key]


def _run(case: Case, forward: Callable[[Any, Batch], Any]) -> list[Difference]:
    kind, dtype = case.options
    assert isinstance(case.topology, Topology)
    bridge, model = _model(kind, dtype, case.topology)
    limit, gradient_limit = LIMIT, GRADIENT_LIMIT
    if dtype == torch.float64:
        limit, gradient_limit = DOUBLE_LIMIT, DOUBLE_GRADIENT_LIMIT
    found: list[Difference] = []
    for name in BATCHES:
        made, right = batch(name), _truths[kind, name, dtype]
        told: dict[str, Any] = {}
        watch = model.register_forward_pre_hook(lambda _, __, named, told=told: told.update(named), with_kwargs=True)
        model.zero_grad()
        output = forward(model, made)
        watch.remove()
        cu_seqlens = told["packed_seq_params"].cu_seqlens_q_padded.tolist()
        log_probs, entropies = reference.labelled(output["log_probs"]), list(output["entropy"].unbind())
        reference.loss(made, log_probs, entropies).backward()
        models.reduce_gradients(model)
        got = models.exported_gradients(bridge, model)
        found.append(compare_tokens("log-probs", log_probs, right.log_probs, limit, cu_seqlens))
        found.append(compare_tokens("entropies", entropies, right.entropies, limit, cu_seqlens))
        found.append(compare_weights("gradients", got, right.gradients, gradient_limit))
    return found
