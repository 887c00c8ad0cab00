"""From a Python function to a launched kernel: libraries, devices, compiler, store, launch, arrays."""
