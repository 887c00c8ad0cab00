"""Evidence for Intel GPUs without one: Intel's compiler, its driver, and a simulator that sees races."""
