"""What paged_attention and merge_attention_states refuse, in which words; nothing is then written."""

import re

import numpy as np
import pytest

from attending import batch
from helpers import to_bytes, to_device
from kvcache_dpex import merge_attention_states, paged_attention
from kvcache_dpex.kernels.intrinsics import LOCAL_WORDS

NAMES = ["query", "key_cache", "value_cache", "block_table", "seq_lens"]


def arguments_of(**changes):
    rng = np.random.default_rng(0)
    arguments, starts = batch(rng, [5, 3], [2, 1], head_size=8)
    named = {**dict(zip(NAMES, arguments)), **starts, **changes}
    return {name: value for name, value in named.items() if value is not None}


def zeros(*shape, dtype="f4"):
    return np.zeros(shape, dtype)


CASES = {
    "query of two axes": (
        {"query": zeros(3, 8)},
        ValueError,
        "`query` must have shape [num_tokens, num_q_heads, head_size], got [3, 8]",
    ),
    "query of integers": (
        {"query": zeros(3, 4, 8, dtype="i4")},
        TypeError,
        "`query` must be float32, float16, or bfloat16 (bits as uint16, with dtype='bfloat16'), got int32",
    ),
    "bits without a dtype": (
        {"query": zeros(3, 4, 8, dtype="u2")},
        TypeError,
        "`query` must be float32, float16, or bfloat16 (bits as uint16, with dtype='bfloat16'), got uint16",
    ),
    "another head size": (
        {"query": zeros(3, 4, 7)},
        ValueError,
        "`query` must have the head_size of `key_cache`, 8, got 7",
    ),
    "heads that do not divide": (
        {"query": zeros(3, 5, 8)},
        ValueError,
        "`query` must have a multiple of the 2 heads of `key_cache`, got 5 heads",
    ),
    "value cache of other blocks": (
        {"value_cache": zeros(4, 4, 2, 8)},
        ValueError,
        "`value_cache` must have the blocks, slots and heads of `key_cache`, [5, 4, 2], got [4, 4, 2]",
    ),
    "value cache of other heads": (
        {"value_cache": zeros(5, 4, 1, 8)},
        ValueError,
        "`value_cache` must have the blocks, slots and heads of `key_cache`, [5, 4, 2], got [5, 4, 1]",
    ),
    "caches of two types": (
        {"value_cache": zeros(5, 4, 2, 8, dtype="f2")},
        TypeError,
        "`value_cache` must have the dtype of `key_cache`, float32, got float16",
    ),
    "int8 without scales": (
        {"key_cache": zeros(5, 4, 2, 8, dtype="i1"), "value_cache": zeros(5, 4, 2, 8, dtype="i1")},
        ValueError,
        "`key_scales` must be given, for `key_cache` is int8, got None",
    ),
    "scales without int8": (
        {"key_scales": zeros(20, 2)},
        ValueError,
        "`key_scales` must be None, for `key_cache` is float32, which has no scales",
    ),
    "block table of int64": (
        {"block_table": zeros(2, 3, dtype="i8")},
        TypeError,
        "`block_table` must be int32, got int64",
    ),
    "lengths of int64": (
        {"seq_lens": zeros(2, dtype="i8")},
        TypeError,
        "`seq_lens` must be int32, got int64",
    ),
    "starts of int64": (
        {"query_start_loc": zeros(3, dtype="i8")},
        TypeError,
        "`query_start_loc` must be int32, got int64",
    ),
    "block table of one axis": (
        {"block_table": zeros(6, dtype="i4")},
        ValueError,
        "`block_table` must have shape [num_seqs, max_blocks], got [6]",
    ),
    "too few lengths": (
        {"seq_lens": zeros(1, dtype="i4")},
        ValueError,
        "`seq_lens` must have shape [num_seqs] = [2], got [1]",
    ),
    "too few starts": (
        {"query_start_loc": zeros(2, dtype="i4")},
        ValueError,
        "`query_start_loc` must have shape [num_seqs + 1] = [3], got [2]",
    ),
    "tokens without starts": (
        {"query_start_loc": None},
        ValueError,
        "`query` must have one token for each of the 2 sequences of `block_table`, got 3; pass "
        "query_start_loc for sequences of several tokens",
    ),
    "fewer tokens than sequences": (
        {"query": zeros(1, 4, 8), "query_start_loc": None},
        ValueError,
        "`query` must have one token for each of the 2 sequences of `block_table`, got 1; pass "
        "query_start_loc for sequences of several tokens",
    ),
    "sinks of another size": (
        {"sinks": zeros(3)},
        ValueError,
        "`sinks` must have shape [num_q_heads] = [4], got [3]",
    ),
    "sinks of another type": (
        {"sinks": zeros(4, dtype="f2")},
        TypeError,
        "`sinks` must be float32, got float16",
    ),
    "window of nothing": (
        {"sliding_window": 0},
        ValueError,
        "`sliding_window` must be at least 1, the token itself, or None, got 0",
    ),
    "soft cap of zero": (
        {"soft_cap": 0.0},
        ValueError,
        "`soft_cap` must be a positive number or None, got 0.0",
    ),
    "scale of NaN": ({"scale": np.nan}, ValueError, "`scale` must be finite, got nan"),
    "out of another shape": (
        {"out": zeros(3, 4, 9)},
        ValueError,
        "`out` must have shape [3, 4, 8], got [3, 4, 9]",
    ),
    "out of another type": (
        {"query": zeros(3, 4, 8, dtype="f2"), "out": zeros(3, 4, 8)},
        TypeError,
        "`out` must have the dtype of `query`, float16, got float32",
    ),
    "lse of another shape": (
        {"lse": zeros(3, 5)},
        ValueError,
        "`lse` must have shape [3, 4], got [3, 5]",
    ),
    "lse of another type": (
        {"lse": zeros(3, 4, dtype="i4")},
        TypeError,
        "`lse` must be float32, got int32",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(queue, case):
    changes, kind, message = CASES[case]
    given = {"out": zeros(3, 4, 8), "lse": zeros(3, 4), **arguments_of(**changes), **changes}
    given = {name: value for name, value in given.items() if value is not None}
    device = {
        name: to_device(value, queue) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    with pytest.raises(kind) as raised:
        paged_attention(**device)
    assert str(raised.value) == message
    for name in ("out", "lse"):
        assert not to_bytes(device[name]).any()


def test_value_heads_too_large_for_a_work_group(queue):
    """Scores and weights of all lanes share the local memory, so a lane has half of the words for each."""
    device = queue.sycl_device
    most = 8 * min(device.max_work_group_size, LOCAL_WORDS // 2)
    given = {**arguments_of(), "value_cache": zeros(5, 4, 2, most + 1)}
    out = to_device(zeros(3, 4, most + 1), queue)
    message = f"`value_cache` must have heads of at most {most} values on {device.name}, got {most + 1}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        paged_attention(**{name: to_device(value, queue) for name, value in given.items()}, out=out)
    assert not to_bytes(out).any()


@pytest.mark.parametrize("name", ["query", "key_cache", "block_table", "seq_lens"])
def test_out_in_the_memory_of_an_argument(queue, name):
    """The result would be unspecified."""
    from kvcache_dpex.runtime.launch import arrays

    device = {key: to_device(value, queue) for key, value in arguments_of().items()}
    usm_ndarray = arrays.tensor_module().usm_ndarray
    whole = to_device(zeros(512), queue)
    given = device[name]
    device[name] = usm_ndarray(given.shape, dtype=given.dtype, buffer=whole.usm_data)
    out = usm_ndarray((3, 4, 8), dtype="f4", buffer=whole.usm_data)
    with pytest.raises(ValueError, match=f"^`out` is written, so it must not share memory with `{name}`"):
        paged_attention(**device, out=out)


def test_what_merging_refuses(queue):
    out, lse = to_device(zeros(3, 4, 8), queue), to_device(zeros(3, 4), queue)
    for arguments, message in (
        ((out[:2], lse, out, lse), "`out_b` must have shape that of `out_a` = [2, 4, 8], got [3, 4, 8]"),
        ((out, lse[:2], out, lse), "`lse_a` must have shape [num_tokens, num_q_heads] = [3, 4], got [2, 4]"),
        (
            (out[0], lse, out, lse),
            "`out_a` must have shape [num_tokens, num_q_heads, head_size], with a head_size of at least 1, "
            "got [4, 8]",
        ),
    ):
        with pytest.raises(ValueError, match=r"^`") as raised:
            merge_attention_states(*arguments)
        assert str(raised.value) == message
    half = to_device(zeros(3, 4, 8, dtype="f2"), queue)
    # A wider result than wanted, so that nothing is written out of bounds where the check is missing.
    for arguments, results, name in (
        ((half, lse, out, lse), {}, "out_b"),
        ((half, lse) * 2, {"out": out}, "out"),
    ):
        with pytest.raises(TypeError, match=r"^`") as raised:
            merge_attention_states(*arguments, **results)
        assert str(raised.value) == f"`{name}` must have the dtype of `out_a`, float16, got float32"
