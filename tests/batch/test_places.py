"""Sequences move between the loop for one and the pool at any point, and have the tokens that they have alone."""

import random

import mlx.core as mx
import pytest
from fuzzing import count
from schedules import Case, Whims, assert_as_alone, run
from subjects import quantizable_model, subjects
from sweep import sampled

import mlx_mtp
from mlx_mtp.decoding import driver
from mlx_mtp.decoding.alone import Alone
from mlx_mtp.decoding.driver import Driver

NAMES = ["step3p5", "quantized", "qwen3_next", "eagle"]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.fixture
def moves(monkeypatch):
    """Record moves: "together" from an own cache to a pool, "apart" back."""
    found, finish = [], Driver._finish

    def moved(d):
        found.append("together" if isinstance(d.seating, Alone) else "apart")
        return finish(d)

    monkeypatch.setattr(Driver, "_finish", moved)
    return found


def test_a_moving_sequence_keeps_the_row_that_chose_its_last_token(subject, monkeypatch):
    """For any number of accepted rows in the last cycle."""
    s, seen, finish = subject("step3p5"), [], Driver._finish

    def watched(d):
        found, waiting = finish(d), [*d.pending]
        for text, row in waiting:
            accepted = [len(new.tokens) for new in found if new.sequence is text]
            if not accepted:
                continue
            seen.extend(accepted)
            tokens = mx.array([text.all_tokens[:-1]])
            hidden = s.model.hidden(tokens, mlx_mtp.make_prompt_cache(s.model).layers)[:, -1:]
            assert mx.allclose(row.hidden, hidden, atol=1e-4)
            assert row.tokens.tolist() == [text.all_tokens[-1:]]
        return found

    monkeypatch.setattr(Driver, "_finish", watched)
    for seed in range(count(1, 20)):
        rng = random.Random(seed)
        cases = long_one_and_guests(rng, s.model.vocab_size, s.k)
        for case in cases:
            case.sampling, case.own_sampler, case.penalty, case.k = {}, False, None, s.k
        run(s.model, cases, {}, s.k, None)
    assert max(seen) > 1


def long_one_and_guests(rng: random.Random, vocab: int, most: int) -> list[Case]:
    """Return a long case, and short ones that join it at intervals."""
    cases = [Case(rng, vocab, most) for _ in range(4)]
    for i, case in enumerate(cases):
        case.comes, case.goes, case.max_tokens = 5 * i + rng.randrange(4), None, rng.randint(1, 5)
    host = cases[0]
    host.comes, host.k, host.stops, host.max_tokens = 0, rng.randint(1, most), [], 50
    host.prompt *= 2  # so that lookups find a match
    return cases


@pytest.mark.parametrize("name", sampled(NAMES[:2], NAMES))
def test_a_sequence_moves_and_keeps_its_tokens(subject, tiny_models, moves, monkeypatch, name):
    quantized = name == "quantized"
    model = quantizable_model(tiny_models)[0] if quantized else subject(name).model
    most = min(3, model.max_draft_tokens)
    for seed in range(count(1, 40)):
        rng = random.Random(f"{name} {seed}")
        layout = {"kv_bits": 4} if quantized else rng.choice([{}, {"max_kv_size": 24}])
        cases = long_one_and_guests(rng, model.vocab_size, most)
        run(model, cases, layout, most, Whims(rng, most))
        for case in cases:
            assert_as_alone(case, model, layout)
    assert {"together", "apart"} <= set(moves)


def test_each_sequence_is_counted_wherever_it_decodes(tiny_models, moves, monkeypatch):
    """The sum equals the generator's stats."""
    monkeypatch.setattr(driver, "CALM", 2)
    model, _ = tiny_models(0)
    every, own = mlx_mtp.Stats(), [mlx_mtp.Stats(), mlx_mtp.Stats()]
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=2, adaptive=False, stats=every)
    batch.insert([[1, 2, 3]], [60], stats=own[:1])
    batch.next()
    batch.insert([[3, 0, 1]], [5], stats=own[1:])
    while batch.next_generated():
        pass
    assert moves == ["together", "apart"]
    assert [s.generation_tokens for s in own] == [60, 5]
    assert [s.prompt_tokens for s in own] == [3, 3]
    for s in own:
        assert s.drafted == [s.cycles] * 2
        assert 5 <= s.generation_tokens <= 1 + s.cycles + sum(s.accepted)
        assert 0 < s.decode_time < every.decode_time
        assert 0 < s.wait_time < s.decode_time
        assert s.generation_tps > 0
    for name in ("cycles", "generation_tokens", "prompt_tokens", "lengths"):
        assert getattr(every, name) == getattr(own[0], name) + getattr(own[1], name)
    assert every.accepted == [a + b for a, b in zip(own[0].accepted, own[1].accepted, strict=True)]
