"""Run the command line: `python -m mlx_mtp`, and the script `mlx-mtp`."""

import os
import signal
from typing import Any


def main() -> None:
    """Run the command line. Ctrl-C during its imports, and after a command has ended, exits with 130 at once.

    In between the command handles Ctrl-C.
    """
    signal.signal(signal.SIGINT, _leave)
    try:
        from .cli import main

        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main()
        finally:
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()


def _leave(*_: Any) -> None:
    os._exit(130)  # at once: there is nothing to clean up yet, or any more


if __name__ == "__main__":
    main()
