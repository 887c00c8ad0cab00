"""Threads that use tensors at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from helpers import output_of  # noqa: E402
from kvcache_dpex.runtime.launch import arrays, tensors  # noqa: E402


def test_first_uses_at_the_same_time_agree_on_one_queue(monkeypatch):
    """With a queue for each, arguments of one call would be on different queues."""
    make = tensors._cpu_queue_of_device

    def make_slowly():
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(tensors, "_cpu_queue", None)
    monkeypatch.setattr(tensors, "_cpu_queue_of_device", make_slowly)
    together = Barrier(4)

    def first_use(tensor):
        together.wait(10)
        return arrays.read(tensor, "tensor")[1][3]

    with ThreadPoolExecutor(4) as pool:
        queues = list(pool.map(first_use, torch.zeros(4, 3)))
    assert all(queue is queues[0] for queue in queues)


def test_arrays_are_used_while_another_thread_imports_torch():
    """`sys.modules` has a torch without `Tensor` for seconds."""
    code = """
import threading
import kvcache_dpex as kv
import dpnp
caches = kv.empty_cache(2, 4, 2, 16, device="cpu")
key = dpnp.ones((3, 2, 16), dtype="float32", device="cpu")
slots = dpnp.asarray([1, 2, 3], device="cpu")
importing = threading.Thread(target=__import__, args=["torch"])
importing.start()
calls = 0
while importing.is_alive():
    kv.reshape_and_cache(key, key, *caches, slots)
    calls += 1
quantized = kv.empty_quant_cache(2, 4, 2, 16, device="cpu")
print(calls > 0, float(caches[0].sum()))
"""
    assert output_of(code) == "True 96.0"
