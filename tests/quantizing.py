"""What the tests of the int8 cache share: rows, caches, comparisons, and the oracle on many rows at once."""

from contextlib import contextmanager

import numpy as np

from helpers import Twins, sentinel, skip_record_on_gpu
from kvcache_dpex import reference
from kvcache_dpex.ops import calls, dequantize, quantize
from kvcache_dpex.ops.operation import using

VALUES = ["float32", "float16", "bfloat16"]
# The exponents of each type's numbers, subnormal ones included.
EXPONENTS = {"float32": (-149, 127), "float16": (-24, 15), "bfloat16": (-133, 127)}


def stored(array, dtype):
    """float32 values as an array of `dtype`; bfloat16 bits as uint16."""
    return reference.from_float32(np.asarray(array, "f4"), dtype)


def option(dtype):
    """What tells the package that uint16 means bfloat16."""
    return {"dtype": dtype} if dtype == "bfloat16" else {}


def rows_of(rng, shape, dtype):
    """Rows of every magnitude, and among them rows of zeros and rows with a NaN or an infinity."""
    low, high = EXPONENTS[dtype]
    powers = np.exp2(rng.uniform(low, high - 2, (*shape[:-1], 1)))
    rows = np.clip(rng.standard_normal(shape), -4, 4) * powers
    kind = rng.integers(0, 24, (*shape[:-1], 1))
    rows = np.where(kind == 0, 0.0, np.where(kind == 1, -0.0, rows))
    fault = np.choose(np.clip(kind, 2, 4) - 2, [np.nan, np.inf, -np.inf])
    where = np.arange(shape[-1]) == rng.integers(0, max(shape[-1], 1), (*shape[:-1], 1))
    rows = np.where(where & (2 <= kind) & (kind <= 4), fault, rows)
    return stored(rows, dtype)


def quantize_case(
    rng, dtype, *, blocks=5, block_size=4, heads=2, size=16, value_size=None, tokens=6, axes=2, codes="int8"
):
    """Rows, and sentinel-filled codes and scales without gaps."""
    sizes = size, size if value_size is None else value_size
    scales = (blocks * block_size, heads) if axes == 2 else (blocks, block_size, heads)
    return (
        *(rows_of(rng, (tokens, heads, each), dtype) for each in sizes),
        *(sentinel((blocks, block_size, heads, each), codes) for each in sizes),
        *(sentinel(scales, "float32") for _ in sizes),
    )


def check_quantize(queue, *host, wrap=None, **options):
    """The package's write and the reference's, from the same bytes, leave the same bytes everywhere."""
    twins = Twins(queue)
    device = [twins.view(array) for array in host]
    quantize.reshape_and_cache_quant(*(wrap(array) for array in device) if wrap else device, **options)
    with np.errstate(all="ignore"):
        taken = {name: options.get(name) for name in ("dtype", "format")}
        reference.reshape_and_cache_quant(*host, **taken)
    twins.assert_equal()


def check_dequantize(queue, q, scales, out, *, blocks=None, **options):
    """What the package decodes into `out` is what the reference decodes, and nothing else changes."""
    twins = Twins(queue)
    device = [twins.view(array) for array in (q, scales, out)]
    chosen = None if blocks is None else twins.view(blocks)
    result = dequantize.dequant_cache(*device[:2], out=device[2], blocks=chosen, **options)
    assert result is device[2]
    with np.errstate(all="ignore"):
        out[...] = reference.dequant_cache(
            q,
            scales,
            dtype=options.get("dtype") or out.dtype.name,
            blocks=blocks,
            format=options.get("format"),
        )
    twins.assert_equal()


def quantize_rows(rows):
    """Codes and scales of float32 rows, all at once: `reference.quantize_row` without its loop."""
    with np.errstate(all="ignore"):
        absmax = np.abs(rows).max(-1, initial=0)
        scales = np.where(np.isnan(absmax), np.float32(np.nan), absmax / np.float32(127))
        codes = np.clip(np.rint(rows / scales[..., None]), -127, 127)
        kept = (scales > 0) & np.isfinite(scales)
        return np.where(kept[..., None], codes, 0).astype("int8"), scales


@contextmanager
def force_kernel(queue, name):
    """Have quantization take one kernel wherever it fits; gives the names of those it launches."""
    if name != "any":
        skip_record_on_gpu(name, queue)
    launched = []
    usual = calls.settings.launch

    def launch(plan):
        launched.append(plan.kernel.__name__)
        return usual(plan)

    with using(launch=launch, variant=name):
        yield launched
