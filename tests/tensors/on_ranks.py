"""What the processes of test_distributed.py run, as ranks of a group over gloo on the loopback."""

import datetime
import os
import time

import torch
import torch.distributed as dist

from kvcache_dpex import distributed
from kvcache_dpex import torch as kv

LAYERS, Q_HEADS, KV_HEADS, SIZE, WIDTH, WORDS, BLOCK = 2, 8, 2, 16, 64, 50, 4
PLAIN = ("float32", "bfloat16")


def start():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size()


class Model:
    """Two layers of attention without anything else, which generate greedily from a paged cache."""

    def __init__(self, num_blocks, kind="float32"):
        generator = torch.Generator().manual_seed(5)
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32

        def weight(*shape):
            return (torch.randn(*shape, generator=generator) / shape[0] ** 0.5).to(dtype)

        self.embedding, self.head = weight(WORDS, WIDTH), weight(WIDTH, WORDS)
        self.layers = [
            (weight(WIDTH, Q_HEADS * SIZE), weight(WIDTH, 2 * KV_HEADS * SIZE), weight(Q_HEADS * SIZE, WIDTH))
            for _ in range(LAYERS)
        ]
        self.kind, self.num_blocks = kind, num_blocks
        own = torch.Generator().manual_seed(dist.get_rank())
        self.blocks = torch.randperm(num_blocks, generator=own)  # each rank's own order

    def empty(self, num_kv_heads=KV_HEADS):
        shape = self.num_blocks, BLOCK, num_kv_heads, SIZE
        if self.kind in PLAIN:
            return [kv.empty_cache(*shape, dtype=self.kind, device="cpu") for _ in self.layers]
        return [kv.empty_quant_cache(*shape, format=self.kind, device="cpu") for _ in self.layers]

    def write(self, key, value, caches, slots):
        if caches[2:]:
            kv.reshape_and_cache_quant(key, value, *caches, slots)
        else:
            kv.reshape_and_cache(key, value, *caches, slots)

    def attend(self, query, caches, length):
        return kv.paged_attention(
            query,
            *caches[:2],
            self.blocks[None].int(),
            torch.tensor([length], dtype=torch.int32),
            query_start_loc=torch.tensor([0, len(query)], dtype=torch.int32),
            batch_invariant=True,
            **dict(zip(("key_scales", "value_scales"), caches[2:])),
        )

    def generate(self, tokens, count, caches, position=0):
        """The next `count` tokens, and the logits of each."""
        found, all_logits = [], []
        for _ in range(count):
            hidden = self.embedding[tokens]
            positions = torch.arange(position, position + len(tokens))
            slots = self.blocks[positions // BLOCK] * BLOCK + positions % BLOCK
            position += len(tokens)
            for (to_query, to_cache, to_hidden), layer in zip(self.layers, caches):
                query = (hidden @ to_query).view(-1, Q_HEADS, SIZE)
                key, value = (hidden @ to_cache).view(-1, 2, KV_HEADS, SIZE).unbind(1)
                self.write(key, value, layer, slots)
                out = self.attend(query, layer, position)
                hidden = torch.nn.functional.rms_norm(hidden + out.flatten(1) @ to_hidden, [WIDTH])
            logits = hidden[-1] @ self.head
            tokens = logits.argmax()[None]
            found.append(int(tokens))
            all_logits.append(logits)
        return found, torch.stack(all_logits)


class Shard(Model):
    """The heads of one rank."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        shard = distributed.shard_heads(Q_HEADS, KV_HEADS, rank=rank, world_size=world_size)
        self.query_heads, self.cache_heads = shard

    def write(self, key, value, caches, slots):
        super().write(key[:, self.cache_heads], value[:, self.cache_heads], caches, slots)

    def attend(self, query, caches, length):
        return distributed.gather_heads(super().attend(query[:, self.query_heads], caches, length))


def sharded_generation():
    start()
    prompt = torch.tensor([3, 14, 15, 9, 26, 5])
    model, shard = Model(16), Shard(16)
    caches, shards = model.empty(), shard.empty(shard.cache_heads.stop - shard.cache_heads.start)
    alone, _ = model.generate(prompt, 20, caches)
    together, _ = shard.generate(prompt, 20, shards)
    for ours, theirs in zip(shards, caches):
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other[:, :, shard.cache_heads], rtol=1e-4, atol=1e-4)
    print(len(set(alone)) > 3, alone == together, shards[0][0].shape[2])


def moved_generation(kind):
    """Rank 0 reads a prompt of 500 tokens and sends its blocks; both go on from there."""
    rank, _ = start()
    model = Model(160, kind)
    caches = model.empty()
    count = 500 // BLOCK
    if rank == 0:
        prompt = torch.randint(WORDS, (500,), generator=torch.Generator().manual_seed(1))
        first, _ = model.generate(prompt, 1, caches)
        sending = [distributed.send_blocks(layer, model.blocks[:count], dst=1) for layer in caches]
        for each in sending:
            each.wait()
        dist.send(torch.tensor(first), 1)
    else:
        distributed.receive_blocks(caches, model.blocks[:count].int(), src=0)
        first = torch.empty(1, dtype=torch.int64)
        dist.recv(first, 0)
        first = first.tolist()
        rest = model.blocks[count:]
        assert not any(layer[0].view(torch.uint8)[rest].any() for layer in caches)
    tokens, logits = model.generate(torch.tensor(first), 9, caches, position=500)
    print(len(set(tokens)) > 3, tokens, logits.view(torch.uint8).flatten().tolist())


def split_context():
    """The blocks of each sequence are dealt out to the ranks; a short one is on few of them."""
    rank, world_size = start()
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([37, 5, 130], dtype=torch.int32)
    blocks = torch.arange(27).view(3, 9).int()
    query = torch.randn(3, 8, 32, generator=generator)
    caches = [torch.randn(27, 16, 2, 32, generator=generator) for _ in range(2)]
    expected = kv.paged_attention(query, *caches, blocks, lengths, return_lse=True)

    table, own = torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    for number, length in enumerate(lengths.tolist()):
        columns = list(range(rank, -(-length // 16), world_size))
        table[number, : len(columns)] = blocks[number, columns]
        own[number] = sum(min(16, length - 16 * column) for column in columns)
    found = distributed.merge_over_ranks(*kv.paged_attention(query, *caches, table, own, return_lse=True))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    print(*own.tolist(), *(bytes(each.view(torch.uint8).flatten().tolist()).hex() for each in found))


def filled(value, format=None, heads=2):
    if format is None:
        caches = kv.empty_cache(8, 4, heads, 16, device="cpu")
    else:
        caches = kv.empty_quant_cache(8, 4, heads, 16, format=format, device="cpu")
    for each in caches:
        each.view(torch.uint8).fill_(value)
    return caches


def unchanged(layer, value):
    return all((each.view(torch.uint8) == value).all() for each in layer)


def received(layers, block_ids, values, **options):
    """Receive, and print the error and whether the caches hold what they held, and when that was."""
    started = time.monotonic()
    try:
        distributed.receive_blocks(layers, block_ids, src=0, **options)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error)
    print(all(map(unchanged, layers, values)), time.monotonic() - started, flush=True)


def leave():
    """End without torch's farewell, which waits for others."""
    os._exit(0)


def caches_that_differ(sent, taken, count):
    rank, _ = start()
    if rank == 0:
        sending = distributed.send_blocks(filled(1, **sent), torch.tensor([5, 1]), dst=1)
        try:
            sending.wait(timeout=2)
        except RuntimeError:
            print("not taken", flush=True)
    else:
        received([filled(2, **taken)], torch.arange(count), [2])
        time.sleep(4)
    leave()


def a_layer_that_is_damaged():
    rank, _ = start()
    if rank == 0:
        checksum = distributed._checksum
        distributed._checksum = lambda message: checksum(message) ^ 1
        distributed.send_blocks(filled(1), torch.tensor([5, 1]), dst=1).wait()
    else:
        received([filled(2)], torch.tensor([0, 7]), [2])


def a_rank_that_dies():
    rank, _ = start()
    if rank == 0:
        distributed.send_blocks(filled(1), [5, 1], dst=1).wait()
    else:
        received([filled(2), filled(3)], torch.tensor([0, 7]), [2, 3], timeout=20)
    leave()


def a_rank_that_is_silent():
    rank, _ = start()
    if rank == 0:
        time.sleep(6)
    else:
        received([filled(2)], torch.tensor([0, 7]), [2], timeout=2)
    leave()


def no_blocks():
    rank, _ = start()
    nothing = torch.empty(0, dtype=torch.int64)
    if rank == 0:
        distributed.send_blocks(filled(1), nothing, dst=1).wait()
    else:
        received([filled(2)], nothing, [2])
