"""End this process, with a message that names the rank, if another rank has died, hangs or does not start.

A collective that waits for such a rank never returns, and blocks Python's signal handlers. Therefore a thread of each
rank has a connection to rank 0, over which both report several times a second that they are alive. Rank 0 sends the
others the reason for which it ends.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import NoReturn

SECONDS = "MLX_MTP_RANK_SECONDS"  # from the last message of a rank to the end of all others
LIMIT = 20.0  # its default
STARTS = 3  # times the limit: time for a rank to start
BEAT = 1.0  # timeout of a connection, in seconds
POLL = BEAT / 4  # seconds between two rounds of reporting and reading
UNWINDING = 2.0  # seconds for the main thread to remove unfinished files
RESERVE = 8  # polls kept free within the limit: up to three for detection, the others for a busy machine

_watch: "Watch | None" = None


def begin(rank: int, size: int, meeting: tuple[str, int] | None) -> "Watch | None":
    """Return this process's watch, started on the first call with `meeting`, rank 0's host and port.

    None if there is none yet and `meeting` is None. Later calls return the same watch and ignore their arguments.
    """
    global _watch
    if _watch is None and meeting is not None:
        _watch = Watch(rank, size, meeting)
        threading.Thread(target=_watch.run, daemon=True).start()
        atexit.register(_watch.leave)
    return _watch


def leave(code: int) -> None:
    """Report to the other ranks that this process is about to end; with a code other than 0 they end too.

    Nothing happens without a watch. If the watch is already ending this process, it exits here.
    """
    if _watch is not None:
        _watch.leave(code)


def wait_for_reason(error: BaseException) -> None:
    """After an error of MLX, perhaps a collective's, wait a few seconds for the watch to end this process.

    Returns at once without a watch, and if `error` is no RuntimeError whose message begins with "[", as MLX's do.
    """
    if not (isinstance(error, RuntimeError) and str(error).startswith("[")):  # not an error of MLX
        return
    end = time.monotonic() + BEAT + 3 * UNWINDING
    while _watch is not None and time.monotonic() < end:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(POLL)


@dataclass
class Peer:
    """A connection to another rank.

    alive: time.monotonic() of its last message. partial: an unfinished line of its messages.
    """

    socket: socket.socket
    alive: float
    partial: bytes = b""


@dataclass
class Watch:
    """The connections of this rank: rank 0's to all others, any other's to rank 0.

    limit: seconds from the last message of a rank until all others have ended. code: exit code of this process once
    the watch ends it. met: set once all ranks are connected. turn: held by the thread or process that listens.
    """

    rank: int
    size: int
    meeting: tuple[str, int]
    limit: float = field(default_factory=lambda: float(os.environ.get(SECONDS) or LIMIT))
    peers: dict[int, Peer] = field(default_factory=dict)
    code: int | None = None
    met: threading.Event = field(default_factory=threading.Event)
    turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def poll(self) -> float:
        """Seconds between two rounds of reporting and reading."""
        return min(POLL, self.limit / 80)

    @property
    def unwinding(self) -> float:
        """Seconds for the main thread to clean up before the process ends."""
        return min(UNWINDING, self.limit / 5)

    @property
    def silence(self) -> float:
        """Seconds without a message after which a rank counts as hanging, so that all others end within `limit`."""
        return self.limit - self.unwinding - RESERVE * self.poll

    def run(self) -> None:
        """Connect the ranks, then watch the connected ones until they have left; a missing rank ends the process.

        Rank 0 is connected to all others, which are connected to rank 0 only.
        """
        end = time.monotonic() + STARTS * self.limit
        try:
            if self.rank == 0:
                self._accept(end)
            else:
                self._connect(end)
        except OSError as e:
            host, port = self.meeting
            self._end(f"the ranks cannot watch each other at {host}:{port} ({e.strerror})")
        self._keep_listening()

    def _keep_listening(self) -> None:
        last = time.monotonic()
        while self.peers:
            time.sleep(self.poll)
            with self.turn:
                if time.monotonic() - last > self.silence / 2:  # this thread did not run, so messages are late
                    for peer in self.peers.values():
                        peer.alive = time.monotonic()
                last = time.monotonic()
                self._listen()

    def leave(self, code: int = 0) -> None:
        """Report to the connected ranks that this process ends with `code`, and stop watching them.

        If the watch is already ending this process, exit at once with the watch's code instead.
        """
        if self.code is not None:
            os._exit(self.code)
        self._send(f"left {code}")
        self.peers = {}

    def _accept(self, end: float) -> None:
        """Accept connections until every other rank has sent its rank number; then set `met` on all ranks.

        If a number is missing at `end`, a time.monotonic(), this process and the connected ranks end.
        """
        with socket.create_server(self.meeting, backlog=self.size) as server:
            server.settimeout(POLL)
            while missing := [str(rank) for rank in range(1, self.size) if rank not in self.peers]:
                if time.monotonic() > end:
                    self._end(f"rank {', '.join(missing)} has not started within {STARTS * self.limit:g} s")
                with contextlib.suppress(TimeoutError, ValueError):
                    connection, _ = server.accept()
                    connection.settimeout(BEAT)
                    self._add(int(connection.recv(8)), connection)
                self._listen()
        self._send("met")
        self.met.set()

    def _connect(self, end: float) -> None:
        """Connect to rank 0; retry until it listens, but end this process at `end`, a time.monotonic()."""
        while not self.peers:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(self.meeting, timeout=BEAT)
                connection.sendall(f"{self.rank}\n".encode())
                self._add(0, connection)
                return
            if time.monotonic() > end:
                self._end(f"rank 0 at {self.meeting[0]} has not started within {STARTS * self.limit:g} s")
            time.sleep(BEAT / 10)

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.peers[rank] = Peer(connection, time.monotonic())

    def _listen(self) -> None:
        """Report this rank as alive, read the others' messages, and end the process if a rank is missing."""
        self._send_alive()
        for rank, peer in list(self.peers.items()):
            try:
                received = peer.socket.recv(4096)
                if not received:
                    self._end(f"rank {rank} has ended")
                peer.alive, peer.partial = time.monotonic(), peer.partial + received
            except BlockingIOError:
                pass
            except OSError:
                self._end(f"rank {rank} has ended")
            *lines, peer.partial = peer.partial.split(b"\n")
            for line in lines:
                self._handle(rank, *line.decode().split(" ", 1))
            if time.monotonic() - peer.alive > self.silence:
                self._end(f"rank {rank} has not answered for {self.silence:g} s")

    def _handle(self, rank: int, word: str, rest: str = "") -> None:
        if word == "met":
            self.met.set()
        if word == "gone":
            self._end(rest)
        if word == "left":
            del self.peers[rank]
            if rest != "0":  # it has printed the reason, or the user has ended rank 0
                time.sleep(BEAT)  # this process may print its own message of the same error first
                self._end(
                    f"rank {rank} has ended with exit code {rest}" if rank else "", int(rest) if not rank else 1
                )

    def _send_alive(self) -> None:
        self._send("alive")

    def _send(self, text: str) -> None:
        for peer in list(self.peers.values()):
            with contextlib.suppress(OSError):
                peer.socket.send(f"{text}\n".encode())

    def _end(self, reason: str, code: int = 1) -> NoReturn:
        """End this process after a cleanup, with a message unless `reason` is empty; rank 0 ends the others too."""
        self.code = code
        if self.rank == 0:
            self._send(f"gone {reason}")
        if reason:
            os.write(2, f"error: rank {self.rank}: {reason}\n".encode())
        self._stop(code)

    def _stop(self, code: int) -> NoReturn:
        main = ctypes.c_ulong(threading.main_thread().ident or 0)  # it cleans up as after Ctrl-C
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
        time.sleep(self.unwinding)
        os._exit(code)
