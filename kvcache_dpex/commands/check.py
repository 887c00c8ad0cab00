"""Write on this machine's device and compare every byte with the oracle (the default command)."""

from __future__ import annotations

import argparse
import statistics
import time
from importlib import import_module
from typing import Any, Callable

import numpy as np

from .. import reference
from ..runtime.environment import devices, gpu
from ..runtime.launch import arrays

kv = import_module("..", __package__)  # the operations are loaded when they are used
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, NUM_TOKENS = 16, 16, 8, 128, 40
SENTINEL = 0xA5
# A quotient near 127 is rounded by up to 2**-18 steps before it becomes a code, and decoding by 2**-17.
HALF_A_STEP = 0.5 + 3 * 2.0**-18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "dpctl filter string, such as level_zero:gpu:0 or cpu, by default the best device"
    parser.add_argument("--device", help=text)
    parser.add_argument("--no-timing", action="store_true", help="compare only")


def run(options: argparse.Namespace) -> int:
    """Print each validation; 0 where all of them hold."""
    queue = devices.queue_for(options.device)
    device = queue.sycl_device
    print(f"{device.name}, {device.filter_string}, driver {device.driver_version}")
    if not any(each.is_gpu for each in devices.load_dpctl().get_devices()):
        print(f"note: {gpu.absence()}")
    failed = 0
    for number, (claim, differences) in enumerate(validations(queue), start=1):
        failed += differences != 0
        print(f"{number}. {claim}: {f'FAILED, {differences} differ' if differences else 'ok'}")
    if not options.no_timing:
        print(timing(queue))
    print(f"{'not every check holds' if failed else 'all checks hold'} on {device.filter_string}")
    return int(failed > 0)


def validations(queue: Any) -> list[tuple[str, int]]:
    """Each claim with the number of elements that contradict it."""
    return plain_write(queue) + int8_write(queue)


def plain_write(queue: Any) -> list[tuple[str, int]]:
    """Bit-exact float32 rows, and nothing else changed."""

    key, value, slots = _rows(np.random.default_rng(0))
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    expected = [_sentinel(shape, "f4"), _sentinel(shape, "f4")]
    caches = [_to_device(cache, queue) for cache in expected]
    reference.reshape_and_cache(key, value, expected[0], expected[1], slots)
    inputs = [_to_device(array, queue) for array in (key, value)]
    kv.reshape_and_cache(inputs[0], inputs[1], caches[0], caches[1], _to_device(slots, queue))
    found = [arrays.to_numpy(cache) for cache in caches]

    written = slots[slots >= 0]
    rows = [cache.reshape(-1, NUM_KV_HEADS, HEAD_SIZE) for cache in found]
    untouched = np.setdiff1d(np.arange(NUM_BLOCKS * BLOCK_SIZE), written)
    return [
        (
            f"key: {len(written)} float32 rows read back by index equal the input bit for bit",
            _differences(rows[0][written], key[slots >= 0]),
        ),
        (
            f"value: {len(written)} float32 rows read back by index equal the input bit for bit",
            _differences(rows[1][written], value[slots >= 0]),
        ),
        (
            f"{len(untouched)} slots outside slot_mapping keep every byte",
            sum(_differences(cache[untouched], _sentinel(cache[untouched].shape, "f4")) for cache in rows),
        ),
        (
            f"{(slots < 0).sum()} negative slots are skipped: both whole caches equal the oracle's",
            sum(_differences(*pair) for pair in zip(found, expected)),
        ),
    ]


def int8_write(queue: Any) -> list[tuple[str, int]]:
    """Scales and codes as the formula says, and a round trip within half a step."""

    key, value, slots = _rows(np.random.default_rng(1))
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    scales_shape = (NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS)
    expected = [
        _sentinel(shape, "i1"),
        _sentinel(shape, "i1"),
        _sentinel(scales_shape, "f4"),
        _sentinel(scales_shape, "f4"),
    ]
    caches = [_to_device(array, queue) for array in expected]
    kq, vq, ks, vs = expected
    reference.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slots)
    inputs = [_to_device(array, queue) for array in (key, value)]
    codes_of_keys, codes_of_values, ks, vs = caches
    kv.reshape_and_cache_quant(
        inputs[0], inputs[1], codes_of_keys, codes_of_values, ks, vs, _to_device(slots, queue)
    )
    codes_k, codes_v, scales_k, scales_v = (arrays.to_numpy(cache) for cache in caches)

    written = slots[slots >= 0]
    beyond_half_a_step = 0
    for codes, scales, rows in ((caches[0], caches[2], key), (caches[1], caches[3], value)):
        decoded = arrays.to_numpy(kv.dequant_cache(codes, scales)).reshape(-1, NUM_KV_HEADS, HEAD_SIZE)
        step = arrays.to_numpy(scales)[written][..., None].astype("f8")
        error = np.abs(decoded[written].astype("f8") - rows[slots >= 0].astype("f8")) / step
        beyond_half_a_step += int((error > HALF_A_STEP).sum())
    untouched = np.setdiff1d(np.arange(NUM_BLOCKS * BLOCK_SIZE), written)
    return [
        (
            f"int8: {2 * written.size * NUM_KV_HEADS} scales equal absmax / 127 bit for bit",
            _differences(scales_k[written], expected[2][written])
            + _differences(scales_v[written], expected[3][written]),
        ),
        (
            "int8: codes equal round-to-nearest-even with clamping",
            _differences(codes_k, expected[0]) + _differences(codes_v, expected[1]),
        ),
        (
            f"int8: round trip within half a step for {2 * written.size * NUM_KV_HEADS * HEAD_SIZE} values",
            beyond_half_a_step,
        ),
        (
            f"int8: {len(untouched)} other slots keep every byte of codes and scales",
            sum(
                _differences(_slots(found)[untouched], _slots(sentinel)[untouched])
                for found, sentinel in zip((codes_k, codes_v, scales_k, scales_v), expected)
            ),
        ),
    ]


def _slots(cache: np.ndarray) -> np.ndarray:
    """Codes or scales by slot."""
    return cache.reshape(NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, -1)


def timing(queue: Any) -> str:
    """How long a write of 8 tokens takes beside dpnp's own indexed write, each waited for."""
    import dpnp

    key_cache, value_cache = kv.empty_cache(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, device=queue)
    key = dpnp.ones((8, NUM_KV_HEADS, HEAD_SIZE), dtype="float32", sycl_queue=queue)
    slots = dpnp.arange(8, sycl_queue=queue)
    rows = (NUM_BLOCKS * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    flat_key, flat_value = key_cache.reshape(rows), value_cache.reshape(rows)

    def ours() -> None:
        kv.reshape_and_cache(key, key, key_cache, value_cache, slots)
        queue.wait()

    def indexed() -> None:
        flat_key[slots] = key
        flat_value[slots] = key
        queue.wait()

    write, index = _medians(ours, indexed)
    return (
        f"8 tokens x {NUM_KV_HEADS} heads x {HEAD_SIZE} float32, keys and values: {write:.0f} us, "
        f"by dpnp indexing {index:.0f} us ({index / write:.1f} times as long; medians)"
    )


def _medians(*work: Callable[[], None], rounds: int = 10, repeats: int = 10) -> list[float]:
    """Microseconds of each, a few repeats of one after a few of the other."""
    times: list[list[float]] = [[] for _ in work]
    for _ in range(rounds):
        for function, seconds in zip(work, times):
            function()
            for _ in range(repeats):
                start = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) * 1e6 for seconds in times]


def _rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE)
    slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[:NUM_TOKENS]
    slots[::5] = -1
    return rng.standard_normal(shape, dtype="f4"), rng.standard_normal(shape, dtype="f4"), slots


def _sentinel(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    array = np.empty(shape, dtype)
    array.view("u1")[...] = SENTINEL
    return array


def _to_device(array: np.ndarray, queue: Any) -> Any:
    return arrays.tensor_module().asarray(array, sycl_queue=queue)


def _differences(found: np.ndarray, expected: np.ndarray) -> int:
    """Elements of which any bit differs."""
    size = f"u{found.itemsize}"
    return int((np.ascontiguousarray(found).view(size) != np.ascontiguousarray(expected).view(size)).sum())
