"""Watch the other ranks from a process of its own while MLX connects them, for it waits with Python's lock held.

Nothing is being written then, so a process that is to end is killed.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from .watch import STARTS, Watch


@contextlib.contextmanager
def watched_from_outside(begun: Watch | None) -> Iterator[None]:
    """Let a guard take the place of this process's watch, if there is one; in the main thread, which alone may ask
    for it, signals end the process at once.
    """
    if begun is None:
        yield
        return
    ended_by = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in ended_by}
    with begun.turn:
        sockets = {rank: peer.socket.fileno() for rank, peer in begun.peers.items()}
        argv = [sys.executable, "-m", __name__, json.dumps([os.getpid(), begun.rank, begun.limit, sockets])]
        options = {"pass_fds": sockets.values(), "stdin": subprocess.DEVNULL, "start_new_session": True}
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(argv, stdout=2, stderr=2, env=path, **options) as guard:
            try:
                yield
            finally:
                guard.kill()
                for number, handler in handlers.items():
                    signal.signal(number, handler)


class Guard(Watch):
    """The watch of another process, which it kills where that one would have ended."""

    def __init__(self, process: int, rank: int, limit: float, sockets: dict[str, int]):
        super().__init__(rank, len(sockets) + 1, ("", 0), limit)
        self.process, self.end = process, time.monotonic() + STARTS * limit
        for other, number in sockets.items():
            self._add(int(other), socket.socket(fileno=number))

    def _listen(self) -> None:
        if os.getppid() != self.process:
            os._exit(0)
        if time.monotonic() > self.end:
            self._end(f"MLX has not connected the ranks within {STARTS * self.limit:g} s")
        super()._listen()

    def _say_alive(self) -> None:
        """Say so where the process is not stopped."""
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(self.process)], capture_output=True, check=False)
        if not state.stdout.startswith(b"T"):
            super()._say_alive()

    def _stop(self, code: int) -> NoReturn:
        os.kill(self.process, signal.SIGKILL)
        os._exit(code)


if __name__ == "__main__":
    Guard(*json.loads(sys.argv[1]))._keep_listening()
