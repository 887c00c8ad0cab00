"""Moves of blocks on torch tensors: every dtype, what autograd sees, and pools on two devices."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvcache_dpex import torch as kv  # noqa: E402
from kvcache_dpex import torch_blocks  # noqa: E402
from kvcache_dpex.ops.pools import Pool  # noqa: E402

PAIRS = [(0, 3), (3, 1), (4, 4), (2, 0)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64]


def pool(dtype, blocks=5):
    """Keys and values packed in one row, and scales."""
    bits = torch.randint(-128, 128, (blocks, 4, 3, 32 * dtype.itemsize), dtype=torch.int8)
    both = bits.view(dtype)
    return [both[..., :16], both[..., 16:], torch.randn(blocks * 4, 3)]


def blocks_of(tensor, count):
    """The bytes of each block."""
    return tensor.contiguous().view(torch.uint8).view(count, -1)


@pytest.mark.parametrize("name", ["copy_blocks", "gather_blocks", "swap_blocks", "zero_blocks"])
def test_help_names_the_module_to_import_from(name):
    function = getattr(kv, name)
    assert function.__module__ == kv.__name__
    assert [function.__doc__.count(f"    {section}\n") for section in ("Parameters", "Examples")] == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_in_order(dtype):
    caches = pool(dtype)
    wanted = [blocks_of(each, 5).clone() for each in caches]
    kv.copy_blocks(caches, torch.tensor(PAIRS))
    for cache, expected in zip(caches, wanted):
        for source, target in PAIRS:
            expected[target] = expected[source]
        assert torch.equal(blocks_of(cache, 5), expected)


def test_zeros_and_gathered_blocks():
    cache, _, scales = pool(torch.bfloat16)
    kv.zero_blocks([cache, scales], [2])
    assert not cache[2].any()
    assert not scales[8:12].any()
    table = torch.tensor([[4, -1], [0, 2]], dtype=torch.int32)
    found = kv.gather_blocks(cache, table)
    assert found.dtype == torch.bfloat16
    zeros = torch.zeros_like(cache[0])
    wanted = torch.stack([cache[4], zeros, cache[0], cache[2]]).unflatten(0, (2, 2))
    assert torch.equal(found.view(torch.uint16), wanted.view(torch.uint16))
    out = torch.empty_like(found)
    assert kv.gather_blocks(cache, table, out=out) is out
    assert torch.equal(out.view(torch.uint16), wanted.view(torch.uint16))


@pytest.mark.parametrize("across", [False, True], ids=["one device", "torch's copies"])
def test_swap(across):
    here, there = pool(torch.int8), pool(torch.int8, blocks=3)
    pairs = [(0, 1), (1, 2), (4, 0)]
    wanted = [blocks_of(each, 3).clone() for each in there]
    for source, expected in zip(here, wanted):
        for at, to in pairs:
            expected[to] = blocks_of(source, 5)[at]
    if across:
        torch_blocks._copy_across(Pool("sources", here), Pool("targets", there), *map(list, zip(*pairs)))
    else:
        kv.swap_blocks(here, there, pairs)
    for cache, expected in zip(there, wanted):
        assert torch.equal(blocks_of(cache, 3), expected)


def test_autograd_sees_what_is_copied():
    cache = torch.zeros(5, 4, 1, 8)
    before = cache._version
    kv.copy_blocks([cache], [(0, 1)])
    assert cache._version > before


def test_gather_is_traced():
    cache, table = torch.randn(5, 4, 1, 8), torch.tensor([3, -1])

    @torch.compile(backend="eager", fullgraph=True)
    def gathered(cache, table):
        return kv.gather_blocks(cache, table) * 2

    assert torch.equal(gathered(cache, table)[0], cache[3] * 2)
