"""A cycle's seconds are observed unless other work was computed meanwhile; a late one's are without the caller's."""

import grammars
import pytest
import stateful
from oracle_drafts import OracleDrafts

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding import build
from mlx_mtp.decoding.clock import Clock
from mlx_mtp.tuning.kernel_fallback import GraphFailed

PROMPT, DRAFTS = [3, 4, 5, 6, 7, 8, 3, 4, 5], 4
FIXED = {"num_draft_tokens": DRAFTS, "adaptive": False, "prompt_lookup": False}


@pytest.fixture
def arrived(monkeypatch):
    """Record (other work was computed, built late) of each cycle that was read."""
    found, real = [], Clock.arrived

    def arrive(clock, waited, built, following, *, late):
        assert 0 < built < 1000 > (following or 0)  # seconds, not a clock's time
        found.append((clock.hidden, late))
        return real(clock, waited, built, following, late=late)

    monkeypatch.setattr(Clock, "arrived", arrive)
    return found


def text_of(model, **options) -> list[int]:
    return [token for token, *_ in mlx_mtp.generate_step(PROMPT, model, **{"max_tokens": 30, **options})]


def read_all(batch) -> None:
    while batch.next_generated():
        pass


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_cycle_after_rows_that_are_read_again(monkeypatch, arrived, sequences):
    """The cycle after one of rejected drafts; of a pool also the first one, after the prompts."""
    model = stateful.loaded("mamba")
    text = PROMPT + text_of(model, num_draft_tokens=0)
    wrong = {len(PROMPT) + 1 + 5 + 2}  # in the second cycle
    monkeypatch.setattr(model, "drafter", OracleDrafts(model, text, wrong))
    arrived.clear()
    if sequences == 1:
        text_of(model, max_tokens=21, **FIXED)
    else:
        batch = mlx_mtp.BatchGenerator(model, **FIXED)
        batch.insert([PROMPT] * sequences, [21] * sequences)
        read_all(batch)
    assert [hidden for hidden, _ in arrived] == [sequences > 1, False, True, False, False]
    assert all(late for _, late in arrived[1:])


def test_cycles_between_those_of_other_jobs(tiny_models, arrived):
    """Those that end while `Stats.crowded` is set."""
    stats = mlx_mtp.Stats()
    for n, _ in enumerate(
        mlx_mtp.generate_step([1, 2, 3], tiny_models(0)[0], max_tokens=8, num_draft_tokens=0, stats=stats)
    ):
        stats.crowded = n in (2, 3)
    assert [hidden for hidden, _ in arrived] == [n in (2, 3) for n in range(7)]


def test_cycles_that_are_built_late(tiny_models, arrived):
    model, same = tiny_models(0)[0], [lambda tokens, logits: logits]
    for processors, expected in (([], [True] + [False] * 6), (same, [True] * 7)):
        arrived.clear()
        list(mlx_mtp.generate_step([1, 2, 3], model, max_tokens=8, num_draft_tokens=0, logits_processors=processors))
        assert [late for _, late in arrived] == expected


@pytest.mark.parametrize("processors", [[], [lambda tokens, logits: logits]])
def test_cycles_that_are_built_again_with_drafts_of_a_grammar(tiny_models, arrived, processors):
    """They are built late too; those that are built late have drafts of the grammar as well."""
    made = grammar.regex("((a|b)abcabc){9}", tokenizer=grammars.letters())
    stats, options = mlx_mtp.Stats(), {"num_draft_tokens": 1, "adaptive": False, "max_tokens": 14}
    options["logits_processors"] = processors
    list(mlx_mtp.generate_step([1, 2, 3], tiny_models(2)[0], grammar=made, stats=stats, **options))
    assert stats.grammar_accepted > 0
    assert max(stats.lengths) > 1  # drafts: more than the heads may make
    assert all(late for _, late in arrived)


def test_cycles_between_the_chunks_of_a_prompt(tiny_models, arrived):
    """Of a sequence that is decoded meanwhile."""
    batch = mlx_mtp.BatchGenerator(tiny_models(0)[0], num_draft_tokens=0, prefill_step_size=2)
    batch.insert([[1, 2]], [20])
    for _ in range(4):
        batch.next()
    arrived.clear()
    batch.insert([[1, 2, 3, 4, 1, 2, 3]], [5])
    for _ in range(4):
        batch.next()
    assert arrived == [(hidden, False) for hidden in (False, True, True, True)]


def test_the_cycle_after_an_error_of_a_pool(tiny_models, monkeypatch, arrived):
    """And the first one. Both are built late."""
    real, calls, batch = build.start, [], mlx_mtp.BatchGenerator(tiny_models(0)[0], num_draft_tokens=0)

    def failing(*args):
        calls.append(args)
        if len(calls) == 6:
            raise GraphFailed(RuntimeError("lost"))
        return real(*args)

    monkeypatch.setattr(build, "start", failing)
    monkeypatch.setattr("mlx_mtp.tuning.kernel_fallback.Fallback.take", lambda *_: None)
    batch.insert([PROMPT[:2], [1, 2]], [9, 9])
    read_all(batch)
    assert arrived == [(n in (0, 5),) * 2 for n in range(8)]
