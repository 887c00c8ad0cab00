"""Check this machine, look into the environment, list kernels, plan memory."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from . import __version__

COMMANDS = ("check", "doctor", "hub", "kernels", "size")
EPILOG = """\
Without a command, check runs: `%(prog)s --device cpu` is `%(prog)s check --device cpu`.

exit status: 0 all is well, 1 a check fails, doctor finds a problem or an error is printed, 2 wrong usage
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments = ["check", *arguments]
    for stream in (sys.stdout, sys.stderr):
        # A device or a folder may have a name that the terminal's encoding does not have.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as `head`, has all that it wants; nothing is left to flush when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    as_module = os.path.basename(sys.argv[0]) == "__main__.py"
    parser = argparse.ArgumentParser(
        prog="python -m kvcache_dpex" if as_module else "kvcache-dpex",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvcache_dpex {__version__}")
    commands = parser.add_subparsers(metavar="command")
    for name in COMMANDS:
        module = import_module(f".commands.{name}", __package__)
        summary = (module.__doc__ or name).splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
