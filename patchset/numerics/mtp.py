"""Multi-token prediction through verl's patch, against plain Megatron-Core a sequence at a time.

Positions are learned and absolute: a wrong one changes every value, where a rotary embedding would hide it. There is a
position for every real token and none more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from verl.models.mcore import mtp_patch

from . import layout, models, reference, toys, upstream
from .comparison import (
    GRADIENT_LIMIT,
    LIMIT,
    Case,
    Difference,
    Topology,
    compare_number,
    compare_tokens,
    compare_weights,
    enter,
)
from .processes import Group
from .reference import TEMPERATURE, Batch

#: (length, tokens of it that are a response) of every sequence; with "few", CP ranks hold no loss token.
BATCHES = {
    "ragged": ((9, 4), (21, 13), (6, 3), (33, 20), (14, 9)),
    "few": ((8, 1), (5, 1), (12, 2)),
}
LONGEST = 33
SCALE = 0.3
BUCKETS = (None, 64, 512)


@dataclass(frozen=True)
class Truth:
    """Right values of one batch. `losses` holds the MTP cross entropy of every position that has a label, else 0."""

    log_probs: list[torch.Tensor]
    losses: list[torch.Tensor]
    mean: float
    gradients: dict[str, torch.Tensor]


_truths: dict[tuple[str, bool], Truth] = {}


def cases(short: bool) -> list[Case]:
    """Every CP size and bucket, with gradients averaged over the ranks and summed over the tokens."""
    found = []
    for topology in (Topology(1), Topology(2), Topology(4)):
        for bucket in (None, 512) if short else BUCKETS:
            for per_token in (False,) if short else (False, True):
                name = "mtp per-token loss" if per_token else "mtp"
                found.append(Case("mtp", name, topology.world, topology, bucket, run, (per_token,)))
    return found


def prepare() -> None:
    """Works out the right values."""
    group = Group(1, limit=60)
    (found,) = group.run(plain_megatron)
    group.close()
    _truths.update(found)


def batch(name: str) -> tuple[Batch, list[torch.Tensor]]:
    """The batch of a name, and its loss masks over whole sequences."""
    made = Batch.of(tuple(length for length, _ in BATCHES[name]), toys.VOCABULARY, seed=3)
    masks = [(torch.arange(length) >= length - response).float() for length, response in BATCHES[name]]
    return made, masks


def build(cp_size: int, per_token: bool) -> GPTModel:
    """The model, drawn from a seed: the same on every rank."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128,
        gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.1, context_parallel_size=cp_size,
        mtp_num_layers=1, mtp_loss_scaling_factor=SCALE, calculate_per_token_loss=per_token, **models.CPU_CONFIG,
    )  # fmt: skip
    layer = models.layer_spec(config)
    head = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    for spec in head.layer_specs:
        spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = models.Norm
    torch.manual_seed(1234)
    return GPTModel(
        config=config, transformer_layer_spec=models.block_spec(config), vocab_size=toys.VOCABULARY,
        max_sequence_length=LONGEST, position_embedding_type="learned_absolute", mtp_block_spec=head,
    ).train()  # fmt: skip


def plain_megatron() -> dict[tuple[str, bool], Truth]:
    """Right values in float64: the model's own modules and cross entropy, nothing packed, nothing rolled by verl."""
    enter(Topology(1))
    model = build(1, per_token=False).double()
    model._postprocess = _hidden_states
    found = {}
    for name in BATCHES:
        for per_token in (False, True):
            found[name, per_token] = _truth(model, name, per_token)
    return found


def _hidden_states(hidden_states: torch.Tensor, mtp_in_postprocess: Any = None, **arguments: Any) -> Any:
    return hidden_states, arguments


def _truth(model: GPTModel, name: str, per_token: bool) -> Truth:
    made, masks = batch(name)
    model.zero_grad()
    log_probs, entropies, losses, weights = [], [], [], []
    for ids, mask in zip(made.ids, masks, strict=True):
        length = len(ids)
        hidden, arguments = model(ids[None], torch.arange(length)[None], None)
        kept = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        both = model.mtp(hidden_states=hidden, embedding=model.embedding, **{key: arguments.get(key) for key in kept})
        main, ahead = both.chunk(2)
        pair = reference.log_probs_of(model.output_layer(main)[0][:, 0] / TEMPERATURE, ids)
        log_probs.append(pair[0])
        entropies.append(pair[1])
        head = model.output_layer.weight if upstream.mtp_trains_head() else model.output_layer.weight.detach()
        # Position p predicts token p+2, which is in the loss if the mask has it
        cross_entropy = F.cross_entropy(ahead[:-2, 0] @ head.T, ids[2:], reduction="none")
        losses.append(F.pad(cross_entropy, (0, 2)))
        weights.append(F.pad(mask[2:], (0, 2)))
    total = torch.stack([(weight * loss).sum() for weight, loss in zip(weights, losses, strict=True)]).sum()
    count = torch.cat(weights).sum()
    # Where Megatron divides by the main loss's tokens later, a mean is a sum times what rolling has lost
    scale = SCALE / count
    if per_token:
        labelled = sum(mask[1:].sum() for mask in masks)
        scale = SCALE * (labelled / count if upstream.mtp_weighs_by_tokens() else 1)
    (reference.loss(made, log_probs, entropies) + scale * total).backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    mean = (total / count).item()
    return Truth([x.detach() for x in log_probs], [x.detach() for x in losses], mean, gradients)


def run(case: Case) -> list[Difference]:
    """`gptmodel_forward_*` with MTP training and its backward pass."""
    (per_token,) = case.options
    assert isinstance(case.topology, Topology)
    enter(case.topology)
    model = build(case.topology.cp, per_token)
    mtp_patch.patch_postprocess(model)
    told: dict[str, Any] = {}
    _watch(model, told)
    found: list[Difference] = []
    for name in BATCHES:
        found += _run(case, model, name, per_token, told)
    return found


def _watch(model: GPTModel, told: dict[str, Any]) -> None:
    """Keeps the packed boundaries, and the MTP cross entropy of every row."""
    model.register_forward_pre_hook(lambda _, __, named: told.update(named), with_kwargs=True)
    cross_entropy = model.compute_language_model_loss

    def watched(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        told["losses"] = cross_entropy(labels, logits)
        return told["losses"]

    def watched_with_layer(
        hidden: torch.Tensor, labels: torch.Tensor, column_parallel_linear: Any, col_linear_kwargs: Any, **unused: Any
    ) -> torch.Tensor:
        return watched(labels, column_parallel_linear(hidden, **col_linear_kwargs)[0])

    model.compute_language_model_loss = watched
    # 0.7.1 calls this method of later Megatron-Cores, which does the same without keeping the logits
    model.compute_output_layer_and_language_model_loss = watched_with_layer


def _run(case: Case, model: GPTModel, name: str, per_token: bool, told: dict[str, Any]) -> list[Difference]:
    right = _truths[name, per_token]
    made, masks = batch(name)
    model.zero_grad()
    MTPLossLoggingHelper.tracker.clear()
    ids = made.nested()
    arguments = {
        "label": ids.clone(),
        "temperature": made.temperatures(),
        "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
    }
    output = upstream.forward(
        model, ids, {}, logits_processor=reference_processor, logits_processor_args=arguments,
        mtp_enable_train=True, bucket=case.bucket,
    )  # fmt: skip
    log_probs = reference.labelled(output["log_probs"])
    loss = reference.loss(made, log_probs, list(output["entropy"].unbind()))
    # As Megatron's schedule does before DDP averages over the CP ranks
    (loss if per_token else loss * mpu.get_context_parallel_world_size()).backward()
    models.reduce_gradients(model, average=not per_token)
    logged: dict[str, torch.Tensor] = {}
    MTPLossLoggingHelper.track_mtp_metrics(loss_scale=1.0, iteration=0, writer=None, total_loss_dict=logged)

    cu_seqlens = told["packed_seq_params"].cu_seqlens_q_padded.tolist()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return [
        compare_tokens("log-probs", log_probs, right.log_probs, LIMIT, cu_seqlens),
        compare_tokens(
            "MTP losses", _own_losses(told["losses"][0], right, cu_seqlens), right.losses, LIMIT, cu_seqlens
        ),
        compare_number("MTP mean", logged["mtp_1 loss"].item(), right.mean, LIMIT),
        compare_weights("gradients", gradients, right.gradients, GRADIENT_LIMIT),
    ]


def _own_losses(losses: torch.Tensor, right: Truth, cu_seqlens: list[int]) -> list[torch.Tensor]:
    """The MTP losses of this rank's rows among the right ones of all others."""
    found = [values.clone() for values in right.losses]
    sequences, positions = layout.rows(
        cu_seqlens, mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    )
    for number, values in enumerate(found):
        own = (sequences == number) & (positions < len(values) - 2)
        values[positions[own]] = losses[own].detach().double()
    return found


def reference_processor(logits: torch.Tensor, label: torch.Tensor, temperature: torch.Tensor) -> dict[str, Any]:
    """Log-probs and entropies of packed rows, without tensor parallelism."""
    logits = logits / temperature.masked_fill(temperature == 0, 1).unsqueeze(-1)
    log_probs = torch.log_softmax(logits, -1)
    own = log_probs.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    return {"log_probs": own, "entropy": -(log_probs.exp() * log_probs).sum(-1)}
