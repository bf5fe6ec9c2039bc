"""A generation has the text of the adapter that was selected when it began, whatever is selected meanwhile."""

import grammars
import lora
import pytest

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding.replay import ChoiceKind, Recorder, StepKey

PROMPT, N = [1, 5, 6, 7, 9, 4, 12], 7


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with two adapters to select, and by name the models with one or none."""
    folder = tmp_path_factory.mktemp("adapters")
    path = lora.checkpoint(folder / "model")
    alone = {None: mlx_mtp.load(path)[0]}
    paths = {name: lora.save(folder / name, alone[None], seed) for seed, name in enumerate("ab")}
    alone |= {name: mlx_mtp.load(path, adapter_path=adapter)[0] for name, adapter in paths.items()}
    return mlx_mtp.load(path, adapter_path=paths)[0], alone


def steps(model, k, **options):
    options = {"max_tokens": N, "num_draft_tokens": k, "adaptive": False, **options}
    return (token for token, *_ in mlx_mtp.generate_step(PROMPT, model, **options))


@pytest.mark.parametrize("k", [0, 1])
def test_generations_take_turns(models, k):
    """Built and recorded, with cycles built ahead; a recorded cycle is replayed for its adapter only."""
    model, alone = models
    expected = {name: list(steps(alone[name], k)) for name in alone}
    assert len({*map(tuple, expected.values())}) == 3
    model.runtime.recorder = Recorder()
    for compiled in (False, True) if k else (False,):
        running = {}
        for name in alone:
            model.runtime.adapters.select(name)
            running[name] = steps(model, k, compile_cycles=compiled)
        model.runtime.adapters.select(None)
        found = {name: [] for name in running}
        for _ in range(N):
            for name, tokens in running.items():
                found[name].append(next(tokens))
                assert model.runtime.adapters.selected is None
        assert found == expected
    assert {kind.adapter for _, kind in model.runtime.recorder.cycles} == ({*alone} if k else set())


def test_replayed_choices_under_a_grammar_are_those_of_the_adapter(models, recorded_at_once):
    """Passes and choices are recorded apart; both belong to the adapter that was selected when they were recorded."""
    model, alone = models
    made = grammar.regex("((a|b|c){3}ab)+", tokenizer=grammars.letters())
    expected = {name: list(steps(alone[name], 1, grammar=made, max_tokens=20)) for name in alone}
    assert len({*map(tuple, expected.values())}) == 3
    model.runtime.recorder, found = Recorder(), {}
    for name in (*alone, *alone):
        with model.runtime.adapters.using(name):
            found[name] = list(steps(model, 1, grammar=made, max_tokens=20, compile_cycles=True))
        assert found[name] == expected[name]
    kinds = [kind for _, kind in model.runtime.recorder.cycles]
    for of in (StepKey, ChoiceKind):
        assert {kind.adapter for kind in kinds if isinstance(kind, of)} == {*alone}


def test_batches_keep_their_adapter(models):
    model, alone = models
    batches = {}
    for name in alone:
        model.runtime.adapters.select(name)
        batches[name] = mlx_mtp.BatchGenerator(model, num_draft_tokens=2, adaptive=False)
        batches[name].insert([PROMPT, PROMPT[2:]], [N, N])
    model.runtime.adapters.select(None)
    found = {name: [] for name in batches}
    while any(len(tokens) < N for tokens in found.values()):
        for name, batch in batches.items():
            found[name] += [r.token for r in batch.next()[1] if r.uid == 0]
    assert found == {name: list(steps(alone[name], 2)) for name in alone}


def test_the_report_has_the_heads_agreement_with_each_adapter(models, tmp_path):
    model, alone = models
    reports = {name: each.report for name, each in alone.items()}
    assert model.report.adapters == tuple((name, reports[name].agreement) for name in "ab")
    assert model.report.agreement == reports[None].agreement
    assert [reports[name].adapter for name in reports] == ["", "a", "b"]
    lines = str(model.report).splitlines()
    assert "adapters   a, b" in lines
    assert [line.split(" on ")[0].strip() for line in lines if "with adapter" in line] == [
        "with adapter a",
        "with adapter b",
    ]
    assert "agrees with the target with adapter a on" in str(reports["a"])


def test_a_cache_is_continued_with_its_own_adapter(models, tmp_path):
    """In memory, in a batch and from a file, which has the cache's adapter, whatever is selected when it is saved."""
    model, _ = models
    for name, others in (("a", ("b", None)), (None, ("a",))):
        model.runtime.adapters.select(name)
        cache = mlx_mtp.make_prompt_cache(model)
        first = list(steps(model, 1, prompt_cache=cache))
        text = [*first, *steps_on(model, cache.copy(), first)]
        for other in others:
            model.runtime.adapters.select(other)
            refused = f"its tokens were read with adapter {name!r}, and {other!r} is selected; select {name!r}, or"
            with pytest.raises(ValueError, match=refused):
                mlx_mtp.generate_step(first[-1:], model, prompt_cache=cache)
            with pytest.raises(ValueError, match=refused):
                mlx_mtp.BatchGenerator(model).insert([first[-1:]], [N], [cache])
            mlx_mtp.save_prompt_cache(tmp_path / "cache", cache)
            with pytest.raises(ValueError, match="made with another model, adapter"):
                mlx_mtp.load_prompt_cache(tmp_path / "cache", model)
        model.runtime.adapters.select(name)
        read = mlx_mtp.load_prompt_cache(tmp_path / "cache", model)
        assert [*first, *steps_on(model, read, first)] == text
        model.runtime.adapters.select("b")
        cache.trim(cache.offset)
        assert len(list(steps(model, 1, prompt_cache=cache))) == N
    model.runtime.adapters.select(None)


def steps_on(model, cache, first):
    return [t for t, *_ in mlx_mtp.generate_step(first[-1:], model, max_tokens=N, prompt_cache=cache)]
