"""Sequences that are swapped to host memory, or travel as bytes, and what goes wrong on the way."""

import struct
import zlib

import pytest

import kvcache_dpex as kv
from caching import FORMATS, KINDS, advance, assert_holds, new_cache


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


A, B = [1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9, 9]


def filled(kind, format, queue, **options):
    cache = new_cache(kind, format, queue, **options)
    advance(cache, {"a": A}, {})
    advance(cache, {"b": B}, {})
    return cache


def test_swap_out_and_in(kind, format, queue):
    """The blocks are others' meanwhile; what is still cached is not copied back."""
    cache = filled(kind, format, queue, num_blocks=4, num_host_blocks=3)
    cache.swap_out("b")
    assert cache.swapped == ("b",)
    assert_holds(cache, {"a": A})
    advance(cache, {"c": [8] * 6}, {})
    assert_holds(cache, {"a": A, "c": [8] * 6})
    cache.free("c")
    cache.swap_in("b")
    assert cache.swapped == ()
    assert_holds(cache, {"a": A, "b": B})
    assert cache.pool.block_table("a")[0] == cache.pool.block_table("b")[0]
    advance(cache, {"b": [4, 4]}, {"b": B})
    assert_holds(cache, {"a": A, "b": [*B, 4, 4]})


def test_swapping_without_room_changes_nothing(kind, queue):
    """An allocation fails in the middle: nothing is lost and nothing leaks."""
    cache = filled(kind, "int8_per_token_head", queue, num_blocks=5, num_host_blocks=3)
    cache.swap_out("b")
    before = cache.pool.stats()
    with pytest.raises(
        kv.OutOfBlocks, match=r"swapping out sequence 'a' needs 2 blocks, but 0 of 3 are free"
    ):
        cache.swap_out("a")
    assert cache.pool.stats() == before
    advance(cache, {"c": [8] * 6, "d": [7]}, {})
    before = cache.pool.stats()
    with pytest.raises(kv.OutOfBlocks, match=r"sequence 'b' needs 2 blocks, but 0 of 5 are free"):
        cache.swap_in("b")
    assert cache.pool.stats() == before
    assert cache.swapped == ("b",)
    assert_holds(cache, {"a": A, "c": [8] * 6, "d": [7]})
    cache.free("c")
    cache.swap_in("b")
    assert_holds(cache, {"a": A, "b": B, "d": [7]})
    for name in "abd":
        cache.swap_out(name)
        cache.free(name)
    stats = cache.pool.stats()
    assert (stats.used, cache._host_blocks.num_free) == (0, 3)


def test_a_copy_that_fails_changes_nothing(kind, queue, monkeypatch):
    cache = filled(kind, "float32", queue, num_host_blocks=3)
    before = cache.pool.stats()

    def fails(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache._operations, "swap_blocks", fails)
        with pytest.raises(MemoryError):
            cache.swap_out("b")
    assert (cache.pool.stats(), cache._host_blocks.num_free) == (before, 3)
    cache.swap_out("b")
    cache.free("a")
    advance(cache, {"a": [0] * 18}, {})
    cache.free("a")
    with monkeypatch.context() as patch:
        patch.setattr(cache._operations, "swap_blocks", fails)
        with pytest.raises(MemoryError):
            cache.swap_in("b")
    assert advance(cache, {"c": B}, {}).start == {"c": 0}  # nothing of it is found that was not copied
    cache.swap_in("b")
    assert_holds(cache, {"b": B, "c": B})


@pytest.mark.parametrize("window", [None, 3])
def test_export_and_import(kind, format, queue, window):
    """Between blocks of another size, and between arrays and tensors."""
    cache = filled(kind, format, queue, sliding_window=window)
    data = {name: cache.export_sequence(name) for name in "ab"}
    assert_holds(cache, {"a": A, "b": B})
    for block_size in (3, 2, 4):
        other = new_cache(
            KINDS[-1], format, queue, num_blocks=9, block_size=block_size, sliding_window=window
        )
        for name, each in data.items():
            other.import_sequence(name, each)
        held = {"a": list(A), "b": list(B)}
        advance(other, {"a": [6]}, held)
        held["a"] += [6]
        first = 0 if window is None else len(A) - 2  # positions that a later token may see
        assert_holds(other, held, first)
        if window is None:
            tables = [other.pool.block_table(name) for name in "ab"]
            assert (tables[0][0] == tables[1][0]) == (block_size < 4)
            assert advance(other, {"c": [*A, 6, 6]}, {}).start["c"] == 6 // block_size * block_size


def test_a_sequence_without_tokens(kind, queue):
    cache = new_cache(kind, "int8_per_token_head", queue, num_host_blocks=2)
    advance(cache, {"empty": []}, {})
    cache.swap_out("empty")
    cache.swap_in("empty")
    data = cache.export_sequence("empty")
    cache.import_sequence("again", data)
    assert_holds(cache, {"empty": [], "again": []})


def test_what_is_imported_is_checked(kind, queue):
    cache = filled(kind, "int8_per_token_head", queue)
    data = cache.export_sequence("a")
    before = cache.pool.stats()
    newer = data[:8] + struct.pack("<I", 2) + data[12:]
    for damaged, message in (
        (b"", "must be what `export_sequence` returned"),
        (b"x" * 100, "must be what `export_sequence` returned"),
        (newer, "has version 2, and this package reads version 1"),
        (data[:-1], "is damaged or cut off"),
        (data[:60] + b"\0" + data[61:], "is damaged or cut off"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.import_sequence("c", damaged)
    other = new_cache(kind, "fp8_per_token_head", queue)
    with pytest.raises(
        ValueError, match="cache with format = 'fp8_per_token_head', got 'int8_per_token_head'"
    ):
        other.import_sequence("c", data)
    with pytest.raises(ValueError, match="`sequence` must be new to the pool, got 'a'"):
        cache.import_sequence("a", data)
    assert cache.pool.stats() == before
    full = new_cache(kind, "int8_per_token_head", queue, num_blocks=1)
    with pytest.raises(kv.OutOfBlocks):
        full.import_sequence("c", data)
    assert full.pool.stats().used == 0
    assert zlib.crc32(data[20:]) == int.from_bytes(data[16:20], "little")


def test_sequences_in_host_memory_are_not_touched(kind, queue):
    cache = filled(kind, "float32", queue, num_host_blocks=3)
    cache.swap_out("a")
    for call in (
        lambda: cache.step({"a": [1]}).__enter__(),
        lambda: cache.fork("b", "a"),
        lambda: cache.import_sequence("a", b""),
    ):
        with pytest.raises(ValueError, match="sequence 'a' is in host memory"):
            call()
    with pytest.raises(ValueError, match="`sequence` must be in host memory, got 'b'"):
        cache.swap_in("b")
    assert_holds(cache, {"b": B})


def test_maps_tell_bytes_and_what_is_in_host_memory(queue):
    cache = filled("arrays", "int8_per_token_head", queue, num_host_blocks=4)
    cache.swap_out("a")
    assert repr(cache) == "<PagedCache: 2 layers of int8_per_token_head, 3 of 6 blocks used by 1 sequence>"
    text = cache.__rich__().plain.splitlines()
    assert text[:5] == [
        "PagedCache",
        "6 blocks of 3: 3 used (50%), 0 cached, 3 unused",
        "prefix blocks: 1 hit, 2 misses, 0 evictions",
        "2 layers of int8_per_token_head: 1.1 KiB of 2.2 KiB used; float16 would take 1.50 times as much",
        "host memory: 1 sequence in 2 of 4 blocks",
    ]
    assert cache.pool.num_blocks * cache.bytes_per_block == 2304
    html = cache._repr_html_()
    assert "<strong>PagedCache</strong>" in html
    assert all(f"<div>{line}</div>" in html for line in text[3:5])
    assert html.count(' title="') == 6
    plain = new_cache("arrays", "float32", queue)
    assert plain.__rich__().plain.splitlines()[3] == "2 layers of float32: 0 bytes of 6.8 KiB used"
    arrays = [array for layer in plain.layers for array in layer]
    assert sum(array.nbytes for array in arrays) == plain.pool.num_blocks * plain.bytes_per_block
