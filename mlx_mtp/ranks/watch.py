"""End this process, with a line that names it, when another rank has died, hangs or never came.

A collective that waits for such a rank does not return, and Python's signal handlers wait with it. So a thread of
each rank keeps a connection to rank 0's, over which both report several times a second that they are alive; rank 0
sends the others the reason for which it ends.
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

SECONDS = "MLX_MTP_RANK_SECONDS"  # from the last sign of a rank to the end of all others
LIMIT = 20.0  # its default
STARTS = 3  # times as many seconds until a rank has to be there
BEAT = 1.0  # seconds
POLL = BEAT / 4  # seconds between two rounds of reporting and reading
UNWINDING = 2.0  # seconds that the main thread gets to leave nothing half-written behind
RESERVE = 8  # polls that the limit has left: up to three until all have noticed, the rest for a busy machine

_watch: "Watch | None" = None


def begin(rank: int, size: int, meeting: tuple[str, int] | None) -> "Watch | None":
    """Begin to watch, once a process; None where `meeting`, rank 0's host and port for it, is not known."""
    global _watch
    if _watch is None and meeting is not None:
        _watch = Watch(rank, size, meeting)
        threading.Thread(target=_watch.run, daemon=True).start()
        atexit.register(_watch.leave)
    return _watch


def leave(code: int) -> None:
    """Let the others know that this process is about to end with an exit code, which is then theirs."""
    if _watch is not None:
        _watch.leave(code)


def wait_for_reason(error: BaseException) -> None:
    """Wait, where a collective has failed, until it is known which rank was the cause, which ends this process."""
    if not (isinstance(error, RuntimeError) and str(error).startswith("[")):  # of MLX
        return
    end = time.monotonic() + BEAT + 3 * UNWINDING
    while _watch is not None and time.monotonic() < end:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(POLL)


@dataclass
class Peer:
    """A connection to another rank. heard: when it was last alive. said: what it has not said to the end yet."""

    socket: socket.socket
    heard: float
    said: bytes = b""


@dataclass
class Watch:
    """The connections of this rank: rank 0's to all others, any other's to rank 0.

    limit: seconds from the last sign of a rank until all others have ended. code: with which this one is ended.
    met: set once all watch each other. turn: who holds it listens.
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
        """Seconds that the main thread gets before the process ends."""
        return min(UNWINDING, self.limit / 5)

    @property
    def silence(self) -> float:
        """Seconds without a sign after which a rank is given up, so that all have ended within the limit."""
        return self.limit - self.unwinding - RESERVE * self.poll

    def run(self) -> None:
        """Meet the others, then listen to them until the process ends."""
        end = time.monotonic() + STARTS * self.limit
        try:
            if self.rank == 0:
                self._welcome(end)
            else:
                self._visit(end)
        except OSError as e:
            host, port = self.meeting
            self._end(f"the ranks cannot watch each other at {host}:{port} ({e.strerror})")
        self._keep_listening()

    def _keep_listening(self) -> None:
        last = time.monotonic()
        while self.peers:
            time.sleep(self.poll)
            with self.turn:
                if time.monotonic() - last > self.silence / 2:  # it was this thread that did not run
                    for peer in self.peers.values():
                        peer.heard = time.monotonic()
                last = time.monotonic()
                self._listen()

    def leave(self, code: int = 0) -> None:
        """Say that this process ends; called again, it says nothing new."""
        if self.code is not None:
            os._exit(self.code)
        self._tell(f"left {code}")
        self.peers = {}

    def _welcome(self, end: float) -> None:
        """Wait until all others have said which they are."""
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
        self._tell("met")
        self.met.set()

    def _visit(self, end: float) -> None:
        """Call at rank 0's until it is there."""
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
        """Say that this rank is alive, hear who else is, and end where one is missed."""
        self._say_alive()
        for rank, peer in list(self.peers.items()):
            try:
                heard = peer.socket.recv(4096)
                if not heard:
                    self._end(f"rank {rank} has ended")
                peer.heard, peer.said = time.monotonic(), peer.said + heard
            except BlockingIOError:
                pass
            except OSError:
                self._end(f"rank {rank} has ended")
            *lines, peer.said = peer.said.split(b"\n")
            for line in lines:
                self._obey(rank, *line.decode().split(" ", 1))
            if time.monotonic() - peer.heard > self.silence:
                self._end(f"rank {rank} has not answered for {self.silence:g} s")

    def _obey(self, rank: int, word: str, rest: str = "") -> None:
        if word == "met":
            self.met.set()
        if word == "gone":
            self._end(rest)
        if word == "left":
            del self.peers[rank]
            if rest != "0":  # it has said why, or is rank 0 whose user has gone
                time.sleep(BEAT)  # in which this process may print its own line of the same fault
                self._end(
                    f"rank {rank} has ended with exit code {rest}" if rank else "", int(rest) if not rank else 1
                )

    def _say_alive(self) -> None:
        self._tell("alive")

    def _tell(self, text: str) -> None:
        for peer in list(self.peers.values()):
            with contextlib.suppress(OSError):
                peer.socket.send(f"{text}\n".encode())

    def _end(self, reason: str, code: int = 1) -> NoReturn:
        """End this process, and if it is rank 0 the others, when what it was writing is put in order."""
        self.code = code
        if self.rank == 0:
            self._tell(f"gone {reason}")
        if reason:
            os.write(2, f"error: rank {self.rank}: {reason}\n".encode())
        self._stop(code)

    def _stop(self, code: int) -> NoReturn:
        main = ctypes.c_ulong(threading.main_thread().ident or 0)  # whatever it does at a signal
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
        time.sleep(self.unwinding)
        os._exit(code)
