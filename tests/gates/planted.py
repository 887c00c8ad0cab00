"""Kernels with a fault each; a gate that lets one pass is broken. They need numba-dpex to be compiled."""
# ruff: noqa: F722, F821  (annotations are the kernel's argument types)

from typing import Callable

from kvcache_dpex.runtime.compile import compiler, store


def float64_literal(item: "item[1]", data: "float32*"):
    """A Python float is a float64, which Iris Xe and Arc A do not have."""
    index = item.get_id(0)
    data[index] = data[index] * 0.1


def narrowed_store(item: "item[1]", key: "uint64*", key_cache: "uint64*"):
    """A store before the second load, which it may change: the two can no longer be one message."""
    word = 2 * item.get_id(0)
    key_cache[word] = key[word]
    key_cache[word + 1] = key[word + 1]


def compiled(function: Callable) -> store.Module:
    """The module of a kernel, compiled now."""
    wanted = store.signature(function)
    return store.Module(*wanted, store.compile_signature(function, wanted), "compiled")


def many_live_values(count: int) -> bytes:
    """SPIR-V that keeps `count` values alive at once: more than a thread has registers for."""
    loads = [f" v{n} = data[at + {n}]" for n in range(count)]
    stores = [f" out[at + {n}] = v{n} * v{count - 1 - n}" for n in range(count)]
    lines = ["def many(item, data, out):", f" at = {count} * item.get_id(0)", *loads, *stores]
    names: dict[str, Callable] = {}
    exec("\n".join(lines), names)
    return compiler.compile_kernel(names["many"], "item[1]", ("float32*", "float32*"), "many", ())
