"""Do on the other ranks what the engine of rank 0 does: begin, step and close the same answers, in the same order."""

from dataclasses import fields
from typing import Any

from ..machine.stream import in_turn
from .failures import dropped
from .job import Ask, Job, Served, answer, reread
from .token_rules import TokenRules

AHEAD = 0  # the number of what is read ahead; answers have others
UNTOLD = ("follows",)  # of an Ask: rank 0 calls it


def as_json(ask: Ask) -> dict[str, Any]:
    """Write an Ask for the other ranks; penalties as pairs, for their keys may be numbers."""
    told = {field.name: getattr(ask, field.name) for field in fields(ask) if field.name not in UNTOLD}
    return told | {"penalties": [(n, [*v.items()] if isinstance(v, dict) else v) for n, v in ask.penalties.items()]}


def from_json(told: dict[str, Any]) -> Ask:
    """Read what `as_json` wrote."""
    pairs = {n: dict(v) if isinstance(v, list) else v for n, v in told["penalties"]}
    rules: Any = (tuple(value) if isinstance(value, list) else value for value in told["rules"])
    own = {"turns": tuple(told["turns"]), "stops": tuple(told["stops"]), "rules": TokenRules(*rules)}
    return Ask(**{**told, **own, "penalties": pairs})


def follow(served: Served) -> None:
    """Follow rank 0's engine until it ends."""
    running: dict[int, Any] = {}
    while True:
        word, number, what = served.model.ranks.broadcast()
        if word == "end":
            return
        if word == "begin":
            job = Job(from_json(what), emit=lambda event: None)  # clients are rank 0's
            running[number] = answer(served, job, crowded=bool)
        elif word == "read ahead":
            running[number] = reread(served, what)
        elif number not in running:
            continue
        elif word == "close":
            with dropped("an answer was not closed"):
                running.pop(number).close()
        else:
            try:
                with in_turn():
                    next(running[number])
            except Exception:  # it is over, or rank 0 has met the same, and tells its client
                del running[number]
