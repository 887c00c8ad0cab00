"""The packaged kernels on an NVIDIA GPU: the same SPIR-V, translated to PTX. README.md says how."""
