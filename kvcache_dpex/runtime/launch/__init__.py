"""From arrays and a module to a kernel that runs: operands, arguments, queues, and the bridges to torch."""
