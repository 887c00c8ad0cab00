"""rotary_and_cache: rotary embedding of query and key, and the write of key and value, in one launch."""

from __future__ import annotations

from typing import Any

from ..kernels.rotate_and_scatter import rotate_and_scatter
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan
from .declaration import Array, DType, Written
from .groups import head_groups
from .operation import operation, perform
from .plan import plan_of


def _check(
    positions: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    cos_sin_cache: Operand,
    key_cache: Operand,
    value_cache: Operand,
    slot_mapping: Operand,
    interleaved: bool,
    dtype: Any,
) -> None:
    validate.rows(key, value)
    validate.head_sizes(key, value)
    validate.cache("key_cache", key_cache, "key", key)
    validate.cache("value_cache", value_cache, "value", value)
    validate.same_slots("value_cache", value_cache, "key_cache", key_cache)
    num_tokens, _, head_size = key.shape
    validate.slots(slot_mapping, num_tokens)
    validate.of_type("positions", positions, slot_mapping.dtype_name)
    validate.of_shape("positions", positions, (num_tokens,), "[num_tokens]")
    if len(query.shape) != 3 or query.shape[::2] != (num_tokens, head_size):
        raise ValueError(
            f"`query` must have shape [num_tokens, num_q_heads, head_size], with the {num_tokens} tokens and "
            f"heads of {head_size} of `key`, got {list(query.shape)}"
        )
    value_type = validate.float_type("key", key, dtype)
    others = {"query": query, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    for name, operand in others.items():
        if operand.dtype != key.dtype:
            raise TypeError(f"`{name}` must have the dtype of `key`, {value_type}, got {operand.dtype_name}")
    validate.of_type("cos_sin_cache", cos_sin_cache, "float32")
    if len(cos_sin_cache.shape) != 2 or cos_sin_cache.shape[1] % 2 or cos_sin_cache.shape[1] > head_size:
        raise ValueError(
            "`cos_sin_cache` must have shape [num_positions, rotary_dim] with an even rotary_dim of at most "
            f"{head_size}, the head_size, got {list(cos_sin_cache.shape)}"
        )
    if key_cache.shape[0] * key_cache.shape[1] >= 2**32:
        raise ValueError(f"`key_cache` must have fewer than 2**32 slots, got shape {list(key_cache.shape)}")


def _plan(
    positions: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    cos_sin_cache: Operand,
    key_cache: Operand,
    value_cache: Operand,
    slot_mapping: Operand,
    interleaved: bool,
    dtype: Any,
    alignment: int,
) -> Plan | None:
    num_tokens, num_kv_heads, head_size = key.shape
    value_size, half = value.shape[2], cos_sin_cache.shape[1] // 2
    num_heads = query.shape[1] + num_kv_heads
    if num_tokens == 0 or num_heads == 0:
        return None
    return plan_of(
        rotate_and_scatter,
        {"value": validate.float_type("key", key, dtype), "index": positions.dtype_name},
        head_groups(key.queue, (max(head_size - half, value_size),), num_heads, num_tokens),
        alignment,
        positions=positions,
        query=query,
        key=key,
        value=value,
        cos_sin_cache=cos_sin_cache,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        num_tokens=num_tokens,
        num_mapped=slot_mapping.shape[0],
        num_positions=cos_sin_cache.shape[0],
        num_slots=key_cache.shape[0] * key_cache.shape[1],
        block_size=max(key_cache.shape[1], 1),
        num_q_heads=query.shape[1],
        head_size=head_size,
        value_size=value_size,
        half=half,
        far=1 if interleaved else half,
        near=2 if interleaved else 1,
    )


@operation(_check, _plan, may_overlap=[("key_cache", "value_cache")])
def rotary_and_cache(
    positions: Array,
    query: Written,
    key: Written,
    value: Array,
    cos_sin_cache: Array,
    key_cache: Written,
    value_cache: Written,
    slot_mapping: Array,
    *,
    interleaved: bool = False,
    dtype: DType = None,
) -> None:
    """Rotate `query` and `key` in place and write the rotated key and `value` into their slots.

    The pair ``(x, y)`` of number ``i`` becomes ``(x cos - y sin, y cos + x sin)``, computed in float32, with
    the cosine and the sine of the token's position. [1]_

    Parameters
    ----------
    positions : [num_tokens], int32 or int64
        A token whose position `cos_sin_cache` does not have is left alone and not written.
    query : [num_tokens, num_q_heads, head_size], float32, float16 or bfloat16
        Changed in place.
    key : [num_tokens, num_kv_heads, head_size]
        Changed in place, in the dtype of `query`, as are all arrays below but `cos_sin_cache`.
    value : [num_tokens, num_kv_heads, value_head_size]
    cos_sin_cache : [num_positions, rotary_dim], float32
        As vLLM's: the cosines of a position, then its sines. Where rotary_dim is below head_size, only the
        first rotary_dim elements of each head are rotated.
    key_cache, value_cache : [num_blocks, block_size, num_kv_heads, head_size]
        Changed in place.
    slot_mapping : [num_tokens], in the dtype of `positions`
        As for `reshape_and_cache`. A token without a slot is rotated all the same.
    interleaved
        Whether pair ``i`` is elements ``2 i`` and ``2 i + 1``, as in GPT-J, instead of ``i`` and
        ``i + rotary_dim / 2``, as in GPT-NeoX and Llama.
    dtype
        ``"bfloat16"`` where uint16 arrays hold bfloat16 bits.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    References
    ----------
    .. [1] Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2.2.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, value_cache = kv.empty_cache(4, 16, 1, 2)
    >>> query, key, value = (dpnp.asarray([[[3.0, 4.0]]], dtype="float32") for _ in range(3))
    >>> quarter_turns = dpnp.asarray([[1, 0], [0, 1]], dtype="float32")
    >>> position, slot = dpnp.asarray([1]), dpnp.asarray([17])
    >>> kv.rotary_and_cache(position, query, key, value, quarter_turns, key_cache, value_cache, slot)
    >>> [dpnp.asnumpy(each).tolist() for each in (query, key_cache[1, 1], value_cache[1, 1])]
    [[[[-4.0, 3.0]]], [[-4.0, 3.0]], [[3.0, 4.0]]]
    """
    __tracebackhide__ = True
    given = positions, query, key, value, cos_sin_cache, key_cache, value_cache, slot_mapping
    perform(rotary_and_cache, given, (interleaved, dtype))
