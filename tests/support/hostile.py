"""Attack a server with random requests next to an honest client; list what the attacks have harmed.

    python tests/support/hostile.py --seed 1 --requests 200 [--kind bodies] [--name bomb] [--attackers 4]

The same seed gives the same requests. Each server runs on loopback and is killed at the end. Linux only.
"""

import argparse
import json
import os
import re
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hostile_bodies import BODIES, SOCKETS, STREAMS, TEXTS, TOKENS, Make
from hostile_fields import GRAMMARS, HISTORIES, OPTIONS, TEMPLATES, TOOLS
from hostile_pictures import PICTURES
from hostile_server import MB, Peak, Server, is_refusal, seconds_until_idle
from hostile_wire import PATHS, Attack, Dice, Outcome, asked, attempt, post

KINDS: dict[str, dict[str, Make]] = {
    "sockets": SOCKETS,
    "bodies": BODIES,
    "texts": TEXTS,
    "options": OPTIONS,
    "templates": TEMPLATES,
    "grammars": GRAMMARS,
    "tools": TOOLS,
    "histories": HISTORIES,
    "tokens": TOKENS,
    "streams": STREAMS,
    "departures": {},  # an attack of any other kind, whose client disconnects early
    "pictures": PICTURES,
}
MODELS = {"pictures": "demo-vision"}  # of a kind; others: demo
MEMORY = 300  # maximum megabytes of a request
AFTER = 2.0  # maximum seconds of work after a client has disconnected
LATE = 5.0  # maximum of an honest answer's seconds, as a multiple of the median without attacks
PATIENCE = 30.0  # seconds until the client of an attack disconnects
HUNG = 20.0  # seconds without an answer of /health after which a server is started again
PRIVATE = re.compile(
    "|".join(map(re.escape, (str(Path(__file__).parents[2]), sys.prefix, "site-packages", 'File \\"')))
)
LOGGED = re.compile(r"Traceback \(most|unexpected|MemoryError|Exception in")


class Found(NamedTuple):
    """What one attack has harmed, to be repeated with its kind, name and number."""

    kind: str
    name: str
    number: int
    fault: str


class Record(NamedTuple):
    """One attack: its outcome, the server's additional megabytes, and its seconds of work after the client left."""

    kind: str
    name: str
    number: int
    outcome: Outcome
    megabytes: int
    after: float
    late: float


def attack(kind: str, number: int, seed: int = 0, scale: float = 1.0, name: str = "") -> Attack:
    """Return an attack, always the same one for the same arguments; by default each number has the next name."""
    dice = Dice(f"{seed} {kind} {number}")
    dice.scale = scale
    if kind == "departures":
        kind = dice.choice([each for each in KINDS if each not in ("departures", "pictures", "sockets")])
        name = dice.choice(list(KINDS[kind]))
        found = KINDS[kind][name](dice)
        return found._replace(leave=dice.uniform(0.05, 1), answers=(), name=f"{kind}: {name}")
    name = name or list(KINDS[kind])[number % len(KINDS[kind])]
    return KINDS[kind][name](dice)._replace(name=name)


class Honest:
    """A client that asks a fixed question again and again, and compares each answer with the one before the attack.

    turn: held while it asks, so that a measurement can pause it. answers: (begin, seconds, whether it is right).
    """

    def __init__(self, server: Server):
        self.server, self.turn = server, threading.Lock()
        self.answers: list[tuple[float, float, bool]] = []
        self.median, self._text = 0.0, ""
        self._ended = threading.Event()

    def ask(self, patience: float = 60) -> tuple[str, float]:
        """Return the answer's text, "" without one, and its seconds."""
        fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        body, begun = asked("chat", "How do I sort a list?", **fields), time.monotonic()
        try:
            outcome = attempt(self.server.port, post(PATHS["chat"], body), patience)
            found = json.loads(outcome.text.partition("\r\n\r\n")[2])["choices"][0]["message"]["content"]
        except (OSError, ValueError, KeyError):
            found = ""
        return found, time.monotonic() - begun

    def measure(self) -> None:
        """Set the right answer and the median of its seconds, without attacks."""
        self._text, _ = self.ask()
        assert self._text
        self.median = statistics.median(self.ask()[1] for _ in range(7))

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

    def late(self, since: float) -> float:
        """Return the longest answer that ended after `since`, as a multiple of the median."""
        return max((each[1] for each in self.answers if each[0] + each[1] > since), default=0.0) / self.median

    def wrong(self, since: float) -> int:
        return sum(not right for begun, seconds, right in self.answers if begun + seconds > since)


def judged(outcome: Outcome, given: Attack) -> Iterator[str]:
    """Yield the faults of a response."""
    if outcome.status and outcome.status >= 500 and not is_refusal(outcome):
        yield f"status {outcome.status}: {outcome.body[-200:]}"
    elif given.answers and outcome.status not in (*given.answers, None) and not is_refusal(outcome):
        yield f"status {outcome.status}: {outcome.body[-200:]}"
    if outcome.status is None and not outcome.left and given.leave is None:
        yield "no response"
    if '"server_error"' in outcome.text or '"api_error"' in outcome.text:
        yield f"a stream failed: {outcome.body[-200:]}"
    if private := PRIVATE.search(outcome.text):
        yield f"the response names {private[0]!r}"


class Run:
    """Attacks on one server; `found` lists the faults and `records` all attacks."""

    def __init__(self, server: Server, honest: Honest, *, timed: bool = True):
        self.server, self.honest, self.timed = server, honest, timed
        self.found: list[Found] = []
        self.records: list[Record] = []

    def one(self, kind: str, number: int, given: Attack) -> Record:
        """Attack once, and measure everything that can be attributed to this attack."""
        begun, logged = time.monotonic(), self.server.log.stat().st_size
        after = 0.0
        with Peak(self.server.pid) as peak:
            outcome = self._attempt(given)
            if outcome.left and self.timed:
                with self.honest.turn:
                    after = seconds_until_idle(self.server.pid, 15.0)
        faults = [*judged(outcome, given), *self._log(logged)]
        megabytes = peak.bytes // MB
        faults += [f"{megabytes} MB"] if megabytes > MEMORY * given.copies else []
        faults += [f"{after:.1f} s of work after the client left"] if after > AFTER else []
        faults += self._revived()
        with self.honest.turn:  # until the answer that was late because of this attack is there
            record = Record(kind, given.name, number, outcome, megabytes, after, self.honest.late(begun))
        faults += (
            [f"an honest answer took {record.late:.1f} times as long"] if self.timed and record.late > LATE else []
        )
        faults += ["an honest answer was wrong or missing"] if self.honest.wrong(begun) else []
        self.found += [Found(kind, given.name, number, fault) for fault in faults]
        self.records.append(record)
        return record

    def _attempt(self, given: Attack) -> Outcome:
        try:
            return attempt(self.server.port, given, PATIENCE)
        except OSError as e:
            return Outcome(None, False, 0.0, str(e))

    def _log(self, start: int) -> list[str]:
        with self.server.log.open("rb") as file:
            file.seek(start)
            text = file.read(MB).decode(errors="replace")
        return [f"log: {line[0]} ... {text[-300:]!r}" for line in [LOGGED.search(text)] if line]

    def _revived(self) -> list[str]:
        """Return a fault if the server does not answer; it is then started again."""
        if self.server.answers(HUNG):
            return []
        with self.honest.turn:
            self.server.stop()
            self.server.start()
        return ["the server had to be killed"]

    def several(self, attacks: Iterable[tuple[str, int, Attack]], attackers: int) -> None:
        """Attack from several threads; memory and logs are measured for all together, work after a departure is not."""
        source, lock = iter(attacks), threading.Lock()
        begun, logged = time.monotonic(), self.server.log.stat().st_size

        def worker() -> None:
            while True:
                with lock:
                    kind, number, given = next(source, (None, 0, None))
                if given is None or kind is None:
                    return
                start = time.monotonic()
                outcome = self._attempt(given)
                self.records.append(Record(kind, given.name, number, outcome, 0, 0, self.honest.late(start)))
                self.found += [Found(kind, given.name, number, fault) for fault in judged(outcome, given)]

        threads = [threading.Thread(target=worker, daemon=True) for _ in range(attackers)]
        with Peak(self.server.pid) as peak:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        faults = self._log(logged) + self._revived()
        faults += [f"{peak.bytes // MB} MB"] if peak.bytes > MEMORY * MB * attackers else []
        late, wrong = self.honest.late(begun), self.honest.wrong(begun)
        faults += [f"an honest answer took {late:.1f} times as long"] if late > LATE else []
        faults += [f"{wrong} honest answers were wrong or missing"] if wrong else []
        self.found += [Found("all", "", 0, fault) for fault in faults]


def chosen(
    kinds: Iterable[str], requests: int, seed: int, name: str, until: float
) -> Iterator[tuple[str, int, Attack]]:
    """Yield (kind, number, attack), kinds in turn, until a number of requests or a time is reached."""
    kinds = list(kinds)
    for i in range(requests):
        if time.monotonic() > until:
            return
        kind, number = kinds[i % len(kinds)], i // len(kinds)
        names = [each for each in KINDS[kind] if name in each]
        yield kind, number, attack(kind, number, seed, name=names[number % len(names)] if names else "")


def campaign(
    requests: int,
    seed: int,
    kinds: Iterable[str] = KINDS,
    *,
    name: str = "",
    attackers: int = 1,
    minutes: float = 60.0,
    show: Any = None,
) -> Run | None:
    """Attack a new server of each model that the kinds need; return all that was found. show: called with each record."""
    run, until = None, time.monotonic() + 60 * minutes
    for model in dict.fromkeys(MODELS.get(kind, "demo") for kind in kinds):
        mine = [kind for kind in kinds if MODELS.get(kind, "demo") == model]
        part = max(1, requests * len(mine) // len(list(kinds)))
        server = Server(model)
        try:
            server.start()
            honest = Honest(server)
            honest.measure()
            found, run = run, Run(server, honest)
            run.found, run.records = (found.found, found.records) if found else ([], [])
            with honest.asking():
                attacks = chosen(mine, part, seed, name, until)
                if attackers > 1:
                    run.several(attacks, attackers)
                for kind, number, given in attacks if attackers == 1 else ():
                    record = run.one(kind, number, given)
                    if show:
                        show(record, [each.fault for each in run.found if each[:3] == record[:3]])
        finally:
            server.close()
    return run


def shown(record: Record, faults: list[str]) -> None:
    status, seconds = record.outcome.status, record.outcome.seconds
    measured = (
        f"{status} {seconds:6.2f} s {record.megabytes:5} MB, after {record.after:4.1f} s, late {record.late:5.1f}"
    )
    print(
        f"{record.kind:10} {record.number:4} {record.name[:40]:40} {measured}",
        *faults,
        sep="\n      " if faults else "",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kind", choices=KINDS, action="append", help="by default all")
    parser.add_argument("--name", default="", help="a part of the names of attacks")
    parser.add_argument(
        "--attackers", type=int, default=1, help="more than one: only the honest answers are measured"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    run = campaign(
        given.requests,
        given.seed,
        given.kind or KINDS,
        name=given.name,
        attackers=given.attackers,
        minutes=given.minutes,
        show=shown,
    )
    assert run
    late = sorted(seconds for _, seconds, _ in run.honest.answers)
    print(
        f"\n{len(run.records)} attacks; honest: median alone {run.honest.median:.2f} s, of {len(late)} the longest {late[-1]:.2f} s"
    )
    for (kind, name), count in sorted(Counter(each[:2] for each in run.found).items()):
        fault = next(each for each in run.found if each[:2] == (kind, name))
        print(f"{count:3} {kind}: {name} (number {fault.number}): {fault.fault[:160]}")
    sys.exit(bool(run.found))


if __name__ == "__main__":
    os.nice(5)
    main()
