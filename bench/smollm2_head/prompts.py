"""Draw prompts from the templates and topics in prompts.json; a tenth of the topics is held out."""

import hashlib
import json
import random
import re
from collections.abc import Collection, Iterator
from pathlib import Path

LISTS = json.loads(Path(__file__).with_name("prompts.json").read_text())
TEST_QUESTIONS: list[str] = LISTS["test_questions"]  # measured only
NAMES = "Anna", "Tom", "Maria", "Sam", "Lily", "Ben"
THINGS = "apples", "books", "coins", "marbles", "cookies", "pencils"
SHARE_OF_SLOTS = 0.5  # of the prompts, those from templates with named slots
TRIES = 20  # maximum number of draws for each prompt, because draws may be equal or excluded


def draw(count: int, excluded: Collection[str], seed: int, *, held_out: bool) -> list[str]:
    """Return `count` distinct prompts in random order, or fewer if TRIES * count draws contain fewer.

    excluded: prompts that are left out. held_out: whether the topics are the held-out ones, else the others. Prompts
    with sums have no topic: draws with and without `held_out` may contain the same sum.
    """
    rng, plain, found = random.Random(seed), plain_prompts(seed, held_out=held_out), set[str]()
    for _ in range(TRIES * count):
        prompt = slot_prompt(rng, held_out=held_out) if rng.random() < SHARE_OF_SLOTS else next(plain)
        if prompt not in excluded:
            found.add(prompt)
        if len(found) == count:
            break
    prompts = sorted(found)
    rng.shuffle(prompts)
    return prompts


def held(topic: str, byte: int) -> bool:
    """Return whether a topic is one of the tenth that is held out, by one byte of its hash."""
    return hashlib.sha256(topic.encode()).digest()[byte] < 26


def plain_prompts(seed: int, *, held_out: bool) -> Iterator[str]:
    """Yield, without end, prompts about topics (70%), programs (12%) and sums."""
    rng = random.Random(seed)
    topics, tasks = ([x for x in LISTS[name] if held(x, 0) == held_out] for name in ("topics", "tasks"))
    while True:
        kind = rng.random()
        if kind < 0.7:
            template = rng.choice(LISTS["topic_templates"])
            yield template.format(*rng.sample(topics, template.count("{}")))
        elif kind < 0.82:
            yield rng.choice(LISTS["task_templates"]).format(rng.choice(tasks))
        else:
            yield sum_prompt(rng)


def slot_prompt(rng: random.Random, *, held_out: bool) -> str:
    """Return a template whose slots are filled; `held` of the first slot, other than `whom`, equals `held_out`."""
    while True:
        template = rng.choice(LISTS["slot_templates"])
        values = {slot: rng.choice(LISTS["slots"][slot]) for slot in re.findall(r"\{(\w+)\}", template)}
        topic = next(value for slot, value in values.items() if slot != "whom")
        if held(topic, 1) == held_out:
            return template.format(**values)


def sum_prompt(rng: random.Random) -> str:
    """Return a question about sums, with random numbers."""
    a, b, c = (rng.randrange(2, 99) for _ in range(3))
    values = {"a": a, "b": b, "c": c, "fewer": c % a + 1, "sum": b + a * c, "product": a * c, "tens": b * 10}
    values |= {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    return rng.choice(LISTS["sum_templates"]).format(**values)
