"""Evidence for Intel GPUs without one: Intel's compiler, its driver, and a simulator that sees races.

``python -m pytest tests/gates`` says at its end which gates ran. What they need, beside the package:

* module gate: nothing; ``spirv-val`` where it is installed
* native gate and driver gate: ``python -m tests.gates.fetch``, which installs nothing
* race and bounds gate: the Debian 12 packages oclgrind, llvm-spirv-14 and llvm-14
* planted faults that are compiled: numba-dpex
* real GPU gate: what benchmarks/nvidia recorded; its translation to PTX: llvmlite and dpcpp-llvm-spirv

Results are never looked at on the simulated GPUs, where nothing executes; Oclgrind's are.
"""
