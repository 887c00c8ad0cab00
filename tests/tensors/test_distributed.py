"""Processes that share heads, send blocks to one another and split a context; gloo on the loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from kvcache_dpex import distributed  # noqa: E402

PATIENCE = 240


def ranks(call, world_size):
    """Run a function of on_ranks.py in this many processes: what each printed, and its errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(world_size),
    }
    arguments = [sys.executable, "-c", f"import on_ranks; on_ranks.{call}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen(arguments, env={**environment, "RANK": str(rank)}, **pipes)
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs):
        assert process.returncode == 0, errors
    return [output.splitlines() for output, _ in outputs]


def test_heads_of_each_rank():
    """Whole groups, or equal parts of one group where there are more ranks than heads of the cache."""
    for num_q_heads, num_kv_heads, world_size in [(32, 8, 1), (32, 8, 4), (32, 8, 8), (32, 2, 8), (9, 3, 3)]:
        covered = []
        for rank in range(world_size):
            query, cache = distributed.shard_heads(
                num_q_heads, num_kv_heads, rank=rank, world_size=world_size
            )
            covered += range(num_q_heads)[query]
            group = num_q_heads // num_kv_heads
            assert list(range(num_kv_heads)[cache]) == sorted(
                {head // group for head in range(num_q_heads)[query]}
            )
            assert (query.stop - query.start) % (cache.stop - cache.start) == 0
        assert covered == list(range(num_q_heads))


@pytest.mark.parametrize(
    ("heads", "rank", "world_size", "message"),
    [
        ((9, 3), 0, 2, "`world_size` must divide the 3 heads of the cache, or be a multiple of them"),
        ((12, 2), 0, 8, "`world_size` must divide the 2 heads of the cache"),
        ((12, 6), 0, 4, "`world_size` must divide the 6 heads of the cache"),
        ((10, 3), 0, 1, "`num_q_heads` must be a multiple of `num_kv_heads`, got 10 and 3"),
        ((0, 0), 0, 1, "`num_q_heads` must be a multiple of `num_kv_heads`, got 0 and 0"),
        ((8, 2), 2, 2, r"`rank` must be in \[0, 2\), got 2"),
        ((8, 2), -1, 2, r"`rank` must be in \[0, 2\), got -1"),
    ],
)
def test_heads_that_cannot_be_shared_out(heads, rank, world_size, message):
    with pytest.raises(ValueError, match=message):
        distributed.shard_heads(*heads, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("world_size", "heads"), [(2, 1), (4, 1)])
def test_sharded_generation(world_size, heads):
    """2 heads of the cache on 2 ranks, and on 4, where two ranks share one: the tokens of one process."""
    assert ranks("sharded_generation()", world_size) == [[f"True True {heads}"]] * world_size


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8_per_token_head", "fp8_per_token_head"])
def test_a_sequence_moves_while_it_generates(kind):
    """500 tokens move to other blocks of another rank, layer by layer; both go on with equal logits."""
    one, other = ranks(f"moved_generation({kind!r})", 2)
    assert one == other
    assert one[0].startswith("True ")


def test_what_is_gathered_is_contiguous(monkeypatch):
    """Gloo takes any strides; the backends of GPUs refuse them."""

    def all_gather(parts, tensor, group):
        assert all(each.is_contiguous() for each in (tensor, *parts))
        for part in parts:
            part.copy_(tensor)

    monkeypatch.setattr(distributed.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed.dist, "all_gather", all_gather)
    out = torch.arange(24.0).view(2, 3, 4).transpose(0, 1)
    assert torch.equal(distributed.gather_heads(out), torch.cat([out, out], dim=1))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_context_on_several_ranks(world_size):
    """Attention to all tokens on every rank, with the same bits on all of them."""
    printed = [output[0].split() for output in ranks("split_context()", world_size)]
    assert len({tuple(bits) for *_, out, lse in printed for bits in [(out, lse)]}) == 1
    own = [[int(count) for count in counts] for *counts, _, _ in printed]
    assert [sum(counts) for counts in zip(*own)] == [37, 5, 130]
    assert [0] in [counts[1:2] for counts in own]


@pytest.mark.parametrize(
    ("sent", "taken", "count", "message"),
    [
        ({}, {"heads": 3}, 2, "`layers` must have the blocks that rank 0 sends, got blocks of [4, 3, 16]"),
        ({}, {}, 3, "`block_ids` must be as many as rank 0 sends, 2, got 3"),
        (
            {"format": "int8_per_token_head"},
            {"format": "fp8_per_token_head"},
            2,
            "`layers` must have the blocks that rank 0 sends, got blocks of [4, 2, 16] torch.float8_e4m3fn",
        ),
    ],
)
def test_caches_that_differ(sent, taken, count, message):
    """Nothing is written, and the sender learns of it within its time limit."""
    sender, receiver = ranks(f"caches_that_differ({sent}, {taken}, {count})", 2)
    assert receiver[0].startswith(f"ValueError {message}")
    assert receiver[1].split()[0] == "True"
    assert sender == ["not taken"]


def test_a_layer_that_is_damaged():
    _, receiver = ranks("a_layer_that_is_damaged()", 2)
    assert receiver[0] == "RuntimeError a layer arrived damaged from rank 0: send it again"
    assert receiver[1].split()[0] == "True"


def test_a_rank_that_dies():
    """Between two layers: an error within the time limit, and nothing of the first layer is written."""
    _, receiver = ranks("a_rank_that_dies()", 2)
    assert receiver[0].startswith("RuntimeError ")
    unchanged, seconds = receiver[-1].split()
    assert unchanged == "True"
    assert float(seconds) < 25


def test_a_rank_that_is_silent():
    _, receiver = ranks("a_rank_that_is_silent()", 2)
    assert receiver[0].startswith("RuntimeError ")
    unchanged, seconds = receiver[-1].split()
    assert unchanged == "True"
    assert 1.9 < float(seconds) < 5.5


def test_no_blocks():
    _, receiver = ranks("no_blocks()", 2)
    assert [line.split()[0] for line in receiver] == ["True"]


@pytest.mark.parametrize(
    ("block_ids", "kind", "message"),
    [
        ([0, 8], ValueError, r"`block_ids` must be in \[0, 8\), got \[0, 8\]"),
        ([-1], ValueError, r"`block_ids` must be in \[0, 8\), got \[-1\]"),
        ([[1]], TypeError, r"`block_ids` must be one-dimensional integers, got torch.int64 \[1, 1\]"),
        ([0.5], TypeError, "`block_ids` must be one-dimensional integers, got torch.float32"),
    ],
)
def test_ids_that_are_refused(block_ids, kind, message):
    layer = [torch.zeros(8, 4, 2, 16)] * 2
    with pytest.raises(kind, match=message):
        distributed.send_blocks(layer, block_ids, dst=1)
    with pytest.raises(kind, match=message):
        distributed.receive_blocks([layer], torch.tensor(block_ids), src=1)


def test_blocks_that_are_named_twice():
    with pytest.raises(ValueError, match=r"`block_ids` must be all different, got \[3, 3\]"):
        distributed.receive_blocks([[torch.zeros(8, 4)]], torch.tensor([3, 3]), src=1)


def test_tensors_without_a_common_block():
    layer = [torch.zeros(8, 4, 2, 16), torch.zeros(30, 2)]
    with pytest.raises(ValueError, match=r"the 8 blocks of the first, or their slots, got .* \[30, 2\]"):
        distributed.send_blocks(layer, torch.tensor([1]), dst=1)
