"""Run the jobs of rank 0's engine on the other ranks: the same steps in the same order."""

from dataclasses import fields
from typing import Any

from ..machine.stream import in_turn
from ..pictures.rows import pictures_as_json, pictures_from_json
from . import structured
from .failures import dropped
from .job import DecodeRequest, Job, Served, answer, prefill_next
from .token_rules import TokenRules

PREFILL = 0  # the number of the background prefill; jobs have other numbers


def as_json(request: DecodeRequest) -> dict[str, Any]:
    """Return a request's fields, without `follows`, as values that JSON can express.

    `penalties` becomes a list of pairs, and so does a dict in it, because its keys are numbers; `grammar` becomes
    the value of `structured.as_json`, and `pictures` that of `pictures_as_json`.
    """
    content = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "follows"}
    return content | {
        "penalties": [(n, [*v.items()] if isinstance(v, dict) else v) for n, v in request.penalties.items()],
        "grammar": structured.as_json(request.grammar),
        "pictures": pictures_as_json(request.pictures),
    }


def from_json(content: dict[str, Any], served: Served | None = None) -> DecodeRequest:
    """Return the request that `as_json` wrote, without `follows` and without the images of its pictures.

    served: the model, for whose tokenizer the grammar is compiled; None: the request has no grammar.
    """
    penalties = {n: dict(v) if isinstance(v, list) else v for n, v in content["penalties"]}
    rules: Any = (tuple(value) if isinstance(value, list) else value for value in content["rules"])
    tuples = {"turns": tuple(content["turns"]), "stops": tuple(content["stops"]), "rules": TokenRules(*rules)}
    tuples["pictures"] = pictures_from_json(content["pictures"])
    grammar = served and structured.from_json(content["grammar"], served.tokenizer, served.model.vocab_size)
    return DecodeRequest(**{**content, **tuples, "penalties": penalties, "grammar": grammar})


def follow(served: Served) -> None:
    """Execute the instructions of rank 0's engine until it ends; an exception in a job's step ends only that job."""
    running: dict[int, Any] = {}
    while True:
        action, number, content = served.model.ranks.broadcast()
        if action == "end":
            return
        if action == "begin":
            job = Job(from_json(content, served), emit=lambda event: None)  # rank 0 has the clients
            running[number] = answer(served, job, crowded=bool)
        elif action == "prefill":
            running[number] = prefill_next(served, content)
        elif number not in running:
            continue
        elif action == "close":
            with dropped("a job was not closed"):
                running.pop(number).close()
        else:
            try:
                with in_turn():
                    next(running[number])
            except Exception:  # it has ended, or rank 0 raises the same and reports it
                del running[number]
