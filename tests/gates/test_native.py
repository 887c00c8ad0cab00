"""Native gate: what Intel's compiler makes of the packaged modules, for the GPUs that people have.

Bounds, not exact figures: the compiler moves on.
"""

import pytest

from kvcache_dpex.runtime.compile import compiler

from . import native, planted

MODULES = native.without_record()
# Most instructions that a kernel may take on any product: a quarter above what was read off.
INSTRUCTIONS = {
    "rotate_and_scatter": 2530,
    "token_places": 380,
    "token_slots": 805,
    "scatter_gpu": 460,
    "scatter_strided": 1050,
    "cast_gpu": 1850,
    "cast_strided": 3700,
    "quantize_strided": 3700,
    "quantize_gpu": 1850,
    "dequantize_gpu": 1000,
    "dequantize_gpu_float32": 900,
    "dequantize_strided": 900,
    "dequantize_cpu": 850,
    "paged_attention_strided": 2000,
    "merge_states": 1100,
    "move_blocks_gpu": 2900,
    "move_blocks_strided": 6150,
}
# Fast paths: least bytes a lane in each load of data (not of the slot) and in each store.
WIDTHS = {
    "scatter_gpu": (16, 16),
    "move_blocks_gpu": (16, 16),
    "quantize_gpu-float32": (16, 4),
    "quantize_gpu-float16": (16, 4),
    "quantize_gpu-bfloat16": (16, 4),
    "cast_gpu": (4, 4),  # scales are loaded too
    "dequantize_gpu_float32": (4, 16),
    "dequantize_gpu-float16": (4, 16),
    "dequantize_gpu-bfloat16": (4, 16),
}

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=native.missing() or "")
needs_compiler = pytest.mark.skipif(
    not compiler.available(), reason="compiling a planted fault needs numba-dpex"
)


@pytest.fixture(scope="session")
def facts():
    return native.compile_all(MODULES)


def faults(name, product, found):
    """What would make a kernel slow, or impossible, on a product."""
    if isinstance(found, native.Refused):
        return [f"refused: {found}"]
    result = [f"{found.spilled} bytes spilled"] if found.spilled else []
    if found.private:
        result.append(f"{found.private} bytes of private memory")
    # The compiler itself divides uint32 through float64 where that is fast.
    if found.float64 and product != "pvc":
        result.append(f"{found.float64} float64 instructions")
    if found.simd < 16:
        result.append(f"SIMD{found.simd}")
    return result + narrowed(name, found)


def narrowed(name, found):
    """Messages of a fast path that move less than they could."""
    kernel, *types = name.split("-")
    least = WIDTHS.get(kernel) or WIDTHS.get("-".join([kernel, *types[:1]]))
    if least is None:
        return []
    slot = {"int32": 4, "int64": 8}.get(types[-1] if types else "")
    loads = [int(width) for width in found.loads if int(width) != slot]
    stores = [int(width) for width in found.stores]
    result = [f"loads of {width} bytes a lane" for width in loads if width < least[0]]
    return result + [f"stores of {width} bytes a lane" for width in stores if width < least[1]]


@pytest.mark.parametrize("name", MODULES)
def test_every_product_takes_the_module_as_it_is_meant(name, facts):
    wrong = {product: faults(name, product, facts[name, product]) for product in native.PRODUCTS}
    assert {product: found for product, found in wrong.items() if found} == {}


@pytest.mark.parametrize("name", MODULES)
def test_no_kernel_grows_unnoticed(name, facts):
    kernel = name.split("-")[0]
    assert kernel in INSTRUCTIONS, f"no bound for kernel {kernel}: add one to INSTRUCTIONS"
    counts = {product: facts[name, product].instructions for product in native.PRODUCTS}
    # Few devices have instructions for fp8: its casts are integer arithmetic.
    factor = 2 if "float8" in name else 1
    assert max(counts.values()) <= factor * INSTRUCTIONS[kernel], counts


def test_the_fast_path_moves_16_bytes_a_lane(facts):
    for product in native.PRODUCTS:
        found = facts["scatter_gpu-int64", product]
        assert {*found.loads, *found.stores} == {"8", "16"}, product
        assert set(found.stores) == {"16"}, product


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("quantize_gpu")])
def test_codes_leave_eight_at_a_time(name, facts):
    """Only the two scales of a row are stores of 4 bytes."""
    for product in native.PRODUCTS:
        stores = facts[name, product].stores
        assert stores["8"] >= 4, product
        assert stores["4"] <= 2, product


def test_table_has_a_row_for_every_module(facts):
    table = native.table(facts)
    assert (len(table.rows), len(table.columns)) == (len(MODULES), 1 + len(native.PRODUCTS))


@needs_compiler
@pytest.mark.parametrize("product", ["tgllp", "dg2"])
def test_a_float64_literal_is_refused(product):
    with pytest.raises(native.Refused, match="Double type is not supported"):
        native.facts(planted.compiled(planted.float64_literal).binary, product)


@needs_compiler
def test_float64_instructions_are_seen_where_they_exist():
    product = "bmg"
    found = native.facts(planted.compiled(planted.float64_literal).binary, product)
    assert any("float64 instructions" in fault for fault in faults("planted", product, found))


@needs_compiler
@pytest.mark.parametrize("product", ["tgllp", "bmg"])
def test_a_spill_is_seen(product):
    found = native.facts(planted.many_live_values(200), product)
    assert any("spilled" in fault for fault in faults("planted", product, found))


@needs_compiler
@pytest.mark.parametrize("product", native.PRODUCTS)
def test_a_narrowed_store_is_seen(product):
    found = native.facts(planted.compiled(planted.narrowed_store).binary, product)
    assert "stores of 8 bytes a lane" in faults("scatter_gpu", product, found)


def test_a_damaged_module_is_refused():
    with pytest.raises(native.Refused):
        native.facts(next(iter(MODULES.values()))[:200], "tgllp")
