"""Blocks sent from one process to another over gloo, and what that means for prefill and decode machines.

    python -m benchmarks transfer

Two processes on this machine move a sequence of Llama-3-8B's shape, layer by layer, into other blocks; its
bytes are compared before times are printed. The second table is arithmetic: how many prompt tokens a second
the prefill machines may hand over before the network is full.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from kvcache_dpex import distributed
from kvcache_dpex import torch as kv

from .measure import _processor, commit

LAYERS, HEADS, SIZE, BLOCK = 32, 8, 128, 16
TOKENS, ROUNDS = 2048, 5
FORMATS = ("bfloat16", "int8_per_token_head")
MACHINES, GIGABITS = (1, 8, 64), (10, 25, 100, 400)


def token_bytes(format: str) -> int:
    """Bytes of a token's keys and values in all layers."""
    return 2 * LAYERS * HEADS * (2 * SIZE if format == "bfloat16" else SIZE + 4)


def empty(format: str, num_blocks: int) -> list:
    shape = num_blocks, BLOCK, HEADS, SIZE
    if format == "bfloat16":
        return [kv.empty_cache(*shape, dtype=torch.bfloat16, device="cpu") for _ in range(LAYERS)]
    return [kv.empty_quant_cache(*shape, format=format, device="cpu") for _ in range(LAYERS)]


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


def blocks_of(layer: list) -> list[torch.Tensor]:
    """The bytes of each block, in every array of a layer."""
    return [_bytes(each).view(len(layer[0]), -1) for each in layer]


def side(rank: int, port: int, results: mp.SimpleQueue) -> None:
    """Rank 0 sends, rank 1 receives and compares."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    count = TOKENS // BLOCK
    for format in FORMATS:
        layers = empty(format, count)
        sent = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        taken = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        for number, layer in enumerate(layers):
            for each in map(_bytes, layer):
                each.copy_(torch.arange(each.numel()).view(each.shape) + number)
        expected = [[view[sent] for view in blocks_of(layer)] for layer in layers]
        seconds = []
        for _ in range(ROUNDS):
            if rank == 1:
                for layer in layers:
                    for each in map(_bytes, layer):
                        each.zero_()
            dist.barrier()
            started = time.perf_counter()
            if rank == 0:
                for work in [distributed.send_blocks(layer, sent, dst=1) for layer in layers]:
                    work.wait()
            else:
                distributed.receive_blocks(layers, taken, src=0)
            seconds.append(time.perf_counter() - started)
        if rank == 1:
            for layer, wanted in zip(layers, expected):
                for view, rows in zip(blocks_of(layer), wanted):
                    assert torch.equal(view[taken], rows), "a block arrived that was not sent"
            results.put((format, statistics.median(seconds)))
    dist.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(side, args=(port, results), nprocs=2)
    console = Console(width=120)
    console.print(
        f"{LAYERS} layers of {HEADS} heads x {SIZE} (Llama-3-8B), {TOKENS} tokens, two processes, gloo on "
        f"the loopback, median of {ROUNDS}; {_processor()}, torch {torch.__version__}, commit {commit()}"
    )
    table = Table("format", "KiB a token", "MiB", "ms", "GB/s")
    for _ in FORMATS:
        format, seconds = results.get()
        size = TOKENS * token_bytes(format)
        table.add_row(
            format,
            f"{token_bytes(format) / 1024:.0f}",
            f"{size / 2**20:.0f}",
            f"{1000 * seconds:.0f}",
            f"{size / seconds / 1e9:.2f}",
        )
    console.print(table)
    table = Table(
        "Ethernet, each machine", *(f"{format}: {n} machines" for format in FORMATS for n in MACHINES)
    )
    for gigabits in GIGABITS:
        rates = [n * gigabits * 1e9 / 8 / token_bytes(format) for format in FORMATS for n in MACHINES]
        table.add_row(f"{gigabits} Gbit/s", *(f"{rate / 1000:,.0f}k" for rate in rates))
    console.print("Prompt tokens a second that prefill machines can hand over at most, all together:")
    console.print(table)


if __name__ == "__main__":
    main()
