"""From a Python function to a SPIR-V module: its source, the compiler, the store; and the simulator."""
