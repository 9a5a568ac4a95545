"""The `zoo` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zoo_core.errors import ZooError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 for a ZooError, 2 for misuse."""
    from zoo_core.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal must not end the command
    try:
        app(arguments, prog_name="zoo")
    except ZooError as error:
        sys.stderr.write(f"zoo: {' '.join(str(error).split())}\n")
        sys.exit(1)
