"""merge_attention_states: attention to two sets of tokens, out of the results for each."""

from __future__ import annotations

from typing import Any

from ..kernels.merge_states import merge_states
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan, Result
from .declaration import Array, DType, Written
from .groups import head_groups
from .operation import operation, perform
from .plan import plan_of


def _check(
    out_a: Operand,
    lse_a: Operand,
    out_b: Operand,
    lse_b: Operand,
    dtype: Any,
    out: Operand | None,
    lse: Operand | None,
) -> None:
    value_type = validate.float_type("out_a", out_a, dtype)
    if len(out_a.shape) != 3 or out_a.shape[2] == 0:
        raise ValueError(
            f"`out_a` must have shape [num_tokens, num_q_heads, head_size], with a head_size of at least 1, "
            f"got {list(out_a.shape)}"
        )
    validate.of_shape("out_b", out_b, tuple(out_a.shape), "that of `out_a`")
    for name, values in (("out_b", out_b), ("out", out)):
        if values is not None and validate.float_type(name, values, dtype) != value_type:
            raise TypeError(f"`{name}` must have the dtype of `out_a`, {value_type}, got {values.dtype_name}")
    for name, state in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if state is not None:
            validate.of_type(name, state, "float32")
            validate.of_shape(name, state, tuple(out_a.shape[:2]), "[num_tokens, num_q_heads]")


def _results(out_a: Operand, dtype: Any, **others: Any) -> dict[str, Result]:
    value_type = validate.float_type("out_a", out_a, dtype)
    return {"out": Result(tuple(out_a.shape), value_type), "lse": Result(tuple(out_a.shape[:2]), "float32")}


def _plan(
    out_a: Operand,
    lse_a: Operand,
    out_b: Operand,
    lse_b: Operand,
    dtype: Any,
    out: Operand,
    lse: Operand,
    alignment: int,
) -> Plan | None:
    num_tokens, num_q_heads, head_size = out_a.shape
    if 0 in out_a.shape:
        return None
    return plan_of(
        merge_states,
        {"value": validate.float_type("out_a", out_a, dtype)},
        head_groups(out_a.queue, (head_size,), num_q_heads, num_tokens),
        alignment,
        out_a=out_a,
        lse_a=lse_a,
        out_b=out_b,
        lse_b=lse_b,
        out=out,
        lse=lse,
        num_tokens=num_tokens,
        head_size=head_size,
    )


@operation(_check, _plan, results=_results)
def merge_attention_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    dtype: DType = None,
    out: Written = None,
    lse: Written = None,
) -> Any:
    """Merge attention to two disjoint sets of tokens into attention to all of them.

    A shared prefix, or parts of a long context, can so be attended to separately.

    Parameters
    ----------
    out_a, out_b : [num_tokens, num_q_heads, head_size], float32, float16 or bfloat16
        The two results.
    lse_a, lse_b : [num_tokens, num_q_heads], float32
        The logarithms (base e) of their softmax's denominators, as `paged_attention` returns them; -inf where
        a set is empty, and the values beside it are then not read.
    dtype
        ``"bfloat16"`` where the values are uint16 arrays that hold bfloat16 bits.
    out, lse
        Take the results.

    Returns
    -------
    (array, array)
        `out` and `lse`; new arrays where none are given.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> one = dpnp.ones((2, 4, 8), dtype="float32")
    >>> lse = dpnp.zeros((2, 4), dtype="float32", sycl_queue=one.sycl_queue)
    >>> out, merged = kv.merge_attention_states(one, lse, 3 * one, lse)
    >>> float(out[0, 0, 0]), round(float(merged[0, 0]), 4)
    (2.0, 0.6931)
    """
    __tracebackhide__ = True
    return perform(merge_attention_states, (out_a, lse_a, out_b, lse_b, out, lse), (dtype,))
