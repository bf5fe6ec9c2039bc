"""The public functions on the demo model, called as a user calls them."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import GenerationResponse as MLXResponse
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.demo import demo_path

PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def demo():
    """The demo in float32; on a GPU it loads in bfloat16, in which near-ties may differ."""
    model, tokenizer = mlx_mtp.load(demo_path())
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_text_is_the_same_for_every_number_of_drafts_and_form_of_prompt(demo):
    model, tokenizer = demo
    ids = tokenizer.encode(PROMPT)
    forms = [(prompt, None, True) for prompt in (PROMPT, ids, np.array(ids), mx.array(ids))]
    texts = {
        mlx_mtp.generate(model, tokenizer, prompt, max_tokens=16, num_draft_tokens=k, adaptive=adaptive)
        for prompt, k, adaptive in [
            *forms,
            *sampled(
                [(PROMPT, 0, True), (PROMPT, 1, False), (PROMPT, 3, True)],
                ((PROMPT, k, a) for k in range(4) for a in (False, True)),
            ),
        ]
    }
    assert len(texts) == 1
    assert len(texts.pop()) > 30


def test_tokens_equal_mlx_lms(demo):
    model, tokenizer = demo
    plain, _ = mlx_lm.load(str(demo_path()))
    plain.set_dtype(mx.float32)
    prompt = mx.array(tokenizer.encode("class Reader:\n    def __init__(self, stream):\n"))
    theirs = [token for token, _ in mlx_lm_generate_step(prompt, plain, max_tokens=24)]
    ours = [token for token, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=24)]
    assert ours == theirs


def test_responses(demo):
    model, tokenizer = demo
    ids = tokenizer.encode(PROMPT)
    responses = list(mlx_mtp.stream_generate(model, tokenizer, ids, max_tokens=20, adaptive=False))
    assert all(isinstance(response, MLXResponse) for response in responses)
    assert [r.generation_tokens for r in responses] == list(range(1, len(responses) + 1))
    assert [r.finish_reason for r in responses[:-1]] == [None] * (len(responses) - 1)
    last, stats = responses[-1], responses[-1].stats
    assert last.finish_reason in ("length", "stop")
    assert last.prompt_tokens == stats.prompt_tokens == len(ids)
    assert last.prompt_tps > 0
    assert last.generation_tps > 0
    assert last.peak_memory > 0
    assert any(r.from_draft for r in responses)
    assert not responses[0].from_draft
    tokens = [r.token for r in responses]
    expected = tokenizer.decode(tokens if last.finish_reason == "length" else tokens[:-1])
    assert "".join(r.text for r in responses) == expected


def test_stats_add_up(demo):
    model, tokenizer = demo
    stats = mlx_mtp.Stats(phases=True)
    *_, last = mlx_mtp.stream_generate(model, tokenizer, PROMPT, max_tokens=30, adaptive=False, stats=stats)
    assert last.stats is stats
    assert stats.drafted == [stats.cycles] * 3
    assert stats.accepted == sorted(stats.accepted, reverse=True)
    # All tokens but the first come from cycles; the last cycle may have been cut.
    assert 0 <= stats.cycles + sum(stats.accepted) - (stats.generation_tokens - 1) <= 3
    assert stats.tokens_per_cycle == pytest.approx(1 + sum(stats.acceptance))
    assert stats.prefill_time > 0
    assert 0 < stats.draft_time < stats.decode_time
    assert stats.draft_time + stats.verify_time == pytest.approx(stats.decode_time)
    total = mlx_mtp.Stats()
    for _ in range(2):
        total.add(stats)
    assert (total.cycles, total.accepted[0]) == (2 * stats.cycles, 2 * stats.accepted[0])
    assert total.acceptance == stats.acceptance


@pytest.fixture(scope="module")
def answer(demo):
    """Return the responses of the demo to a question from its training data, without a limit of tokens."""
    model, tokenizer = demo
    question = [{"role": "user", "content": "What does os.path.join do?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    return list(mlx_mtp.stream_generate(model, tokenizer, prompt, max_tokens=-1))


def test_a_stop_token_ends_the_text(demo, answer):
    _, tokenizer = demo
    last = answer[-1]
    assert last.finish_reason == "stop"
    assert last.token in tokenizer.eos_token_ids
    assert last.generation_tokens < 200


def test_the_demo_answers_and_continues(demo, answer):
    """The demo answers questions from its training data."""
    model, tokenizer = demo
    shown = "".join(response.text for response in answer).lower()
    assert "join" in shown
    assert "path" in shown
    code = mlx_mtp.generate(model, tokenizer, PROMPT, max_tokens=40)
    assert "    " in code
    assert any(word in code for word in ("return", "for ", "if ", "with ", "try:"))


@sweep
def test_most_first_drafts_of_the_demo_are_accepted(demo):
    model, tokenizer = demo
    total = mlx_mtp.Stats()
    for prompt in (PROMPT, "class Reader:\n", "import sys\n\ndef main():\n", "    try:\n        "):
        *_, last = mlx_mtp.stream_generate(model, tokenizer, prompt, max_tokens=100, adaptive=False)
        total.add(last.stats)
    first, second, third = total.acceptance
    assert first > second > third > 0
    assert first > 0.6


def test_closing_a_stream_leaves_the_cache_usable(demo):
    model, tokenizer = demo
    cache = mlx_mtp.make_prompt_cache(model)
    stream = mlx_mtp.stream_generate(model, tokenizer, PROMPT, prompt_cache=cache, max_tokens=100, adaptive=False)
    shown = [next(stream).token for _ in range(9)]
    stream.close()
    assert cache.tokens == tokenizer.encode(PROMPT) + shown[:-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, r"^max_tokens=0: allowed is 1 or more"),
        ({"prompt_cache": [1]}, r"^prompt_cache: a list; expected one from"),
        ({"sampler": lambda x: x, "temp": 1.0}, r"^sampler: give either"),
        ({"kv_bits": 8, "kv_group_size": 64}, r"^kv_group_size=64: allowed for the head size 32 are 32"),
        ({"temp": 10**400}, "^temp=10*: allowed is 0 or more, as a finite float$"),
        (
            {"xtc_probability": 0.5, "xtc_special_tokens": [3, 2**31]},
            r"^xtc_special_tokens=\(3, 2147483648\): allowed is",
        ),
    ],
)
def test_options_out_of_range_are_refused(demo, options, message):
    model, tokenizer = demo
    with pytest.raises(ValueError, match=message):
        mlx_mtp.stream_generate(model, tokenizer, PROMPT, **options)


@pytest.mark.parametrize("size", [2**31, 2**63, 10**30])
@pytest.mark.parametrize("name", ["max_tokens", "max_kv_size"])
def test_numbers_of_positions_beyond_int32_are_refused(demo, name, size):
    model, tokenizer = demo
    calls = [
        lambda: mlx_mtp.generate(model, tokenizer, PROMPT, **{name: size}),
        lambda: mlx_mtp.stream_generate(model, tokenizer, PROMPT, **{name: size}),
        lambda: mlx_mtp.batch_generate(model, tokenizer, [[1, 2], [3]], **{name: size}),
        lambda: mlx_mtp.BatchGenerator(model, **{name: size}).insert([[1, 2]]),
    ]
    if name == "max_tokens":
        calls.append(lambda: mlx_mtp.BatchGenerator(model).insert([[1, 2], [3]], [5, size]))
    for call in calls:
        with pytest.raises(ValueError, match=rf"^{name}={size}: allowed is .*1073741824"):
            call()


def test_a_misspelt_option_is_an_error(demo):
    model, tokenizer = demo
    with pytest.raises(TypeError, match="num_drafts"):
        mlx_mtp.stream_generate(model, tokenizer, PROMPT, num_drafts=2)


def test_a_cache_of_another_layout_is_refused(demo, tiny_models):
    model, _ = demo
    other, _ = tiny_models(0)
    with pytest.raises(ValueError, match=r"^prompt_cache: made for another model"):
        mlx_mtp.generate_step([1], model, prompt_cache=mlx_mtp.make_prompt_cache(other))
    cache = mlx_mtp.make_prompt_cache(model, num_draft_tokens=1)
    message = r"^num_draft_tokens=2: allowed is 0 to 1 with the drafter of prompt_cache"
    with pytest.raises(ValueError, match=message):
        mlx_mtp.generate_step([1], model, prompt_cache=cache, num_draft_tokens=2)
    with pytest.raises(ValueError, match=r"^kv_bits=8: fixed when a prompt_cache is made"):
        mlx_mtp.generate_step([1], model, prompt_cache=cache, kv_bits=8)
