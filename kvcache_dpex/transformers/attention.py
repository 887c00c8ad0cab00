"""``attn_implementation="kvcache_dpex"``: attention that reads the blocks of a `PagedCache` in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from .. import torch as kv
from .cache import ATTENTION, HANDLE

_REMEDY = "use another attn_implementation, such as 'sdpa': a PagedCache is then gathered for it"


def register() -> None:
    """Register the attention and its mask with transformers."""
    AttentionInterface.register(ATTENTION, paged_attention_forward)
    AttentionMaskInterface.register(ATTENTION, left_padding)


def left_padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask as attention over blocks needs it: how many tokens at the start of each row are padding.

    Returns
    -------
    Tensor [batch_size + 1], int64, on the CPU, or None where there is none
        The last element is the position of the first key, which is not 0 for another cache with a window.

    Raises
    ------
    NotImplementedError
        The mask is of another kind: not causal, packed, in chunks, or padded elsewhere than at the start.
    """
    if not _is_causal(mask_function):
        raise NotImplementedError(
            f"attention of kvcache_dpex is causal, with or without a sliding window, and this model asks for "
            f"another mask; {_REMEDY}"
        )
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise NotImplementedError(
            "attention of kvcache_dpex takes caches that end with the newest token, not static ones; "
            f"{_REMEDY}"
        )
    if attention_mask is None or attention_mask.all():
        return None
    padding = (attention_mask.long().cumsum(-1) == 0).sum(-1)
    if not torch.equal(attention_mask.sum(-1) + padding, torch.full_like(padding, attention_mask.shape[1])):
        raise NotImplementedError(
            f"attention of kvcache_dpex takes padding on the left only (tokenizer.padding_side = 'left'); or "
            f"{_REMEDY}"
        )
    return torch.cat([padding.cpu(), torch.tensor([int(kv_offset)])])  # read by every layer


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of ``[batch, num_q_heads, tokens, head_size]``, as transformers calls it.

    Raises
    ------
    NotImplementedError
        Something is asked for that reading in place does not give: attention weights, dropout, gradients,
        biases, a mask of another kind.
    """
    _require("dropout", not dropout)
    _require("training", not (torch.is_grad_enabled() and query.requires_grad))
    _require("output_attentions=True", not kwargs.get("output_attentions"))
    _require("a position bias", kwargs.get("position_bias") is None)
    _require("is_causal=False", is_causal is not False and getattr(module, "is_causal", True))
    _require("a mask made elsewhere", attention_mask is None or attention_mask.ndim == 1)
    batch, num_q_heads, count, head_size = query.shape
    options = {
        "scale": scaling,
        "sliding_window": sliding_window,
        "soft_cap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    rows = query.transpose(1, 2).reshape(batch * count, num_q_heads, head_size)
    layer: Any
    layer, *others = {getattr(each, HANDLE, None) for each in (key, value)}
    if others:
        raise NotImplementedError(
            f"this model changes its keys or values after the cache, which blocks cannot follow; {_REMEDY}"
        )
    *padding, first = [0] * (batch + 1) if attention_mask is None else attention_mask.tolist()
    if layer is None:
        padding = [max(pad - first, 0) for pad in padding]
        out = _attend_to_tensors(rows, key, value, padding, **options)
    else:
        out = layer.attend(rows, key, value, None if attention_mask is None else padding, **options)
    return out.view(batch, count, num_q_heads, -1), None


def _attend_to_tensors(
    rows: Tensor, key: Tensor, value: Tensor, padding: list[int], **options: Any
) -> Tensor:
    """Attention to keys and values of another cache: each sequence is a block of its own."""
    batch, _, length, _ = key.shape
    count = len(rows) // batch
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    starts = torch.tensor([0, count], dtype=torch.int32, device=key.device)
    one = torch.zeros((1, 1), dtype=torch.int32, device=key.device)
    out = rows.new_empty((*rows.shape[:2], value.shape[3]))
    for row, pad in enumerate(padding):
        place = slice(row * count, (row + 1) * count)
        lens = torch.tensor([length - pad], dtype=torch.int32, device=key.device)
        shown = slice(min(pad, length - 1), None)  # a block has a token, also where the row is all padding
        blocks = keys[row : row + 1, shown], values[row : row + 1, shown]
        kv.paged_attention(rows[place], *blocks, one, lens, query_start_loc=starts, out=out[place], **options)
    return out


def _is_causal(mask_function: Callable) -> bool:
    """Whether a mask of transformers is causal, with a sliding window or without."""
    if mask_function is causal_mask_function:
        return True
    parts = _closure(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    windows = [_closure(part, "sliding_window_overlay.<locals>.inner_mask") for part in parts]
    return len(parts) == 2 and "sliding_window" in windows[0] and parts[1] is causal_mask_function


def _closure(function: Callable, name: str) -> dict[str, Any]:
    """The variables that a function of this name encloses; none of another function."""
    if getattr(function, "__qualname__", "") != name:
        return {}
    cells = function.__closure__ or ()
    return {variable: cell.cell_contents for variable, cell in zip(function.__code__.co_freevars, cells)}


def _require(what: str, holds: bool) -> None:
    if not holds:
        raise NotImplementedError(f"attention of kvcache_dpex does not support {what}; {_REMEDY}")
