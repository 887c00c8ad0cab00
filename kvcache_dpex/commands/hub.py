"""Write the package as a repository of the kernels hub, for torch on CPUs and on Intel GPUs."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from .. import __version__
from . import arguments

PACKAGE = Path(__file__).parent.parent
NAME = "kvcache-dpex"
BACKENDS = ("cpu", "xpu")

ENTRY = '''\
"""A paged KV cache for Intel GPUs in pure Python, as the kernels hub loads it."""

from .kvcache_dpex.runtime.environment import devices

# The hub cannot declare it, so a missing dpctl is told when the kernel is loaded, not when it is used.
devices.load_dpctl()

from .kvcache_dpex.torch import *  # noqa: E402, F403
from .kvcache_dpex.torch import __all__  # noqa: E402, F401
'''

CARD = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernels
---
# {name}

A paged KV cache for Intel GPUs in pure Python, loadable through `kernels`:
new keys and values scatter into a block-paged cache, bit for bit in any dtype or as int8 codes with a scale
for each token and head. Tensors are used where they are. Version {version}; it runs on the CPU too, and has
not yet run on an Intel GPU.

It needs dpctl, which the hub cannot install: `pip install dpctl`. Beside a torch with XPU support it must be
the dpctl that shares torch's SYCL runtime; the error that names a mismatch names the version to install.

## Usage

```python
{usage}```

## Functions

`empty_cache`, `empty_quant_cache`, `reshape_and_cache`, `reshape_and_cache_quant`, `reshape_and_cache_fp8`,
`dequant_cache`, `paged_attention`, `copy_blocks`, `swap_blocks`, `gather_blocks`, `slot_mapping`,
`rotary_and_cache`, `reshape_and_cache_flash` (vLLM's argument order), `flash_attn_func`,
`flash_attn_varlen_func` and `flash_attn_with_kvcache` (flash-attn's arguments, which transformers uses), and
`to_torch` and `from_torch` (dpnp arrays and tensors in one memory). Caches are
`[num_blocks, block_size, num_kv_heads, head_size]`, scales `[num_blocks * block_size, num_kv_heads]`.
Slot `s` is offset `s % block_size` of block `s // block_size`; a negative slot skips its token.
"""

USAGE = """\
import torch
from kernels import get_kernel

kv = get_kernel("{repository}", version=1, trust_remote_code=True)

device = "xpu" if torch.xpu.is_available() else "cpu"
key_cache, value_cache = kv.empty_cache(
    num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, device=device
)
key, value = torch.randn(2, 4, 8, 128, device=device)
slot_mapping = torch.tensor([16, 17, 40, -1], device=device)
kv.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

# int8 variant
kq, vq, ks, vs = kv.empty_quant_cache(
    num_blocks=256, block_size=16, num_kv_heads=8, head_size=128, device=device
)
kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slot_mapping)
approx = kv.dequant_cache(kq, ks)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to write the repository: a new or an empty folder")
    parser.add_argument(
        "--repository",
        type=arguments.repository,
        default=f"your-name/{NAME}",
        help="its name on the hub, for the card, by default %(default)s",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")


def run(options: argparse.Namespace) -> int:
    """Write the repository and say how to load it."""
    folder = options.folder
    if not options.force and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty: name another folder, or --force to replace the repository in it"
        )
    write_hub(folder, options.repository)
    print(f'LOCAL_KERNELS="{options.repository}={folder}" makes get_kernel load it from here')
    return 0


def write_hub(folder: Path | str, repository: str = f"your-name/{NAME}") -> None:
    """Write a repository of the kernels hub: one variant a backend, each with the whole package, and a card.

    A variant needs nothing but torch, NumPy and dpctl, and shares nothing with an installed package.
    """
    build = Path(folder) / "build"
    for backend in BACKENDS:
        variant = build / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        shutil.copytree(PACKAGE, variant / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (variant / "__init__.py").write_text(ENTRY)
        (variant / "metadata.json").write_text(json.dumps(_metadata(backend), indent=1) + "\n")
    usage = USAGE.format(repository=repository)
    Path(folder, "README.md").write_text(CARD.format(name=NAME, version=__version__, usage=usage))


def _metadata(backend: str) -> dict:
    return {
        # The name of the loaded module: no dots, and another one for another content.
        "id": f"kvcache_dpex_{backend}_{_digest()[:12]}",
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def _digest() -> str:
    """What tells two contents of the package apart."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(PACKAGE)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
