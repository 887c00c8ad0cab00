"""``python -m kvcache_dpex``: check this machine, look into the environment, list kernels, plan memory."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvcache_dpex", description=__doc__)
    commands = parser.add_subparsers(metavar="command")
    for name in ("check", "doctor", "hub", "kernels", "size"):
        module = import_module(f".commands.{name}", __package__)
        summary = (module.__doc__ or name).splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments or sys.argv[1:] or ["check"])
    try:
        return chosen.run(chosen)
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
