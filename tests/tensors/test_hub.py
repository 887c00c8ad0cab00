"""The kernels hub repository: written by the command, loaded offline, with and without an installed copy."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kernels", reason="kernels is not installed: pip install 'kvcache_dpex[hub]'")

from helpers import output_of, run_python
from kvcache_dpex import torch as installed
from kvcache_dpex.__main__ import main
from kvcache_dpex.commands.hub import PACKAGE, _metadata, write_hub

SEED = "phanerozoic/kv-cache-xpu"

USAGE = f"""
import torch
from kernels import get_kernel

kv = get_kernel("{SEED}", version=1, trust_remote_code=True)

key_cache, value_cache = kv.empty_cache(
    num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, device="cpu"
)
kq, vq, ks, vs = kv.empty_quant_cache(
    num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, device="cpu"
)
key, value = torch.randn(2, 4, 8, 128)
slot_mapping = torch.tensor([16, -1, 4095, 4096])
kv.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

# int8 variant
kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slot_mapping)
approx = kv.dequant_cache(kq, ks)
"""

COMPARE = """
from importlib import import_module
import numpy as np

reference = import_module(kv.__name__ + ".kvcache_dpex.reference")
caches, codes = reference.empty_cache(256, 16, 8, 128), reference.empty_quant_cache(256, 16, 8, 128)
reference.reshape_and_cache(key.numpy(), value.numpy(), *caches, slot_mapping.numpy())
reference.reshape_and_cache_quant(key.numpy(), value.numpy(), *codes, slot_mapping.numpy())
for found, expected in zip((key_cache, value_cache, kq, vq, ks, vs), caches + codes):
    np.testing.assert_array_equal(found.numpy(), expected)
np.testing.assert_array_equal(approx.numpy(), reference.dequant_cache(codes[0], codes[2]))
print("equal to the oracle")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A repository as the command writes it."""
    folder = tmp_path_factory.mktemp("hub")
    assert main(["hub", str(folder), "--repository", SEED]) == 0
    return folder


def local(hub):
    return {"LOCAL_KERNELS": f"{SEED}={hub}", "HF_HUB_OFFLINE": "1"}


def test_usage_block_without_an_installed_copy(hub):
    hidden = "import sys\nsys.modules['kvcache_dpex'] = None\n"
    assert output_of(hidden + USAGE + COMPARE, **local(hub)) == "equal to the oracle"


def test_usage_block_beside_an_installed_copy(hub):
    beside = "import kvcache_dpex.torch as installed\n"
    both = """
assert kv.reshape_and_cache is not installed.reshape_and_cache
installed.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
"""
    assert output_of(beside + USAGE + both + COMPARE, **local(hub)) == "equal to the oracle"


def test_usage_block_of_the_card(hub):
    card = (hub / "README.md").read_text()
    usage = card.split("```python\n")[1].split("```")[0]
    check = "print(approx.shape, torch.equal(key_cache.view(-1, 8, 128)[17], key[1]))"
    assert output_of(usage + check, **local(hub)) == "torch.Size([256, 16, 8, 128]) True"


def test_get_local_kernel(hub):
    code = f"""
from pathlib import Path
from kernels import get_local_kernel

for part in ("", "build", "build/torch-cpu", "build/torch-xpu"):
    kv = get_local_kernel(Path({str(hub)!r}, part))
    assert all(callable(getattr(kv, name)) for name in kv.__all__)
    print(kv.__name__[:16], len(kv.__all__))
"""
    count = len(installed.__all__)
    assert output_of(code).splitlines() == [f"kvcache_dpex_cpu {count}"] * 3 + [f"kvcache_dpex_xpu {count}"]


def test_a_missing_dpctl_is_told_with_the_command(hub):
    done = run_python("import sys\nsys.modules['dpctl'] = None\n" + USAGE, **local(hub))
    assert done.returncode == 1
    assert "ImportError: kvcache_dpex needs dpctl" in done.stderr
    assert "pip install dpctl" in done.stderr


@pytest.mark.parametrize("backend", ["cpu", "xpu"])
def test_each_variant_holds_the_whole_package(backend, hub):
    variant = hub / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": backend}
    assert metadata["id"].isidentifier()
    assert (metadata["version"], metadata["python-depends"]) == (1, [])

    def files(folder):
        kept = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(folder): path.read_bytes() for path in kept}

    assert files(variant / "kvcache_dpex") == files(PACKAGE)


def test_another_content_is_another_module(tmp_path, monkeypatch):
    """kernels keeps a module by its id: an edit that leaves every size alone must change it."""
    monkeypatch.setattr("kvcache_dpex.commands.hub.PACKAGE", tmp_path)
    ids = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_text(text)
        ids.append(_metadata("cpu")["id"])
    assert len(set(ids)) == 3


def test_compiled_python_stays_behind(tmp_path, monkeypatch):
    """It names the paths of the machine that wrote it."""
    package = tmp_path / "kvcache_dpex"
    (package / "ops" / "__pycache__").mkdir(parents=True)
    (package / "ops" / "__pycache__" / "write.cpython-311.pyc").touch()
    monkeypatch.setattr("kvcache_dpex.commands.hub.PACKAGE", package)
    write_hub(tmp_path / "hub", SEED)
    assert (tmp_path / "hub/build/torch-cpu/kvcache_dpex/ops").is_dir()
    assert not list((tmp_path / "hub").rglob("__pycache__"))


def test_writing_again_leaves_nothing_old(hub):
    old = hub / "build" / "torch-cpu" / "kvcache_dpex" / "old.py"
    old.touch()
    write_hub(hub, SEED)
    assert not old.exists()
