"""Attack a server next to an honest client, and list what each attack has harmed."""

import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hostile_server import MB, Load, Peak, Server, is_refusal
from hostile_wire import PATHS, Attack, Outcome, asked, attempt, post

MEMORY = 300  # maximum megabytes of a request
AFTER = 2.0  # maximum seconds of work after a client has disconnected
LATE = 5.0  # maximum of an honest answer's seconds, as a multiple of the median without attacks
PATIENCE = 30.0  # seconds until the client of an attack disconnects
HUNG = 20.0  # seconds without an answer of /health after which a server is started again
HOME = str(Path(__file__).parents[2])
PRIVATE = re.compile("|".join(map(re.escape, (HOME, sys.prefix, "site-packages", 'File \\"', "'no_such_name' is"))))
LOGGED = re.compile(r"Traceback \(most|unexpected|MemoryError|Exception in")
Named = tuple[str, int, Attack]  # kind, number, attack


class Found(NamedTuple):
    """What one attack has harmed, to be repeated with its kind, name and number."""

    kind: str
    name: str
    number: int
    fault: str


class Record(NamedTuple):
    """One attack: its outcome, and what it cost.

    megabytes: of the server in addition. after: seconds of work after the client disconnected. late: the longest
    honest answer, as a multiple of the median.
    """

    kind: str
    name: str
    number: int
    outcome: Outcome
    megabytes: int
    after: float
    late: float


class Honest:
    """A client that repeats one question, and compares each answer with the one before the attacks.

    turn: held while it asks, so that a measurement can pause it. answers: (begin, seconds, whether it is right).
    """

    def __init__(self, server: Server, tokens: int = 40):
        self.server, self.turn, self.tokens = server, threading.Lock(), tokens
        self.answers: list[tuple[float, float, bool]] = []
        self._ended = threading.Event()
        self._text, _ = self.ask()
        assert self._text
        self.median = self.measured()

    def ask(self, patience: float = 60) -> tuple[str, float]:
        """Return the answer's text, "" without one, and its seconds."""
        fields = {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        body, begun = asked("chat", "How do I sort a list?", **fields), time.monotonic()
        try:
            outcome = attempt(self.server.port, post(PATHS["chat"], body), patience)
            found = json.loads(outcome.body)["choices"][0]["message"]["content"]
        except (OSError, ValueError, KeyError):
            found = ""
        return found, time.monotonic() - begun

    def measured(self) -> float:
        """Return the median of an answer's seconds without attacks."""
        return statistics.median(self.ask()[1] for _ in range(5))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask until the block ends."""
        self._ended.clear()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(90)

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            with self.turn:
                begun = time.monotonic()
                text, seconds = self.ask()
                self.answers.append((begun, seconds, text == self._text))

    def since(self, begun: float) -> tuple[float, int]:
        """Return of the answers that ended after `begun` the longest, as a multiple of the median, and the number of
        wrong ones."""
        with self.turn:  # until an answer that is late because of the last attack has ended
            found = [each for each in self.answers if each[0] + each[1] > begun]
        return max((each[1] for each in found), default=0.0) / self.median, sum(not each[2] for each in found)


def judged(outcome: Outcome, given: Attack) -> Iterator[str]:
    """Yield the faults of a response."""
    allowed = outcome.status in given.answers if given.answers else (outcome.status or 0) < 500
    if not (allowed or outcome.status is None or is_refusal(outcome)):
        yield f"status {outcome.status}: {outcome.body[-200:]}"
    if outcome.status is None and not outcome.left and given.leave is None:
        yield "no response"
    if outcome.status == 200 and ('"server_error"' in outcome.text or '"api_error"' in outcome.text):
        yield f"a stream failed: {outcome.body[-200:]}"
    if private := PRIVATE.search(outcome.text):
        yield f"the response names {private[0]!r}"


class Run:
    """Attacks on one server; `found` lists the faults and `records` all attacks.

    timed: whether late answers and work after a departure are faults.
    """

    def __init__(self, server: Server, honest: Honest, *, timed: bool = True):
        self.server, self.honest, self.timed = server, honest, timed
        self.found: list[Found] = []
        self.records: list[Record] = []

    def one(self, kind: str, number: int, given: Attack) -> Record:
        """Attack once, and measure what can be attributed to one attack; a late honest answer must be late twice."""
        begun, logged = time.monotonic(), self._log_size()
        with Peak(self.server.pid) as peak:
            outcome = self._attempt(given)
            after = self._after() if outcome.left and self.timed else 0.0
        faults = [*judged(outcome, given), *self._logged(logged)]
        megabytes = peak.bytes // MB
        faults += [f"{megabytes} MB"] if megabytes > MEMORY * given.copies else []
        faults += [f"{after:.1f} s of work after the client left"] if after > AFTER else []
        late, wrong = self.honest.since(begun)
        faults += self._revived(harmed=bool(wrong))
        if self.timed and late > LATE and not faults:
            late = min(late, self._late_again(given))
        faults += [f"an honest answer took {late:.1f} times as long"] if self.timed and late > LATE else []
        faults += [f"{wrong} honest answers were wrong or missing"] if wrong else []
        self.found += [Found(kind, given.name, number, fault) for fault in faults]
        self.records.append(Record(kind, given.name, number, outcome, megabytes, after, late))
        return self.records[-1]

    def several(self, attacks: Iterable[Named], attackers: int) -> None:
        """Attack from several threads; memory and log are measured for all, work after a departure is not."""
        source, lock = iter(attacks), threading.Lock()
        begun, logged = time.monotonic(), self._log_size()
        threads = [threading.Thread(target=self._work, args=(source, lock), daemon=True) for _ in range(attackers)]
        with Peak(self.server.pid) as peak:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        late, wrong = self.honest.since(begun)
        faults = self._logged(logged) + self._revived()
        faults += [f"{peak.bytes // MB} MB"] if peak.bytes > MEMORY * MB * attackers else []
        faults += [f"an honest answer took {late:.1f} times as long"] if self.timed and late > LATE else []
        faults += [f"{wrong} honest answers were wrong or missing"] if wrong else []
        self.found += [Found("all", "", 0, fault) for fault in faults]

    def _work(self, source: Iterator[Named], lock: threading.Lock) -> None:
        while True:
            with lock:
                kind, number, given = next(source, ("", 0, None))
            if given is None:
                return
            outcome = self._attempt(given)
            self.records.append(Record(kind, given.name, number, outcome, 0, 0, 0))
            self.found += [Found(kind, given.name, number, fault) for fault in judged(outcome, given)]

    def _attempt(self, given: Attack) -> Outcome:
        try:
            return attempt(self.server.port, given, PATIENCE)
        except OSError as e:
            return Outcome(None, False, 0.0, str(e))

    def _after(self) -> float:
        """Return for how long the server still computes, without what the honest client's answer takes meanwhile."""
        load = Load(self.server.pid)
        waits = not self.honest.turn.acquire(blocking=False) and self.honest.turn.acquire()
        try:
            return max(0.0, load.until_idle(15.0) - (self.honest.median if waits else 0))
        finally:
            self.honest.turn.release()

    def _late_again(self, given: Attack) -> float:
        """Return how late an honest answer is when an attack is repeated, with a median measured just before.

        The median is measured once nothing of the first attack is computed any more.
        """
        with self.honest.turn:
            Load(self.server.pid).until_idle(15.0)
            now = self.honest.measured()
        begun = time.monotonic()
        self._attempt(given)
        return self.honest.since(begun)[0] * self.honest.median / now

    def _log_size(self) -> int:
        return self.server.log.stat().st_size

    def _logged(self, start: int) -> list[str]:
        """Return a fault if the log has the line of an unexpected error after a position."""
        with self.server.log.open("rb") as file:
            file.seek(start)
            text = file.read(MB).decode(errors="replace")
        return [f"log: {found[0]} ... {text[-300:]!r}" for found in [LOGGED.search(text)] if found]

    def _revived(self, *, harmed: bool = False) -> list[str]:
        """Return a fault if the server does not answer; it is then started again, as it is if it is harmed."""
        lives = self.server.answers(HUNG)
        if lives and not harmed:
            return []
        with self.honest.turn:
            ended = self.server.stop()
            self.server.start()
        if lives:
            return []
        return [f"the server ended: {ended}" if ended else "the server had to be killed"]
