"""The table of kv-cache-xpu on this machine: 8 tokens, 8 KV heads, head_size 128, 30 iterations after 5.

    python benchmarks/bench.py                  # the installed package
    python benchmarks/bench.py --hub FOLDER     # a kernel of the kernels hub, from a folder of it
    python benchmarks/bench.py --hub OWNER/NAME # or from the hub itself

Times a call of the kernel against the eager equivalent, on the XPU where torch has one, else on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

TOKENS, HEADS, SIZE, BLOCKS, BLOCK_SIZE = 8, 8, 128, 256, 16
ITERATIONS, WARMUP = 30, 5

if __name__ == "__main__":  # as a script: the package beside it, and none of this folder's names
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where an output is not the eager one's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hub", metavar="WHERE", help="a folder, or the name of a repository on the hub")
    options = parser.parse_args(arguments)
    kv = load(options.hub)
    import torch

    device = "xpu" if torch.xpu.is_available() else "cpu"
    name = torch.xpu.get_device_name() if device == "xpu" else "CPU"
    print(f"{kv.__name__} on {name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{TOKENS} tokens, {HEADS} KV heads, head_size {SIZE}; medians of {ITERATIONS} after {WARMUP}, ms")
    print(f"\n{'operation':<30}{'kernel':>9}{'eager':>9}{'ratio':>8}  output")
    wrong = False
    for title, kernel, eager, outputs in operations(kv, torch, device):
        ours, theirs = (_median(run, _finish(torch, device)) for run in (kernel, eager))
        equal = all(torch.equal(a, b) for a, b in outputs())
        wrong |= not equal
        verdict = "bit-exact" if equal else "DIFFERS FROM EAGER"
        print(f"{title:<30}{ours:>9.4f}{theirs:>9.4f}{theirs / ours:>7.2f}x  {verdict}")
    _print_residency(kv, torch, device)
    return int(wrong)


def load(where: str | None) -> Any:
    """The operations on tensors: of the package, or of a kernel loaded through the hub's client."""
    if where is None:
        import kvcache_dpex.torch

        return kvcache_dpex.torch
    import kernels

    if Path(where).exists():
        return kernels.get_local_kernel(Path(where))
    return kernels.get_kernel(where, version=1, trust_remote_code=True)


def operations(kv: Any, torch: Any, device: str) -> list[tuple[str, Callable, Callable, Callable]]:
    """Title, kernel, eager equivalent, and pairs of outputs that must be equal."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(TOKENS, HEADS, SIZE, generator=generator).to(device) for _ in range(2))
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:TOKENS].to(device)
    sizes = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "num_kv_heads": HEADS, "head_size": SIZE}
    caches, eager_caches = (kv.empty_cache(**sizes, device=device) for _ in range(2))
    quant, eager_quant = (kv.empty_quant_cache(**sizes, device=device) for _ in range(2))

    def write_eagerly() -> None:
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        for rows, cache in zip((key, value), eager_caches):
            cache[block, offset] = rows

    def quantize_eagerly() -> None:
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        for rows, codes, scales in zip((key, value), eager_quant[:2], eager_quant[2:]):
            scale = rows.abs().amax(-1) / 127
            codes[block, offset] = (rows / scale[..., None]).round().clamp(-127, 127).to(torch.int8)
            scales[slots] = scale

    decoded: dict[str, Any] = {}
    return [
        (
            "reshape_and_cache",
            lambda: kv.reshape_and_cache(key, value, *caches, slots),
            write_eagerly,
            lambda: zip(caches, eager_caches),
        ),
        (
            "reshape_and_cache_quant",
            lambda: kv.reshape_and_cache_quant(key, value, *quant, slots),
            quantize_eagerly,
            lambda: zip(quant, eager_quant),
        ),
        (
            "dequant_cache",
            lambda: decoded.update(kernel=kv.dequant_cache(quant[0], quant[2])),
            lambda: decoded.update(eager=quant[0].float() * quant[2].view(quant[0].shape[:3])[..., None]),
            lambda: [(decoded["kernel"], decoded["eager"])],
        ),
    ]


def _finish(torch: Any, device: str) -> Callable[[], Any]:
    return torch.xpu.synchronize if device == "xpu" else lambda: None


def _median(run: Callable[[], Any], finish: Callable[[], Any]) -> float:
    """Milliseconds of a call and the wait for it."""
    taken = []
    for _ in range(WARMUP + ITERATIONS):
        start = time.perf_counter()
        run()
        finish()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[WARMUP:])


def _print_residency(kv: Any, torch: Any, device: str) -> None:
    sizes = (BLOCKS, BLOCK_SIZE, HEADS, SIZE)
    quantized = sum(each.nbytes for each in kv.empty_quant_cache(*sizes, device=device))
    for dtype in (torch.float32, torch.float16):
        plain = sum(each.nbytes for each in kv.empty_cache(*sizes, dtype=dtype, device=device))
        print(f"int8 cache with its scales: {quantized / plain:.3f} of the bytes of {dtype}")


if __name__ == "__main__":
    sys.exit(main())
