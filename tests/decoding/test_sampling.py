"""Sampled text has exactly the target's distribution: every path of draws is enumerated, none is sampled."""

import itertools

import mlx.core as mx
import pytest
from draws import SAMPLERS, Draws, reference
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.decoding.sampling import Sampling

PROMPT = [1, 2, 0, 1, 1, 2, 0, 2, 1]


PROCESSORS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.8, "repetition_context_size": 3},
    "presence": {"presence_penalty": 0.9, "presence_context_size": 2},
    "frequency": {"frequency_penalty": 0.7, "frequency_context_size": 4},
    "bias": {"logit_bias": {1: 1.5, 2: -0.5}},
    "three": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
}
DEEP = {("top_k", "three")}  # 2^7 paths
CASES = [(s, "none") for s in SAMPLERS] + [("temperature", p) for p in PROCESSORS if p != "none"] + [*DEEP]


# Cases with few paths: plain draws, a filter with penalties, and the coin of XTC.
FEW = [("temperature", "none", 1), ("top_k", "three", 2), ("xtc_of_two", "none", 1)]


@pytest.mark.parametrize(("sampler", "processor", "k"), sampled(FEW, ((*case, k) for k in (1, 2) for case in CASES)))
def test_distribution_is_exact(tiny_models, monkeypatch, sampler, processor, k):
    # A vocabulary of 3: random heads are right about every third time.
    model, plain = tiny_models(4, vocab_size=3)
    n = 3 if SWEEP and k == 2 and (sampler, processor) in DEEP else 2
    sampling = Sampling(**SAMPLERS[sampler])
    draws = Draws(sampling.xtc_probability)
    draws.stand_in(monkeypatch)
    # Waiting for each run leaves out the cycles that are built ahead and never used: fewer paths.
    processors = [*make_logits_processors(**PROCESSORS[processor]), lambda tokens, logits: logits]
    kept = set()

    def run():
        steps = mlx_mtp.generate_step(
            PROMPT,
            model,
            max_tokens=n,
            num_draft_tokens=k,
            adaptive=False,
            logits_processors=processors,
            draft_sampling="greedy",
            **SAMPLERS[sampler],
        )
        pairs = [(token, drafted) for token, _, drafted in steps]
        kept.update(drafted for _, drafted in pairs[1:])
        return tuple(token for token, _ in pairs)

    found: dict = {}
    for text, p in draws.paths(run):
        found[text] = found.get(text, 0.0) + p
    expected = reference(plain, PROMPT, n, sampling, processors)
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    for text, p in expected.items():
        assert found.get(text, 0.0) == pytest.approx(p, abs=1e-6), text
    assert kept == {True, False}, "drafts must have been both kept and refused"


def test_a_users_own_sampler(tiny_models):
    """A sampler is called on log-probabilities [1, V], one row at a time, as mlx-lm calls it."""
    model, plain = tiny_models(4, vocab_size=3)
    draws = Draws()
    shapes = set()

    def sampler(logprobs):
        shapes.add(logprobs.shape)
        return draws.gumbel_max(logprobs * 0.5)

    def run():
        steps = mlx_mtp.generate_step(
            PROMPT,
            model,
            max_tokens=2,
            num_draft_tokens=1,
            adaptive=False,
            sampler=sampler,
            logits_processors=[lambda t, x: x],
        )
        return tuple(token for token, _, _ in steps)

    found: dict = {}
    for text, p in draws.paths(run):
        found[text] = found.get(text, 0.0) + p
    for text, p in reference(plain, PROMPT, 2, Sampling(temp=2.0), []).items():
        assert found.get(text, 0.0) == pytest.approx(p, abs=1e-6)
    assert shapes == {(1, 3)}


PENALTIES = {"temp": 1.0, "logits_processors": "penalties"}


@pytest.mark.parametrize("options", [*sampled([SAMPLERS["xtc"]], SAMPLERS.values()), PENALTIES])
def test_the_same_seed_gives_the_same_text_for_every_k(tiny_models, options):
    """Random keys depend on the position, so that a seed gives the same tokens with any drafts."""
    model, _ = tiny_models(0)
    if "logits_processors" in options:
        options = {**options, "logits_processors": make_logits_processors(repetition_penalty=1.4)}

    def text(k, seed):
        steps = mlx_mtp.generate_step(
            PROMPT, model, max_tokens=12, num_draft_tokens=k, adaptive=False, seed=seed, **options
        )
        return [token for token, _, _ in steps]

    plain = text(0, 0)
    assert plain == text(1, 0) == text(3, 0)
    assert plain != text(3, 7)


def test_mlx_lm_samplers_are_accepted(tiny_models):
    model, _ = tiny_models(0)
    sampler = make_sampler(temp=1.0, top_p=0.9, xtc_probability=0.3)
    tokens = [
        t for t, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=30, adaptive=False, sampler=sampler, seed=3)
    ]
    again = [
        t for t, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=30, adaptive=False, sampler=sampler, seed=3)
    ]
    assert tokens == again
    assert len(tokens) == 30


@pytest.mark.parametrize("name", sampled(["three"], [name for name in PROCESSORS if name != "none"]))
def test_greedy_with_processors_equals_cacheless_forward(tiny_models, name):
    model, plain = tiny_models(0)
    processors = make_logits_processors(**PROCESSORS[name])
    tokens = list(PROMPT)
    for _ in range(n := 40 if SWEEP else 24):
        logits = plain(mx.array(tokens)[None])[:, -1]
        for process in processors:
            logits = process(mx.array(tokens), logits)
        tokens.append(mx.argmax(logits).item())
    for k in sampled((1, 3), range(4)):
        steps = mlx_mtp.generate_step(
            PROMPT, model, max_tokens=n, num_draft_tokens=k, adaptive=False, logits_processors=processors
        )
        assert [t for t, _, _ in steps] == tokens[len(PROMPT) :], k


def test_processors_see_the_exact_history(tiny_models, monkeypatch):
    """Also for tokens that are in a prompt cache, and for rows after drafts."""
    model, _ = tiny_models(0)
    cache = mlx_mtp.make_prompt_cache(model)
    first = [t for t, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=7, prompt_cache=cache)]
    seen = []

    def note(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    steps = mlx_mtp.generate_step(first[-1:], model, max_tokens=20, prompt_cache=cache, logits_processors=[note])
    text = PROMPT + first + [t for t, _, _ in steps]
    for i in range(len(PROMPT + first), len(text)):
        assert text[:i] in seen


def test_logprobs_are_the_normalised_rows_that_were_drawn_from(tiny_models):
    model, plain = tiny_models(0)
    rows = {}
    for k in (0, 3):
        steps = list(
            mlx_mtp.generate_step(PROMPT, model, max_tokens=25, num_draft_tokens=k, adaptive=False, logprobs=True)
        )
        rows[k] = mx.stack([row for _, row, _ in steps])
        tokens = [token for token, _, _ in steps]
    logits = plain(mx.array(PROMPT + tokens)[None])[0, len(PROMPT) - 1 : -1]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for k in rows:
        assert mx.allclose(rows[k], expected, atol=1e-4)


BAD = {
    "temp": -0.1,
    "top_p": 1.5,
    "top_k": 5,
    "min_p": -1,
    "xtc_probability": 2,
    "xtc_threshold": 0.9,
    "min_tokens_to_keep": 0,
    "max_tokens": -2,
    "prefill_step_size": 0,
    "num_draft_tokens": 4,
    "kv_bits": 7,
    "mtp_kv_bits": 1,
    "max_kv_size": 0,
}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_options_out_of_range(tiny_models, name, value):
    model, _ = tiny_models(0)
    with pytest.raises(ValueError, match=rf"^{name}={value}: allowed (is|are) "):
        mlx_mtp.generate_step(PROMPT, model, **{name: value})


@pytest.mark.parametrize("prompt", [[], [5], [-1], [1.5], ["a"], mx.array([9])])
def test_bad_prompts(tiny_models, prompt):
    model, _ = tiny_models(0)
    with pytest.raises(ValueError, match=r"^prompt: "):
        mlx_mtp.generate_step(prompt, model)


def test_enumeration_visits_every_path():
    """Two draws of 3 and 2 options have 6 paths."""
    draws = Draws()
    paths = list(draws.paths(lambda: (draws.choose([0.5, 0.25, 0.25]), draws.choose([0.9, 0.1]))))
    assert {text for text, _ in paths} == set(itertools.product(range(3), range(2)))
    assert sum(p for _, p in paths) == pytest.approx(1)
