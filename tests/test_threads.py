"""Threads that call at the same time: every write lands, whatever the others do."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from helpers import to_device
from kvcache_dpex import empty_cache, reshape_and_cache
from kvcache_dpex.runtime.compile import edits
from kvcache_dpex.runtime.launch import arrays

WORKERS, ROUNDS = 8, 40


def test_every_write_of_each_thread_lands(queue):
    """Fresh rows every round, looked at after each; the first call of all threads comes at the same time."""
    edits.forget()
    tokens = 4
    for size in (128, 3):
        caches = empty_cache(WORKERS, tokens, 2, size, device=queue)
        numbers = np.arange(ROUNDS * WORKERS).reshape(ROUNDS, WORKERS)
        keys = [
            [to_device(np.full((tokens, 2, size), number, "float32"), queue) for number in row]
            for row in numbers
        ]
        slots = [to_device(np.arange(tokens) + worker * tokens, queue) for worker in range(WORKERS)]
        together = threading.Barrier(WORKERS)

        def work(
            worker, size=size, caches=caches, keys=keys, slots=slots, together=together, numbers=numbers
        ):
            for turn in range(ROUNDS):
                together.wait(10)
                reshape_and_cache(keys[turn][worker], keys[turn][worker], *caches, slots[worker])
                together.wait(10)
                if worker == 0:
                    for cache in caches:
                        wanted = np.repeat(numbers[turn], tokens * 2 * size).reshape(cache.shape)
                        np.testing.assert_array_equal(arrays.to_numpy(cache), wanted.astype("float32"))

        with ThreadPoolExecutor(WORKERS) as pool:
            for done in [pool.submit(work, worker) for worker in range(WORKERS)]:
                done.result()


def test_rows_for_one_slot_are_never_mixed_up_with_other_slots(queue):
    """Where threads write one slot, each element is one of the rows', and the last call's row stays."""
    rows = [to_device(np.full((1, 2, 512), number, "float32"), queue) for number in range(1, WORKERS + 1)]
    caches = empty_cache(2, 4, 2, 512, device=queue)
    slots = to_device(np.array([5]), queue)

    def work(row):
        for _ in range(ROUNDS):
            reshape_and_cache(row, row, *caches, slots)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, rows))
    found = [arrays.to_numpy(cache) for cache in caches]
    for cache in found:
        assert set(cache[1, 1].ravel()) <= set(range(1, WORKERS + 1))
        cache[1, 1] = 0
        assert not cache.any()
    reshape_and_cache(rows[2], rows[2], *caches, slots)
    for cache in caches:
        assert (arrays.to_numpy(cache)[1, 1] == 3).all()
