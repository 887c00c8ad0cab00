"""Functions that kernels may call: plain Python here, SPIR-V instructions once compiled."""
