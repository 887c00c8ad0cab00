"""The registered operations: opcheck, torch.compile with one graph, export, traces."""

import os
import shutil

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensor_cases import assert_same_memory, contiguous_case, sentinel, twins  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from kvcache_dpex import torch as kv  # noqa: E402

# PyTorch's own tracers use what PyTorch deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]
SLOTS = torch.tensor([7, -1, 19, 0, 20, 3])
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]
SCALE = torch.ones(1)


def quant_case():
    return [*contiguous_case()[:2], *kv.empty_quant_cache(5, 4, 2, 16, device="cpu")]


def written_codes():
    key, value, *caches = quant_case()
    kv.reshape_and_cache_quant(key.clamp(-9, 9).nan_to_num(), value.nan_to_num(), *caches, SLOTS)
    return caches[0], caches[2]


def attention_case():
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    return [torch.randn(3, 4, 16), *torch.randn(2, 5, 4, 2, 16), table, lens]


def states():
    return torch.randn(3, 4, 16), torch.randn(3, 4)


def moved_blocks():
    ids = torch.tensor([1, -1, 0])
    return ids, torch.zeros(3, 4, 2), ids.flip(0), torch.zeros(3, 4, 2)


def rotation():
    angles = torch.rand(9, 8)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    rows = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    return torch.arange(6), *rows, table, *torch.zeros(2, 5, 4, 2, 16), SLOTS


def cast_case():
    key, value, *_ = contiguous_case()
    caches = [torch.zeros(5, 4, 2, 16, dtype=torch.uint8) for _ in range(2)]
    return key, value, *caches, SCALE, SCALE.expand(2), SLOTS


def places():
    return torch.tensor([[7, 2], [5, -1]]), torch.tensor([15, 16, 3, 16, -1]), 16


STARTS = {"query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int32), "sliding_window": 4, "soft_cap": 3.0}
OPERATIONS = {
    "reshape_and_cache": lambda: (*contiguous_case(torch.bfloat16), SLOTS),
    "reshape_and_cache_quant": lambda: (*quant_case(), SLOTS),
    "reshape_and_cache_fp8": lambda: cast_case(),
    "reshape_and_cache_flash": lambda: (*contiguous_case(), SLOTS, "auto", SCALE, SCALE.clone()),
    "dequant_cache": lambda: written_codes(),
    "dequant_cache_out": lambda: written_codes(),
    "paged_attention": lambda: attention_case(),
    "paged_attention_out": lambda: attention_case(),
    "move_blocks": lambda: moved_blocks(),
    "slot_mapping": lambda: places(),
    "slot_mapping_out": lambda: places(),
    "get_batch_indices_positions": lambda: (torch.tensor([0, 1, 3]), torch.tensor([5, 2]), 4),
    "get_batch_indices_positions_out": lambda: (torch.tensor([0, 1, 3]), torch.tensor([5, 2]), 4),
    "rotary_and_cache": lambda: rotation(),
    "merge_attention_states": lambda: (*states(), *states()),
    "merge_attention_states_out": lambda: (*states(), *states()),
}


OPTIONS = {
    "reshape_and_cache_fp8": lambda: {"format": "fp8_e5m2"},
    "slot_mapping": lambda: {"query_start_loc": torch.tensor([0, 2, 5]), "window": 8},
    "slot_mapping_out": lambda: {"out": torch.empty(5, dtype=torch.int32)},
    "get_batch_indices_positions_out": lambda: {
        "out": torch.empty(4, dtype=torch.int64),
        "positions": torch.empty(4, dtype=torch.int64),
    },
    "rotary_and_cache": lambda: {"interleaved": True},
    "move_blocks": lambda: {
        "source_0": torch.randn(2, 4, 2),
        "source_1": torch.randn(8, 2),
        "num_sources": 2,
    },
    "dequant_cache": lambda: {"dtype": torch.bfloat16, "blocks": torch.tensor([[3, -1], [0, 4]])},
    "dequant_cache_out": lambda: {"out": sentinel((5, 4, 2, 16), torch.float16)},
    "paged_attention": lambda: {**STARTS, "return_lse": True},
    "paged_attention_out": lambda: {**STARTS, "out": torch.empty(3, 4, 16), "lse": torch.empty(3, 4)},
    "merge_attention_states_out": lambda: {"out": torch.empty(3, 4, 16), "lse": torch.empty(3, 4)},
}


def test_every_operation_is_checked():
    registered = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if "kvcache_dpex::" in name
    }
    assert registered == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_opcheck(name):
    operation = getattr(torch.ops.kvcache_dpex, name).default
    options = OPTIONS.get(name, dict)()
    found = torch.library.opcheck(operation, OPERATIONS[name](), options)
    assert len(found) == 4
    assert set(found.values()) == {"SUCCESS"}


@pytest.fixture(params=BACKENDS)
def backend(request):
    """A backend that counts graphs; compiled code of other tests is forgotten."""
    torch._dynamo.reset()
    yield CompileCounterWithBackend(request.param)
    torch._dynamo.reset()


def both_writes(qkv, both_caches, kq, vq, ks, vs, slots):
    """Rows are computed and read in one graph; K and V are halves of one buffer."""
    key, value = qkv[:, 0] * 2, qkv[:, 1] + 1
    key_cache, value_cache = both_caches[:, 0], both_caches[:, 1]
    kv.reshape_and_cache(key, value, key_cache, value_cache, slots)
    kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slots)
    decoded = kv.dequant_cache(kq, ks, dtype=torch.float16, blocks=slots[:2].clamp(0, 4))
    return key_cache.sum(-1) + value_cache[..., 0], decoded


def test_one_graph_for_every_number_of_tokens(backend):
    compiled = torch.compile(both_writes, fullgraph=True, backend=backend)
    for tokens in (3, 5, 8, 6):
        caches = [torch.zeros(5, 2, 4, 2, 16), *kv.empty_quant_cache(5, 4, 2, 16, device="cpu")]
        again = twins(caches)
        qkv, slots = torch.randn(tokens, 2, 2, 16), torch.arange(tokens).roll(1) * 2 - 1
        torch._dynamo.mark_dynamic(qkv, 0)
        torch._dynamo.mark_dynamic(slots, 0)
        expected, found = both_writes(qkv, *caches, slots), compiled(qkv, *again, slots)
        assert_same_memory(again, caches)
        torch.testing.assert_close(found, expected)
    assert backend.frame_count == 1


def test_one_graph_where_data_says_how_many_tokens_there_are():
    """Rows and slots that masks choose: sizes that are known when the graph runs, and checked then."""

    def step(rows, slots, chosen, given, *caches):
        kv.reshape_and_cache(rows[chosen], rows[chosen], *caches, slots[given])

    rows = torch.randn(6, 2, 16)
    chosen = torch.tensor([True, True, False, True, False, True])
    given = torch.tensor([True, False, False, True, False, True])
    found, expected = (kv.empty_cache(5, 4, 2, 16, device="cpu") for _ in range(2))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        compiled(rows, SLOTS, chosen, given, *found)
        step(rows, SLOTS, chosen, given, *expected)
        assert_same_memory(found, expected)
        with pytest.raises(ValueError, match="`slot_mapping` must have at most one slot for each of the 3"):
            compiled(rows, SLOTS, given, chosen, *found)
    torch._dynamo.reset()


@needs_compiler
def test_halves_of_a_buffer_of_symbolic_size_lose_their_offset_in_inductor():
    """PyTorch's issue 198068; here both halves then start at the same address, which is refused."""

    def step(rows, both_caches, slots):
        kv.reshape_and_cache(rows, rows, both_caches[:, 0], both_caches[:, 1], slots)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="inductor", dynamic=True)
    with pytest.raises(ValueError, match="`value_cache` must not be the memory of `key_cache`"):
        compiled(torch.zeros(6, 2, 16), torch.zeros(5, 2, 4, 2, 16), SLOTS)
    torch._dynamo.reset()


def test_token_counts_become_dynamic_by_themselves():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kv.reshape_and_cache, fullgraph=True, backend=counter)
    key, value, *caches = contiguous_case()
    for tokens in (2, 3, 4, 5, 6):
        compiled(key[:tokens], value[:tokens], *caches, SLOTS[:tokens])
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_flash_and_out_compile():
    def step(key, value, kq, vq, ks, vs, slots, out):
        kv.reshape_and_cache_flash(key, value, kq, vq, slots, "int8_per_token_head", ks, vs)
        return kv.dequant_cache(kq, ks, out=out)

    torch._dynamo.reset()
    case = [*quant_case(), SLOTS, sentinel((5, 4, 2, 16), torch.float32)]
    again = twins(case)
    step(*case)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*again)
    assert_same_memory(again, case)
    torch._dynamo.reset()


@needs_compiler
def test_scales_made_in_the_graph_are_written():
    """They are arguments that the operation changes, so inductor must not take them for zeros."""

    def step(key, value, kq, vq, slots):
        ks, vs = torch.zeros(5, 4, 2), torch.zeros(5, 4, 2)
        kv.reshape_and_cache_flash(key, value, kq, vq, slots, "int8_per_token_head", ks, vs)
        return ks + 0, vs + 0

    torch._dynamo.reset()
    rows = torch.randn(2, 6, 2, 16)
    mine, again = (
        kv.empty_quant_cache(5, 4, 2, 16, device="cpu"),
        kv.empty_quant_cache(5, 4, 2, 16, device="cpu"),
    )
    expected = step(*rows, *mine[:2], SLOTS)
    found = torch.compile(step, fullgraph=True, backend="inductor")(*rows, *again[:2], SLOTS)
    for one, other in zip((*expected, *mine), (*found, *again)):
        assert torch.equal(one, other)
    assert expected[0].any()
    torch._dynamo.reset()


def test_gradients_are_refused_while_compiling():
    key, value, *caches = contiguous_case()
    compiled = torch.compile(kv.reshape_and_cache, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="`key` must not require a gradient"):
        compiled(key.requires_grad_(), value, *caches, SLOTS)
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        key_cache, value_cache = kv.empty_cache(5, 4, 2, 16, device="cpu")
        self.register_buffer("key_cache", key_cache)
        self.register_buffer("value_cache", value_cache)

    def forward(self, key, value, slots):
        kv.reshape_and_cache(key, value, self.key_cache, self.value_cache, slots)
        return self.key_cache.sum() + self.value_cache.sum()


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_keeps_the_operation(strict):
    tokens = torch.export.Dim("tokens")
    rows = torch.randn(2, 6, 2, 16)
    program = torch.export.export(
        Layer(), (*rows, SLOTS), dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "kvcache_dpex.reshape_and_cache.default" in targets
    few = rows[0, :3], rows[1, :3], SLOTS[:3]
    torch.testing.assert_close(program.module()(*few), Layer()(*few))


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_trace_records_the_operation(mode):
    def step(*arguments):
        kv.reshape_and_cache(*arguments)
        return arguments[2] + 0

    graph = make_fx(step, tracing_mode=mode)(*contiguous_case(), SLOTS).graph
    assert [str(node.target) for node in graph.nodes][5] == "kvcache_dpex.reshape_and_cache.default"


def test_meta_tensors_pass_through_the_registered_operations():
    kq, vq, ks, vs = (cache.to("meta") for cache in kv.empty_quant_cache(5, 4, 2, 16, device="cpu"))
    rows = torch.empty(6, 2, 16, device="meta")
    torch.ops.kvcache_dpex.reshape_and_cache_quant(rows, rows, kq, vq, ks, vs, SLOTS.to("meta"))
    assert torch.ops.kvcache_dpex.dequant_cache(kq, ks, dtype=torch.float16).dtype == torch.float16
