"""move_blocks: blocks of up to eight arrays become blocks of others, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from ..kernels.move_blocks_cpu import move_blocks_cpu
from ..kernels.move_blocks_gpu import move_blocks_gpu
from ..kernels.move_blocks_strided import move_blocks_strided
from ..runtime.compile import parameters
from ..runtime.launch.arrays import Operand
from . import validate
from .block_axes import blocks_of, with_three_axes
from .calls import Plan
from .declaration import Array, Int, Written
from .groups import head_groups, vector_groups
from .operation import operation, perform
from .plan import Variant, across_items, anywhere, choose, in_units, plan_of, within_items

MOST = (
    8  # arrays of a launch: a kernel names each, since only its arguments are safe to reach on every device
)
TARGETS = tuple(f"target_{number}" for number in range(MOST))
SOURCES = tuple(f"source_{number}" for number in range(MOST))


def _check(
    source_ids: Operand,
    target_ids: Operand | None,
    num_sources: Any,
    num_targets: Any,
    **arrays: Operand | None,
) -> None:
    if source_ids.dtype_name not in ("int32", "int64"):
        raise TypeError(f"`source_ids` must be int32 or int64, got {source_ids.dtype_name}")
    if target_ids is not None:
        if len(source_ids.shape) != 1:
            raise ValueError(f"`source_ids` must have shape [num_moves], got {list(source_ids.shape)}")
        validate.of_type("target_ids", target_ids, source_ids.dtype_name)
        validate.of_shape("target_ids", target_ids, tuple(source_ids.shape), "that of `source_ids`")
    given = {name: each for name, each in arrays.items() if each is not None}
    first = given["target_0"]
    if first.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"`target_0` must have a dtype of 1, 2, 4 or 8 bytes, got {first.dtype_name}")
    found = _as_blocks(source_ids, target_ids, num_sources, num_targets, given)
    for name, operand in given.items():
        if operand.dtype != first.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `target_0`, {first.dtype_name}, got {operand.dtype_name}"
            )
        own, wanted = list(found[name].shape[1:]), list(found["target_0"].shape[1:])
        if own != wanted:
            raise ValueError(f"`{name}` must have the blocks of `target_0`, {wanted}, got {own}")


def _as_blocks(
    source_ids: Operand,
    target_ids: Operand | None,
    num_sources: int | None,
    num_targets: int | None,
    given: dict[str, Operand],
) -> dict[str, Operand]:
    """The arrays as ``[num_blocks, ...]``; targets without ids have the axes of the sources' ids first."""
    found = {}
    for name, operand in given.items():
        if name in SOURCES:
            found[name] = blocks_of(name, operand, num_sources)
        elif target_ids is None and len(source_ids.shape) != 1:
            found[name] = validate.leading_axes_merged(name, operand, len(source_ids.shape))
        else:
            found[name] = blocks_of(name, operand, num_targets)
    return found


def _plan(
    source_ids: Operand,
    target_ids: Operand | None,
    num_sources: int | None,
    num_targets: int | None,
    alignment: int,
    **arrays: Operand | None,
) -> Plan | None:
    given = {name: each for name, each in arrays.items() if each is not None}
    given = _as_blocks(source_ids, target_ids, num_sources, num_targets, given)
    if 0 in source_ids.shape or 0 in given["target_0"].shape:
        return None
    source_ids = validate.leading_axes_merged("source_ids", source_ids, len(source_ids.shape))
    given = with_three_axes(given)
    ids = source_ids, target_ids
    return choose(VARIANTS, source_ids.queue.sycl_device, None, None, ids, given, alignment)


@operation(
    _check,
    _plan,
    aligned=" ".join((*TARGETS, *SOURCES)),
    may_overlap=[(target, source) for target in TARGETS for source in SOURCES],
)
def move_blocks(
    source_ids: Array,
    target_0: Written,
    target_ids: Array = None,
    target_1: Written = None,
    target_2: Written = None,
    target_3: Written = None,
    target_4: Written = None,
    target_5: Written = None,
    target_6: Written = None,
    target_7: Written = None,
    source_0: Array = None,
    source_1: Array = None,
    source_2: Array = None,
    source_3: Array = None,
    source_4: Array = None,
    source_5: Array = None,
    source_6: Array = None,
    source_7: Array = None,
    *,
    num_sources: Int = None,
    num_targets: Int = None,
) -> None:
    """Make block ``target_ids[n]`` of each target block ``source_ids[n]`` of its source, in place.

    The ids are on the device and not read by the host: `copy_blocks` and `swap_blocks` take those of a
    block manager, and check them. Bits are moved, never interpreted.

    Parameters
    ----------
    source_ids : [num_moves], int32 or int64
        Blocks of the sources. For one that they do not have, such as -1, the target's block gets zeros.
    target_0, ..., target_7 : [num_blocks, ...]
        Arrays of one dtype and blocks of one shape, of any strides, such as the key and value caches of
        several layers. Changed in place.
    target_ids : [num_moves], in the dtype of `source_ids`
        Different blocks of the targets; those that the targets do not have are skipped. By default 0, 1, 2,
        and so on; `source_ids` may then have any shape, whose axes come first in the targets'.
    source_0, ..., source_7 : [num_blocks, ...]
        Of the same dtype and shape of blocks, one for each target; without them, only zeros are written. The
        memory of a source may be that of its target as long as no block is both read and written.
    num_sources, num_targets
        Blocks of each source and of each target, which are needed for arrays whose first axis counts slots,
        such as scales of shape ``[num_blocks * block_size, num_kv_heads]``.

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or queue does not fit; nothing is then written.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, value_cache = kv.empty_cache(4, 16, 8, 128)
    >>> key_cache[2] = 1
    >>> table = dpnp.asarray([2, -1], sycl_queue=key_cache.sycl_queue)
    >>> rows = dpnp.empty((2, 16, 8, 128), dtype="float32", sycl_queue=key_cache.sycl_queue)
    >>> kv.move_blocks(table, rows, source_0=key_cache)
    >>> float(rows[0].sum()), float(rows[1].sum())
    (16384.0, 0.0)
    """
    __tracebackhide__ = True
    arrays = (
        source_ids,
        target_0,
        target_ids,
        target_1,
        target_2,
        target_3,
        target_4,
        target_5,
        target_6,
        target_7,
        source_0,
        source_1,
        source_2,
        source_3,
        source_4,
        source_5,
        source_6,
        source_7,
    )
    perform(move_blocks, arrays, (num_sources, num_targets))


def _contiguous(
    kernel: Callable, ids: Sequence[Operand | None], given: dict[str, Operand], alignment: int
) -> Plan | None:
    """Rows that are contiguous in whole units; None if not so."""
    unit = parameters.parse(kernel.__annotations__["target_0"]).unit
    first = given["target_0"]
    size, rest = divmod(first.shape[3] * first.itemsize, unit)
    return None if rest else _launch(kernel, {}, ids, given, size, alignment)


def _strided(
    kernel: Callable, ids: Sequence[Operand | None], given: dict[str, Operand], alignment: int
) -> Plan | None:
    """Any strides, by the widest word that they and the pointers allow."""
    word = given["target_0"].itemsize
    while word < 8 and alignment % (2 * word) == 0:
        wider = {name: in_units(each, 2 * word) for name, each in given.items()}
        if None in wider.values():
            break
        given, word = {name: each for name, each in wider.items() if each}, 2 * word
    types = {"word": f"uint{8 * word}"}
    return _launch(kernel, types, ids, given, given["target_0"].shape[3], alignment)


def _launch(
    kernel: Callable,
    types: dict[str, str],
    ids: Sequence[Operand | None],
    given: dict[str, Operand],
    size: int,
    alignment: int,
) -> Plan | None:
    source_ids, target_ids = ids
    assert source_ids is not None
    first, num_moves = given["target_0"], source_ids.shape[0]
    num_arrays = sum(name in given for name in TARGETS)
    outers, rows = first.shape[1:3]
    if kernel is move_blocks_cpu:
        (width, _), (lanes, _) = vector_groups(source_ids.queue, size, 1)
        groups = (width, rows, num_moves * num_arrays), (lanes, 1, 1)
    else:
        groups = head_groups(source_ids.queue, (size,), rows, num_moves * num_arrays)
    source = given.get("source_0")
    return plan_of(
        kernel,
        {**types, "block": source_ids.dtype_name},
        groups,
        alignment,
        source_ids=source_ids,
        target_ids=target_ids,
        **{name: given.get(name) for name in (*TARGETS, *SOURCES)},
        listed=int(target_ids is not None),
        num_moves=num_moves,
        num_arrays=num_arrays,
        num_sources=source.shape[0] if source else 0,
        num_targets=first.shape[0],
        outers=outers,
        size=size,
        items=groups[0][0],
    )


VARIANTS = (
    Variant(move_blocks_cpu, across_items, _contiguous),
    Variant(move_blocks_gpu, within_items, _contiguous),
    Variant(move_blocks_strided, anywhere, _strided),
)
