"""slot_mapping and get_batch_indices_positions: where the tokens of a batch belong, on the device."""

from __future__ import annotations

from typing import Any

from ..kernels.token_places import token_places
from ..kernels.token_slots import token_slots
from ..layout import whole_number
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan, Result
from .declaration import Array, Int, Written
from .groups import group_limit, round_up
from .operation import operation, perform
from .plan import plan_of


def _check(
    block_table: Operand,
    positions: Operand,
    block_size: Any,
    batch_indices: Operand | None,
    query_start_loc: Operand | None,
    seq_lens: Operand | None,
    kv_indptr: Operand | None,
    window: Any,
    num_sinks: Any,
    out: Operand | None,
) -> None:
    axes = "[num_seqs, max_blocks]" if kv_indptr is None else "[num_indices]"
    if len(block_table.shape) != (2 if kv_indptr is None else 1):
        raise ValueError(f"`block_table` must have shape {axes}, got {list(block_table.shape)}")
    for name, operand in (("block_table", block_table), ("positions", positions), ("out", out)):
        if operand is not None:
            _require_integers(name, operand)
    given = {"batch_indices": batch_indices, "query_start_loc": query_start_loc, "seq_lens": seq_lens}
    for name, operand in {**given, "kv_indptr": kv_indptr}.items():
        if operand is not None:
            validate.of_type(name, operand, block_table.dtype_name)
    if len(positions.shape) != 1:
        raise ValueError(f"`positions` must have shape [num_tokens], got {list(positions.shape)}")
    num_tokens, num_seqs = positions.shape[0], _num_seqs(block_table, kv_indptr)
    if batch_indices is not None and query_start_loc is not None:
        raise ValueError("`batch_indices` and `query_start_loc` say the same: pass one of them, got both")
    if batch_indices is not None:
        validate.of_shape("batch_indices", batch_indices, (num_tokens,), "[num_tokens]")
    if query_start_loc is not None:
        validate.of_shape("query_start_loc", query_start_loc, (num_seqs + 1,), "[num_seqs + 1]")
    if seq_lens is not None:
        validate.of_shape("seq_lens", seq_lens, (num_seqs,), "[num_seqs]")
    whole_number("num_sinks", num_sinks, least=0)
    most = whole_number("block_size", block_size, least=1) * max(block_table.shape[-1], 1)
    if window is not None:
        most = max(most, whole_number("window", window, least=1) + num_sinks)
    if most >= 2**32:
        raise ValueError(
            f"`block_table` and `window` must hold fewer than 2**32 tokens a sequence, got {most}"
        )


def _require_integers(name: str, operand: Operand) -> None:
    if operand.dtype_name not in ("int32", "int64"):
        raise TypeError(f"`{name}` must be int32 or int64, got {operand.dtype_name}")


def _num_seqs(block_table: Operand, kv_indptr: Operand | None) -> int:
    if kv_indptr is None:
        return block_table.shape[0]
    if len(kv_indptr.shape) != 1 or kv_indptr.shape[0] == 0:
        raise ValueError(f"`kv_indptr` must have shape [num_seqs + 1], got {list(kv_indptr.shape)}")
    return kv_indptr.shape[0] - 1


def _results(positions: Operand, **others: Any) -> dict[str, Result]:
    return {"out": Result(tuple(positions.shape), "int64")}


def _plan(
    block_table: Operand,
    positions: Operand,
    block_size: int,
    batch_indices: Operand | None,
    query_start_loc: Operand | None,
    seq_lens: Operand | None,
    kv_indptr: Operand | None,
    window: int | None,
    num_sinks: int,
    out: Operand,
    alignment: int,
) -> Plan | None:
    num_tokens, num_seqs = positions.shape[0], _num_seqs(block_table, kv_indptr)
    if num_tokens == 0:
        return None
    if kv_indptr is not None:
        (count,), (step,) = block_table.shape, block_table.strides
        block_table = block_table._replace(shape=(1, count), strides=(0, step))
    slot_type = out.dtype_name
    return plan_of(
        token_slots,
        {"table": block_table.dtype_name, "position": positions.dtype_name, "slot": slot_type},
        _groups(positions),
        alignment,
        block_table=block_table,
        positions=positions,
        batch_indices=batch_indices,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        kv_indptr=kv_indptr,
        out=out,
        indexed=int(batch_indices is not None),
        started=int(query_start_loc is not None),
        limited=int(seq_lens is not None),
        compressed=int(kv_indptr is not None),
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_columns=block_table.shape[1],
        block_size=block_size,
        window=window or 0,
        num_sinks=num_sinks,
        num_blocks=(2**31 if slot_type == "int32" else 2**63 - 1) // block_size,
    )


def _groups(tokens: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    width = min(group_limit(tokens.queue.sycl_device), 64, round_up(tokens.shape[0], 8))
    return (round_up(tokens.shape[0], width),), (width,)


@operation(_check, _plan, results=_results)
def slot_mapping(
    block_table: Array,
    positions: Array,
    block_size: Int,
    *,
    batch_indices: Array = None,
    query_start_loc: Array = None,
    seq_lens: Array = None,
    kv_indptr: Array = None,
    window: Int = None,
    num_sinks: Int = 0,
    out: Written = None,
) -> Any:
    """The slot of each token of a batch, which the writes take; nothing is read back to the host.

    Position ``p`` of a sequence is offset ``p % block_size`` of the block in column ``p // block_size`` of
    its row. With a `window`, a sequence keeps its first `num_sinks` tokens and the newest `window` others in
    a ring: its row then needs blocks for ``num_sinks + window`` tokens only, and position ``p >= num_sinks``
    is kept at place ``num_sinks + (p - num_sinks) % window``.

    Parameters
    ----------
    block_table : [num_seqs, max_blocks], int32 or int64
        The blocks of each sequence.
    positions : [num_tokens], int32 or int64
        The position of each token in its sequence; negative for padding.
    block_size
        Tokens of a block.
    batch_indices : [num_tokens]
        The sequence of each token. This and the arrays below are of the dtype of `block_table`.
    query_start_loc : [num_seqs + 1]
        Instead of `batch_indices`: sequence ``n`` has tokens ``query_start_loc[n]`` to
        ``query_start_loc[n + 1] - 1``. With neither, token ``n`` belongs to sequence ``n``.
    seq_lens : [num_seqs]
        With a `window`, the tokens of each sequence, those of this call included. A token that newer ones of
        the same call push out of the window then gets -1, so that no slot appears twice.
    kv_indptr : [num_seqs + 1]
        For a table in one row, as FlashInfer's `kv_indices`: `block_table` is ``[num_indices]``, and the
        blocks of sequence ``n`` are those from ``kv_indptr[n]`` to ``kv_indptr[n + 1] - 1``.
    window, num_sinks
        See above; by default all tokens are kept.
    out : [num_tokens], int32 or int64
        Takes the result; by default a new int64 array.

    Returns
    -------
    array : [num_tokens]
        Slots. -1 for padding, for tokens of no sequence, where the table ends before the position or has a
        negative block, and where a slot does not fit the dtype of `out`.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> table = dpnp.asarray([[7, 2], [5, -1]])
    >>> positions = dpnp.asarray([15, 16, 3, 16, -1])
    >>> starts = dpnp.asarray([0, 2, 5])
    >>> dpnp.asnumpy(kv.slot_mapping(table, positions, 16, query_start_loc=starts)).tolist()
    [127, 32, 83, -1, -1]
    """
    __tracebackhide__ = True
    given = block_table, positions, batch_indices, query_start_loc, seq_lens, kv_indptr, out
    return perform(slot_mapping, given, (block_size, window, num_sinks))


def _check_places(
    append_indptr: Operand, seq_lens: Operand, nnz: Any, out: Operand | None, positions: Operand | None
) -> None:
    _require_integers("append_indptr", append_indptr)
    if len(seq_lens.shape) != 1:
        raise ValueError(f"`seq_lens` must have shape [batch_size], got {list(seq_lens.shape)}")
    validate.of_shape("append_indptr", append_indptr, (seq_lens.shape[0] + 1,), "[batch_size + 1]")
    for name, operand in (("seq_lens", seq_lens), ("out", out), ("positions", positions)):
        if operand is not None:
            validate.of_type(name, operand, append_indptr.dtype_name)
    whole_number("nnz", nnz, least=0)


def _results_places(append_indptr: Operand, nnz: int, **others: Any) -> dict[str, Result]:
    result = Result((nnz,), append_indptr.dtype_name)
    return {"out": result, "positions": result}


def _plan_places(
    append_indptr: Operand, seq_lens: Operand, nnz: int, out: Operand, positions: Operand, alignment: int
) -> Plan | None:
    if nnz == 0:
        return None
    return plan_of(
        token_places,
        {"index": append_indptr.dtype_name},
        _groups(out),
        alignment,
        append_indptr=append_indptr,
        seq_lens=seq_lens,
        out=out,
        positions=positions,
        num_tokens=nnz,
        num_seqs=seq_lens.shape[0],
    )


@operation(_check_places, _plan_places, results=_results_places)
def get_batch_indices_positions(
    append_indptr: Array, seq_lens: Array, nnz: Int, *, out: Written = None, positions: Written = None
) -> Any:
    """The sequence and the position of each token of a batch, by FlashInfer's name.

    Parameters
    ----------
    append_indptr : [batch_size + 1], int32 or int64
        Sequence ``n`` has tokens ``append_indptr[n]`` to ``append_indptr[n + 1] - 1`` of the batch.
    seq_lens : [batch_size]
        Tokens of each sequence, those of the batch included, in the dtype of `append_indptr`.
    nnz
        Tokens of the batch. Those from ``append_indptr[-1]`` on are padding: -1 and -1.
    out, positions : [nnz]
        Take the batch indices and the positions.

    Returns
    -------
    (array, array)
        `out` and `positions`, in the dtype of `append_indptr`; new arrays where none are given.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> starts, lens = dpnp.asarray([0, 1, 3]), dpnp.asarray([5, 2])
    >>> indices, positions = kv.get_batch_indices_positions(starts, lens, 4)
    >>> dpnp.asnumpy(indices).tolist(), dpnp.asnumpy(positions).tolist()
    ([0, 1, 1, -1], [4, 0, 1, -1])
    """
    __tracebackhide__ = True
    given = append_indptr, seq_lens, out, positions
    return perform(get_batch_indices_positions, given, (nnz,))
