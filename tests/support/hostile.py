"""Attack a server with random requests next to an honest client; list what the attacks have harmed.

    python tests/support/hostile.py --seed 1 --requests 200 [--kind bodies] [--name bomb] [--attackers 4]

The same seed gives the same requests. Each server runs on loopback and is killed at the end. Linux only.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hostile_bodies import BODIES, SOCKETS, STREAMS, TEXTS, TOKENS, Make
from hostile_fields import OPTIONS, TEMPLATES
from hostile_grammars import GRAMMARS, TOOLS
from hostile_histories import HISTORIES
from hostile_pictures import PICTURES
from hostile_run import Found, Honest, Named, Record, Run
from hostile_server import Server
from hostile_wire import Attack, Dice

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
    "departures": {},  # an attack of another kind, whose client disconnects early
    "pictures": PICTURES,
}
MODELS = {"pictures": "demo-vision"}  # of a kind; others: demo


def attack(kind: str, number: int, seed: int = 0, scale: float = 1.0, name: str = "") -> Attack:
    """Return an attack, always the same one for the same arguments; by default each number has the next name."""
    dice = Dice(f"{seed} {kind} {number}")
    dice.scale = scale
    if kind == "departures":
        kind = dice.choice([each for each in KINDS if each not in ("departures", "pictures", "sockets")])
        found = attack(kind, number, seed, scale, dice.choice(list(KINDS[kind])))
        return found._replace(leave=dice.uniform(0.05, 1), answers=(), name=f"{kind}: {found.name}")
    name = name or list(KINDS[kind])[number % len(KINDS[kind])]
    return KINDS[kind][name](dice)._replace(name=name)


def chosen(kinds: list[str], requests: int, seed: int, until: float, name: str = "") -> Iterator[Named]:
    """Yield (kind, number, attack), the kinds in turn, until a number of requests or a time is reached.

    name: a part of the names of the attacks; a kind without such a name is not left out.
    """
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
    show: Callable[[Record, list[Found]], Any] = lambda record, found: None,
) -> list[Run]:
    """Attack a new server of each model that the kinds need; return a run for each.

    minutes: after them no attack begins. show: called with each record and all faults, unless there are several
    attackers.
    """
    runs, kinds, until = list[Run](), list(kinds), time.monotonic() + 60 * minutes
    for model in dict.fromkeys(MODELS.get(kind, "demo") for kind in kinds):
        mine = [kind for kind in kinds if MODELS.get(kind, "demo") == model]
        attacks = chosen(mine, requests * len(mine) // len(kinds), seed, until, name)
        server = Server(model)
        try:
            server.start()
            runs.append(run := Run(server, Honest(server)))
            with run.honest.asking():
                if attackers > 1:
                    run.several(attacks, attackers)
                for each in attacks:
                    show(run.one(*each), run.found)
        finally:
            server.close()
    return runs


def shown(record: Record, found: list[Found]) -> None:
    outcome = record.outcome
    measured = f"{outcome.status} {outcome.seconds:6.2f} s {record.megabytes:5} MB, after {record.after:4.1f} s"
    print(f"{record.kind:10} {record.number:4} {record.name[:40]:40} {measured}, late {record.late:5.1f}", flush=True)
    for each in found:
        if each[:3] == record[:3]:
            print(f"      {each.fault}", flush=True)


def summed(run: Run) -> None:
    late = sorted(seconds for _, seconds, _ in run.honest.answers)
    print(f"\n{len(run.records)} attacks; honest answers: {run.honest.median:.2f} s alone", end="")
    print(f", of {len(late)} the longest {late[-1]:.2f} s" if late else "")
    for (kind, name), count in sorted(Counter(each[:2] for each in run.found).items()):
        fault = next(each for each in run.found if each[:2] == (kind, name))
        print(f"{count:3} {kind}: {name} (number {fault.number}): {fault.fault[:160]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kind", choices=KINDS, action="append", help="by default all")
    parser.add_argument("--name", default="", help="a part of the names of attacks")
    parser.add_argument("--attackers", type=int, default=1, help="more than one: only the honest answers are timed")
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    how = {"name": given.name, "attackers": given.attackers, "minutes": given.minutes}
    runs = campaign(given.requests, given.seed, given.kind or KINDS, show=shown, **how)
    for run in runs:
        summed(run)
    sys.exit(any(run.found for run in runs))


if __name__ == "__main__":
    main()
