"""reshape_and_cache: new keys and values land in their slots, bit for bit."""

from __future__ import annotations

from typing import Any, Callable

from ..kernels.scatter import scatter
from ..kernels.scatter_strided import scatter_strided
from ..kernels.scatter_words import scatter_words
from ..layout import uniform_slot_stride
from ..runtime.compile import edits, store
from ..runtime.launch import launch
from ..runtime.launch.arrays import Operand, read, read_output
from . import validate
from .geometry import head_groups, row_groups, vector_groups

_UNIT = 16  # the alignment of pointers that is looked at, in bytes
_launches: dict[tuple, Callable[[tuple[int, ...], Any], None]] = edits.cache()


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    check_slots: bool = False,
) -> None:
    """Copy row ``token`` of `key` and `value` to slot ``slot_mapping[token]`` of the caches, in place.

    Bits are moved, never interpreted: NaN payloads and every dtype of 1, 2, 4 or 8 bytes arrive as
    they are. Strides decide, never shapes: slices of a fused qkv buffer, interleaved blocks and keys
    and values packed in one row come as they are.

    Parameters
    ----------
    key, value : [num_tokens, num_kv_heads, head_size]
        New rows; `value` may have a head size of its own.
    key_cache, value_cache : [num_blocks, block_size, num_kv_heads, head_size]
        Changed in place, in the dtype of `key` and `value`. Slot ``s`` is offset ``s % block_size``
        of block ``s // block_size``.
    slot_mapping : [num_tokens], int32 or int64
        A negative slot skips its token. A slot at or beyond ``num_blocks * block_size`` is never
        written. Where slots repeat, each element is that of one of their rows, unspecified which. With fewer
        slots than tokens the surplus tokens are ignored.
    check_slots
        Read the slots back first and raise where one is too large or appears twice. This waits for
        the device and copies.

    Raises
    ------
    TypeError
        An argument is no array of the device and no torch tensor, or kinds or dtypes differ.
    ValueError
        A shape, stride or queue does not fit, a cache is read-only, or (with `check_slots`) a slot
        appears twice.
    IndexError
        With `check_slots`, a slot is beyond the capacity.

    Notes
    -----
    Ordered after all earlier work on the arrays' queue and before all later work. A GPU does not
    block the host.

    Examples
    --------
    >>> import kvcache_dpex as kv
    >>> import dpnp
    >>> key_cache, value_cache = kv.empty_cache(4, 16, 8, 128)
    >>> key = dpnp.ones((2, 8, 128), dtype="float32", sycl_queue=key_cache.sycl_queue)
    >>> slots = dpnp.asarray([17, -1], sycl_queue=key_cache.sycl_queue)
    >>> kv.reshape_and_cache(key, 2 * key, key_cache, value_cache, slots)
    >>> float(key_cache.sum()), float(value_cache[1, 1].sum())
    (1024.0, 2048.0)
    """
    launch.refuse_after_fork()
    key_at, k = read(key, "key")
    value_at, v = read(value, "value")
    key_cache_at, kc = read_output(key_cache, "key_cache")
    value_cache_at, vc = read_output(value_cache, "value_cache")
    slots_at, slots = read(slot_mapping, "slot_mapping")
    alignment = (key_at | value_at | key_cache_at | value_cache_at) % _UNIT
    geometry = (k, v, kc, vc, slots, alignment, key_cache_at == value_cache_at)
    prepared = _launches.get(geometry)
    if prepared is None:
        launch.make_room(_launches)
        prepared = _launches[geometry] = _prepare(*geometry)
    if check_slots:
        validate.slot_values(slot_mapping, kc[0][0] * kc[0][1])
    prepared(
        (key_at, value_at, key_cache_at, value_cache_at, slots_at),
        (key, value, key_cache, value_cache, slot_mapping),
    )


def _prepare(
    key: tuple,
    value: tuple,
    key_cache: tuple,
    value_cache: tuple,
    slot_mapping: tuple,
    alignment: int,
    same: bool,
) -> Callable[[tuple[int, ...], Any], None]:
    """The launch for one geometry, once it is known to be right."""
    k, v, kc, vc = Operand(*key), Operand(*value), Operand(*key_cache), Operand(*value_cache)
    slots = Operand(*slot_mapping)
    _validate(k, v, kc, vc, slots)
    if slots.shape[0] == 0 or 0 in kc.shape[:3]:
        return launch.nothing
    if same:
        raise ValueError("`value_cache` must not be the memory of `key_cache`")
    whole = _whole_rows(k, v, kc, vc, slots, alignment)
    return whole or _strided(k, v, kc, vc, slots, alignment)


def _validate(k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand) -> None:
    validate.same_queue(key=k, value=v, key_cache=kc, value_cache=vc, slot_mapping=slots)
    validate.rows(k, v)
    validate.cache("key_cache", kc, "key", k)
    validate.cache("value_cache", vc, "value", v)
    validate.same_slots("value_cache", vc, "key_cache", kc)
    validate.slots(slots, k.shape[0])
    validate.head_sizes(k, v)
    for name, other in (("value", v), ("key_cache", kc), ("value_cache", vc)):
        if other.dtype != k.dtype:
            raise TypeError(f"`{name}` must have the dtype of `key`, {k.dtype_name}, got {other.dtype_name}")
    if k.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"`key` must have a dtype of 1, 2, 4 or 8 bytes, got {k.dtype_name}")


def _whole_rows(
    k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand, alignment: int
) -> launch.Launch | None:
    """Rows that are contiguous in whole units and slots that are evenly spaced; None if not so."""
    kernel, unit, groups = _kernel_of(k.queue)
    row = k.shape[1] * k.shape[2]
    strides = [k.strides[0], v.strides[0]]
    for rows, cache in ((k, kc), (v, vc)):
        slot_stride = uniform_slot_stride(cache.shape, cache.strides)
        if slot_stride is None or rows.shape != k.shape:
            return None
        if not (_is_one_run(rows) and _is_one_run(cache)):
            return None
        strides.append(slot_stride)
    if alignment % unit or any(count * k.itemsize % unit for count in (row, *strides)):
        return None
    units = row * k.itemsize // unit
    num_tokens = slots.shape[0]
    scalars = (
        num_tokens,
        units,
        kc.shape[0] * kc.shape[1],
        slots.strides[0],
        *(stride * k.itemsize // unit for stride in strides),
    )
    module = store.load(kernel, slot=slots.dtype_name)
    return launch.Launch(module, k.queue, scalars, *groups(k.queue, units, num_tokens))


def _kernel_of(queue: Any) -> tuple[Callable, int, Callable]:
    """The kernel for whole rows that suits a device, the bytes of its units, and its work-groups."""
    return (scatter_words, 8, vector_groups) if queue.sycl_device.is_cpu else (scatter, 16, row_groups)


def _strided(
    k: Operand, v: Operand, kc: Operand, vc: Operand, slots: Operand, alignment: int
) -> launch.Launch:
    """Any strides, by the widest word that they, the head sizes and the pointers allow."""
    if kc.shape[0] * kc.shape[1] > 2**32:
        raise ValueError(
            f"`key_cache` must have at most 2**32 slots unless its rows are contiguous multiples of "
            f"{_UNIT} bytes, got {kc.shape[0]} blocks of {kc.shape[1]}"
        )
    heads = k.shape[1]
    if all(_is_one_run(operand) for operand in (k, v, kc, vc)):
        k, v, kc, vc = (_merge_heads(operand) for operand in (k, v, kc, vc))
        heads = 1
    lengths = [alignment or _UNIT, k.shape[-1] * k.itemsize, v.shape[-1] * v.itemsize]
    for operand in (k, v, kc, vc):
        lengths += [abs(stride) * operand.itemsize for stride in operand.strides[:-1]]
    contiguous = all(operand.strides[-1] == 1 for operand in (k, v, kc, vc))
    word = k.itemsize
    while contiguous and word < 8 and not any(length % (2 * word) for length in lengths):
        word *= 2
    per_word = word // k.itemsize

    def words(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (*(stride // per_word for stride in strides[:-1]), strides[-1])

    scalars = (
        slots.shape[0],
        kc.shape[0] * kc.shape[1],
        kc.shape[1],
        k.shape[-1] // per_word,
        v.shape[-1] // per_word,
        slots.strides[0],
        *words(k.strides),
        *words(v.strides),
        *words(kc.strides),
        *words(vc.strides),
    )
    module = store.load(scatter_strided, word=f"uint{8 * word}", slot=slots.dtype_name)
    sizes = (k.shape[-1] // per_word, v.shape[-1] // per_word)
    return launch.Launch(module, k.queue, scalars, *head_groups(k.queue, sizes, heads, slots.shape[0]))


def _is_one_run(operand: Operand) -> bool:
    """Whether a row's heads follow one another without a gap."""
    return operand.strides[-1] == 1 and operand.strides[-2] == operand.shape[-1]


def _merge_heads(operand: Operand) -> Operand:
    *outer, heads, size = operand.shape
    row = heads * size
    return operand._replace(shape=(*outer, 1, row), strides=(*operand.strides[:-2], row, operand.strides[-1]))
