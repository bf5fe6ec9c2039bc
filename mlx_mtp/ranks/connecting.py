"""Watch the other ranks from a separate process while MLX connects them, which blocks all Python threads.

Nothing is written during that time, so the process is killed if a rank is missing.
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
def watched_from_outside(watch: Watch | None) -> Iterator[None]:
    """Context in which a guard process replaces this process's watch; without a watch nothing changes.

    In it SIGINT and SIGTERM end the process at once if this is the main thread; other threads cannot set handlers.
    """
    if watch is None:
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in signals}
    with watch.turn:
        sockets = {rank: peer.socket.fileno() for rank, peer in watch.peers.items()}
        argv = [sys.executable, "-m", __name__, json.dumps([os.getpid(), watch.rank, watch.limit, sockets])]
        options = {"pass_fds": sockets.values(), "stdin": subprocess.DEVNULL, "start_new_session": True}
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(argv, stdout=2, stderr=2, env=path, **options) as guard:
            try:
                yield
            finally:
                guard.kill()
                for number, handler in handlers.items():
                    signal.signal(number, handler)


class ProcessGuard(Watch):
    """A watch in a process of its own, which kills the process that it guards, and ends, if a rank is missing.

    It does both also if MLX has not connected the ranks after STARTS times the limit.
    """

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

    def _send_alive(self) -> None:
        """Report this rank as alive unless the process that is guarded has been stopped (as by Ctrl-Z)."""
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(self.process)], capture_output=True, check=False)
        if not state.stdout.startswith(b"T"):
            super()._send_alive()

    def _stop(self, code: int) -> NoReturn:
        os.kill(self.process, signal.SIGKILL)
        os._exit(code)


if __name__ == "__main__":
    ProcessGuard(*json.loads(sys.argv[1]))._keep_listening()
