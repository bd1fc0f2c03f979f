"""What the tree under test calls the functions that are compared; the names differ between the pins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl.models.mcore import model_forward, model_forward_fused, mtp_patch, util


def _first(module: ModuleType, *names: str) -> str:
    found = next((name for name in names if hasattr(module, name)), None)
    if found is None:
        raise ImportError(f"{module.__name__} has none of {', '.join(names)}: not a verl that is known here")
    return found


#: The packer, in `util` and wherever it is imported from there.
PACKER = _first(util, "preprocess_thd_engine", "preprocess_thd_no_padding")

_FORWARD = _first(model_forward, "gptmodel_forward_model_engine", "gptmodel_forward_no_padding")
_FUSED = _first(model_forward_fused, "fused_forward_model_engine", "fused_forward_no_padding_gen")

#: Modules that call the packer by a name of their own.
CALLERS = tuple(module for module in (model_forward, model_forward_fused) if hasattr(module, PACKER))


def forward(*arguments: Any, bucket: int | None, **named: Any) -> Any:
    """The forward pass with packing, `gptmodel_forward_*`."""
    return getattr(model_forward, _FORWARD)(*arguments, **_bucket(bucket), **named)


def fused_forward(*arguments: Any, bucket: int | None, **named: Any) -> Any:
    """The forward pass with packing and the log-probs taken in the model."""
    inner: Callable[..., Any] = getattr(model_forward_fused, _FUSED)(False)
    return inner(*arguments, **_bucket(bucket), **named)


def has_bucket() -> bool:
    """Whether the tree can be asked for a bucket at all."""
    return "pad_to_length_bucket" in inspect.signature(getattr(model_forward, _FORWARD)).parameters


def _bucket(bucket: int | None) -> dict[str, int | None]:
    return {"pad_to_length_bucket": bucket} if has_bucket() else {}


def mtp_trains_head() -> bool:
    """Whether the MTP loss reaches the output layer; 0.8.0 on cuts it off there."""
    return "functional_call" not in inspect.getsource(mtp_patch)


def mtp_weighs_by_tokens() -> bool:
    """Whether the MTP gradient makes up for the tokens that rolling loses, where gradients are summed over tokens."""
    return "original_num_tokens" in inspect.getsource(mtp_patch)


def runs_engine() -> bool:
    """Whether the tree's engine can run as a whole, as that of 0.8 on can."""
    return _FORWARD == "gptmodel_forward_model_engine"
