"""Megatron-Core models for a CPU, with Transformer Engine's parameter names, so that mbridge loads and exports them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mbridge import AutoBridge
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig

from .attention import ReferenceAttention

#: Fusions that want CUDA kernels, and weights drawn on the CPU.
CPU_CONFIG = {
    "use_cpu_initialization": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


class Norm(torch.nn.RMSNorm):
    """RMSNorm that says whether its input is split over the TP ranks; Megatron's own refuses that without a kernel."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class NormLinear(ColumnParallelLinear):
    """A norm and a column-parallel linear layer as one module, as Transformer Engine has them."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
        known = inspect.signature(ColumnParallelLinear.__init__).parameters
        super().__init__(
            input_size, output_size, config=config, **{key: arguments[key] for key in arguments if key in known}
        )
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, rows: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return super().forward(F.rms_norm(rows, rows.shape[-1:], self.layer_norm_weight, self.eps), *arguments, **named)


class _Weights(torch.nn.Module):
    """One matrix an expert: weight0, weight1, ..."""

    def __init__(self, count: int, output_size: int, input_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        for number in range(count):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=dtype))
            # Tells DDP that the TP ranks hold the same expert, with gradients of their own tokens
            weight.allreduce = False
            setattr(self, f"weight{number}", weight)


class Experts(MegatronModule):
    """Gated experts, one after another, each whole on every rank (expert TP and EP 1)."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        width, hidden, dtype = config.moe_ffn_hidden_size, config.hidden_size, config.params_dtype
        self.linear_fc1 = _Weights(num_local_experts, 2 * width, hidden, dtype)
        self.linear_fc2 = _Weights(num_local_experts, hidden, width, dtype)

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probabilities: torch.Tensor) -> Any:
        results = []
        for number, part in enumerate(rows.split(tokens_per_expert.tolist())):
            gate, up = (part @ getattr(self.linear_fc1, f"weight{number}").T).chunk(2, dim=-1)
            results.append((F.silu(gate) * up) @ getattr(self.linear_fc2, f"weight{number}").T)
        return torch.cat(results) * probabilities.unsqueeze(-1), None


def layer_spec(config: Any) -> ModuleSpec:
    """A transformer layer with the reference attention."""
    experts = getattr(config, "num_moe_experts", None)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = ReferenceAttention
    attention.linear_qkv = NormLinear
    layer.input_layernorm = IdentityOp
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if experts:
        layer.mlp = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
        layer.mlp.submodules.experts = ModuleSpec(module=Experts)
        layer.pre_mlp_layernorm = Norm
    else:
        layer.mlp.submodules.linear_fc1 = NormLinear
        layer.pre_mlp_layernorm = IdentityOp
    return spec


def block_spec(config: Any) -> TransformerBlockSubmodules:
    """All layers of a model, and its last norm."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config)] * config.num_layers, layer_norm=Norm)


def install() -> None:
    """Makes mbridge build its models from these layers, wherever it is called from."""

    def transformer_config(**settings: Any) -> TransformerConfig:
        # verl 0.9.0 has it from a critic's engine, and Megatron-Core 0.16 takes it for its models, not for this
        settings.pop("share_embeddings_and_output_weights", None)
        return TransformerConfig(**settings)

    def spec_of_bridge(self: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        return block_spec(self.config)

    LLMBridge.TransformerConfigClass = staticmethod(transformer_config)
    LLMBridge._get_transformer_layer_spec = spec_of_bridge


def build(checkpoint: Path, dtype: torch.dtype, sequence_parallel: bool) -> tuple[Any, Any]:
    """A bridge, and the model of a checkpoint on this rank, in training mode.

    Args:
        checkpoint: as `toys.make` writes it.
        dtype: of the weights and of what is computed with them.
        sequence_parallel: whether rows between TP regions are split over the TP ranks.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_theta = config.rope_parameters["rope_theta"]
    bridge = AutoBridge.from_config(config, dtype=dtype)
    bridge.set_extra_args(**CPU_CONFIG, sequence_parallel=sequence_parallel)
    models = bridge.get_model(weight_path=str(checkpoint), bf16=False, wrap_with_ddp=False)
    return bridge, models[0].train()


def reduce_gradients(model: torch.nn.Module, average: bool = False) -> None:
    """Brings every gradient to what it is for the whole batch, as Megatron does after a backward pass.

    Sums over the CP ranks, which see different rows; and over the TP ranks where these have seen different rows or
    heads with the same weight.

    Args:
        model: after `backward`.
        average: divide by the number of CP ranks, as Megatron's DDP does.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        groups = [mpu.get_context_parallel_group()]
        split = getattr(parameter, "tensor_model_parallel", False)
        partial = getattr(parameter, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name
        if not split and (partial or (".experts." in name and config.sequence_parallel)):
            groups.append(mpu.get_tensor_model_parallel_group())
        for group in groups:
            dist.all_reduce(parameter.grad, group=group)
        if average:
            parameter.grad /= mpu.get_context_parallel_world_size()


def exported_gradients(bridge: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the checkpoint's names, whole on every rank.

    Renaming, merging and splitting weights is linear, so that a gradient goes through it as a weight does.
    """
    weights = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in weights:
        parameter.data = parameter.grad
    found = {name: value.detach().clone() for name, value in bridge.export_weights([model])}
    for parameter, data in weights.items():
        parameter.data = data
    return found
