"""From a Python function to a SPIR-V module: its source, the compiler, the store; and the simulator."""

from . import edits

edits.watch()  # before any kernel file is imported
