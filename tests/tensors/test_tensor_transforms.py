"""What torch's dispatcher does around an operation: tracing, profiling, transforms, derivatives, fakes."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensor_cases import contiguous_case  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from helpers import output_of  # noqa: E402
from kvcache_dpex import torch as kv  # noqa: E402
from kvcache_dpex.dispatch import schema_of  # noqa: E402
from kvcache_dpex.ops.operation import OPERATIONS  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
SLOTS = torch.tensor([7, -1, 19, 0, 20, 3])


def write_case():
    return [*contiguous_case(), SLOTS]


def quant_case():
    rows = torch.randn(2, 6, 2, 16)
    return [*rows, *kv.empty_quant_cache(5, 4, 2, 16, device="cpu"), SLOTS]


def fp8_case():
    caches = torch.zeros(2, 5, 4, 2, 16, dtype=torch.float8_e4m3fn)
    return [*torch.randn(2, 6, 2, 16), *caches, torch.tensor([0.01]), torch.tensor([0.01, 0.02]), SLOTS]


def attention_case():
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    return [torch.randn(2, 4, 16), *torch.randn(2, 5, 4, 2, 16), table, lens]


def states():
    return [torch.randn(3, 2, 8), torch.randn(3, 2), torch.randn(3, 2, 8), torch.randn(3, 2)]


def moved_blocks():
    ids = torch.tensor([1, -1, 0])
    return [ids, torch.zeros(3, 4), ids.flip(0), *torch.zeros(7, 3, 4), *torch.randn(8, 2, 4)]


def rotation():
    rows = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    return [torch.arange(6), *rows, torch.randn(9, 16), *torch.zeros(2, 5, 4, 2, 16), SLOTS]


CALLS = {
    "merge_attention_states": states,
    "move_blocks": moved_blocks,
    "paged_attention": attention_case,
    "reshape_and_cache": write_case,
    "reshape_and_cache_quant": quant_case,
    "reshape_and_cache_fp8": fp8_case,
    "dequant_cache": lambda: quant_case()[2:5:2],
    "rotary_and_cache": rotation,
    "slot_mapping": lambda: [torch.tensor([[7, 2], [5, -1]]), torch.tensor([15, 16])],
    "get_batch_indices_positions": lambda: [torch.tensor([0, 1, 3]), torch.tensor([5, 2])],
}
NUMBERS = {"slot_mapping": {"block_size": 16}, "get_batch_indices_positions": {"nnz": 4}}
OF_FLOATS = sorted(set(CALLS) - set(NUMBERS))


def test_every_operation_is_here():
    assert set(CALLS) == set(OPERATIONS)


def test_jit_trace_records_the_write():
    """PyTorch #13564: a write that the tracer does not see is missing from the trace."""

    def step(key, value, key_cache, value_cache, slots):
        kv.reshape_and_cache(key, value, key_cache, value_cache, slots)
        return key_cache + 0

    traced = torch.jit.trace(step, write_case(), check_trace=False)
    assert "kvcache_dpex::reshape_and_cache" in str(traced.graph)
    case = [torch.ones_like(each) if each is not SLOTS else each for each in write_case()]
    case[2].zero_()
    assert torch.equal(traced(*case).view(-1, 2, 16)[7], case[0][0])


def test_jit_trace_records_the_decoding():
    traced = torch.jit.trace(lambda q, scales: kv.dequant_cache(q, scales), tuple(CALLS["dequant_cache"]()))
    assert "kvcache_dpex::dequant_cache" in str(traced.graph)


def test_the_profiler_sees_the_operation():
    """PyTorch #178216."""
    case = write_case()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kv.reshape_and_cache(*case)
    assert "kvcache_dpex::reshape_and_cache" in {event.name for event in profile.events()}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_forward_mode_tangents_are_refused(name):
    case = CALLS[name]()
    with forward_ad.dual_level():
        at = next(at for at, tensor in enumerate(case) if tensor.dtype == torch.float32)
        case[at] = forward_ad.make_dual(case[at], torch.ones_like(case[at]))
        given = OPERATIONS[name].arrays[at].name
        with pytest.raises(ValueError, match=f"`{given}` must not have a forward-mode tangent.*unpack_dual"):
            getattr(kv, name)(*case)


@pytest.mark.parametrize("name", OF_FLOATS)
def test_every_floating_argument_must_not_require_a_gradient(name):
    for at, array in enumerate(OPERATIONS[name].arrays):
        case = CALLS[name]()
        if at < len(case) and case[at].is_floating_point():
            case[at].requires_grad_()
            with pytest.raises(ValueError, match=f"`{array.name}` must not require a gradient"):
                getattr(kv, name)(*case)


@pytest.mark.parametrize("name", ["sinks", "out", "lse"])
def test_what_is_given_by_name_must_not_require_a_gradient(name):
    given = {"sinks": torch.zeros(4), **RESULTS["paged_attention"]()}
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=f"`{name}` must not require a gradient"):
        kv.paged_attention(*CALLS["paged_attention"](), **given)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_written_argument_counts_as_changed(name):
    """Autograd refuses to go back through a tensor that was saved before the write."""
    for at, array in enumerate(OPERATIONS[name].arrays):
        case = CALLS[name]()
        options = {**(RESULTS[name]() if name in RESULTS else {}), **NUMBERS.get(name, {})}
        written = options.get(array.name, case[at] if at < len(case) else None)
        if written is not None:
            before = written._version
            getattr(kv, name)(*case, **options)
            assert (written._version > before) == (array.kind == "written"), array.name


def transformed(transform, kq, scales):
    def decode(given):
        return kv.dequant_cache(kq, given).sum()

    if transform == "vmap":
        return torch.vmap(decode)(scales[None])
    if transform == "jvp":
        return torch.func.jvp(decode, (scales,), (scales,))
    return getattr(torch.func, transform)(decode)(scales)


@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad", "functionalize"])
def test_transforms_of_an_argument_are_refused(transform):
    """functorch #635 among them: an argument of functionalize has no memory of its own."""
    with pytest.raises(NotImplementedError, match=f"no rule for torch.func's {transform}.*`scales`"):
        transformed(transform, *CALLS["dequant_cache"]())


def test_transforms_of_something_else_leave_an_operation_alone():
    case = write_case()

    def step(x):
        kv.reshape_and_cache(*case)
        return (x * x).sum()

    assert torch.equal(torch.func.grad(step)(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(case[2].view(-1, 2, 16)[7].view(torch.int32), case[0][0].view(torch.int32))


RESULTS = {
    "get_batch_indices_positions": lambda: {"out": torch.arange(4), "positions": torch.arange(4)},
    "slot_mapping": lambda: {"out": torch.zeros(2, dtype=torch.int64)},
    "dequant_cache": lambda: {"out": torch.zeros(5, 4, 2, 16)},
    "merge_attention_states": lambda: {"out": torch.zeros(3, 2, 8), "lse": torch.zeros(3, 2)},
    "paged_attention": lambda: {"out": torch.zeros(2, 4, 16), "lse": torch.zeros(2, 4)},
}
WRONG = {
    "rank": (0, lambda t: t[0], "`key` must have shape"),
    "tokens": (1, lambda t: t[:3], "`value` must have the 6 tokens"),
    "head size": (2, lambda t: t[..., :8], "`key_cache` holds rows of 2 heads of 8"),
    "dtype": (1, lambda t: t.half(), "`value` must have the dtype of `key`"),
    "slots dtype": (4, lambda t: t.float(), "`slot_mapping` must be int32 or int64"),
    "too many slots": (4, lambda t: t.repeat(2), "`slot_mapping` must have at most one slot"),
    "shared elements": (2, lambda t: t[:1].expand(5, 4, 2, 16), "elements must not share memory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fakes_check_what_needs_no_data(case):
    """A trace fails where the operation would, not when the compiled graph runs."""
    at, change, message = WRONG[case]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in write_case()]
        kv.reshape_and_cache(*fakes)
        fakes[at] = change(fakes[at])
        with pytest.raises((TypeError, ValueError), match=message):
            kv.reshape_and_cache(*fakes)


def test_fakes_of_results_check_and_describe_them():
    with FakeTensorMode() as mode:
        kq, scales = [mode.from_tensor(tensor) for tensor in CALLS["dequant_cache"]()]
        found = kv.dequant_cache(kq, scales, dtype="bfloat16", blocks=torch.zeros(3, 2, dtype=torch.int32))
        assert (found.shape, found.dtype) == ((3, 2, 4, 2, 16), torch.bfloat16)
        with pytest.raises(ValueError, match="`out` must have shape"):
            kv.dequant_cache(kq, scales, out=torch.zeros(5, 4, 2, 8))
        with pytest.raises(TypeError, match="`q` must be int8"):
            kv.dequant_cache(kq.float(), scales)


def test_the_schema_of_vllms_name_says_what_is_written():
    schema = torch.ops.kvcache_dpex.reshape_and_cache_flash.default._schema
    written = {argument.name for argument in schema.arguments if argument.is_write}
    assert written == {"key_cache", "value_cache", "k_scale", "v_scale"}


def test_schemas_say_what_is_written():
    for name, operation in OPERATIONS.items():
        for out in (False, True) if operation.results else (False,):
            schema = torch._C.parse_schema(schema_of(operation, out=out))
            written = {argument.name for argument in schema.arguments if argument.is_write}
            declared = {array.name for array in operation.arrays if array.kind == "written"}
            assert written == declared - (set() if out else set(operation.results)), name


AGAIN = """
import sys
import torch
for _ in range(2):
    for name in [name for name in sys.modules if name.split(".")[0] == "kvcache_dpex"]:
        del sys.modules[name]
    from kvcache_dpex import torch as kv
    caches = kv.empty_cache(4, 4, 1, 8, device="cpu")
    row = torch.ones(1, 1, 8)
    kv.reshape_and_cache(row, row, *caches, torch.tensor([5]))
    print(int(caches[0].sum()), torch.ops.kvcache_dpex.reshape_and_cache.default is not None)
"""


def test_a_package_that_is_imported_again_registers_its_operations_again():
    """As notebooks and test runners do, which drop a package from sys.modules."""
    assert output_of(AGAIN).splitlines() == ["8 True", "8 True"]
