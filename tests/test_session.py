"""Conversations: every turn's tokens equal those after a full prefill, however the caches came about."""

import itertools
import random
import sys

import mlx.core as mx
import pytest
from letter_chats import PLAIN, REWRITING, VOCAB, answer, make_session
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.session import KEPT_SNAPSHOTS

MESSAGES = ["abc", "d", "efghabcdefghijabcdefghij", "a", "jj", "abcabcab", "hgf", "b"]


@pytest.fixture
def model(tiny_models):
    return tiny_models(2, vocab_size=len(VOCAB))[0]


def full_prefill(session, text):
    """Return the answer's tokens from plain decoding of the whole conversation with an empty cache."""
    max_tokens = session.options["max_tokens"]
    messages = [*session.messages, {"role": "user", "content": text}]
    tokenizer = session.tokenizer
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    steps = mlx_mtp.generate_step(
        prompt, session.model, max_tokens=max_tokens, num_draft_tokens=0, stop_tokens=tokenizer.eos_token_ids
    )
    return [token for token, _, _ in steps]


@pytest.mark.parametrize(("template", "seed"), paired([PLAIN, REWRITING], [0, 2]))
def test_turns_equal_full_prefills(tiny_models, template, seed):
    model, _ = tiny_models(seed, vocab_size=len(VOCAB))
    session = make_session(model, template, system_prompt="ijij")
    reused = []
    for text in sampled(MESSAGES[:5], MESSAGES):
        expected = full_prefill(session, text)
        assert answer(session, text) == expected
        assert session.messages[-1]["role"] == "assistant"
        reused.append((session.turn.reused, session.turn.prompt_tokens))
    assert reused[0][0] == 0
    assert all(old > 0 for old, _ in reused[1:])
    assert session.cache.offset > 40  # the window of 8 has wrapped


def test_only_new_tokens_are_prefilled(model):
    session = make_session(model)
    answer(session, "abc")
    cached = session.cache.offset
    answer(session, "de")
    assert session.turn.reused == cached
    # The first answer's last token, the template's "<e>" unless it was that, and "<u>de<e><a>".
    assert session.turn.prompt_tokens - cached in (6, 7)


def test_a_rewritten_answer_costs_one_turn(model):
    session = make_session(model, REWRITING)
    for i, text in enumerate(MESSAGES):
        boundary = session.turn.prompt_tokens - 2  # before the generation prompt "<a>[" of the last turn
        answer(session, text)
        assert i == 0 or session.turn.reused >= boundary


@pytest.mark.parametrize("template", [PLAIN, REWRITING], ids=["plain", "rewriting"])
@pytest.mark.parametrize("how", ["close", "stopping"])
def test_stopped_at_every_token(model, template, how):
    for n in range(1, 13, 3) if SWEEP else (1, 6, 11) if (template, how) == (PLAIN, "close") else (4,):
        session = make_session(model, template)
        answer(session, "abcdefgh")
        responses = session.ask("cab")
        shown = list(itertools.islice(responses, n))
        if how == "close":
            responses.close()
        else:
            session.stopping = len(shown) == n  # fewer if the answer had already ended
            assert list(responses) == []
            assert not session.stopping
        assert session.messages[-1]["content"] == "".join(response.text for response in shown)
        assert session.cache.offset == session.turn.prompt_tokens + len(shown) - 1
        expected = full_prefill(session, "d")
        assert answer(session, "d") == expected


def test_stopped_in_prefill(model):
    session = make_session(model, prefill_step_size=8)
    answer(session, "abc")
    messages, long_message = list(session.messages), "abcdefghij" * 5

    def stop(done, total):
        session.stopping = done >= 24

    assert list(session.ask(long_message, stop)) == []
    assert session.messages == messages
    assert not session.stopping
    assert session.cache.offset >= 24
    cached = session.cache.offset
    expected = full_prefill(session, long_message)
    assert answer(session, long_message) == expected
    assert session.turn.reused == cached


def test_a_new_question_after_a_stop_in_prefill(model):
    session = make_session(model, prefill_step_size=8)
    answer(session, "abc")
    cached = session.cache.offset

    def stop(done, total):
        session.stopping = done >= 24

    assert list(session.ask("abcdefghij" * 5, stop)) == []
    expected = full_prefill(session, "j")
    assert answer(session, "j") == expected
    assert session.turn.reused == cached


class InterruptAt:
    """Raises KeyboardInterrupt at the n-th line that is executed in the package."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, _):
        if "/mlx_mtp/" not in frame.f_code.co_filename:
            return None
        self.left -= event == "line"
        if self.left == 0:
            raise KeyboardInterrupt
        return self


def test_interrupted_at_any_line(model):
    rng = random.Random(0)
    interrupted = 0
    for _ in range(count := 24 if SWEEP else 5):
        session = make_session(model, prefill_step_size=16, max_tokens=12)
        answer(session, "abcdefghij")
        messages = session.messages
        tracer = InterruptAt(rng.randrange(1, 1600))
        try:
            sys.settrace(tracer)
            for _ in session.ask("abcdefghijabcdefghijabcdefghij"):
                pass
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert session.messages[: len(messages)] == messages
        assert len(session.messages) in (len(messages), len(messages) + 2)
        expected = full_prefill(session, "cd")
        assert answer(session, "cd") == expected
    assert interrupted > count / 2


def test_drafting_switched_between_turns(model):
    session = make_session(model)
    for k, text in sampled(
        [*zip((3, 0, 2, 0, 3), MESSAGES, strict=False)], zip((3, 0, 2, 0, 0, 3, 1, 3), MESSAGES, strict=True)
    ):
        session.num_draft_tokens = k
        cached, expected = session.cache.offset, full_prefill(session, text)
        assert answer(session, text) == expected
        assert session.turn.reused == cached
        assert len(session.turn.stats.drafted) == k


def test_reset_and_seeds(model):
    answers = []
    for _ in range(2):
        session = make_session(model, temp=1.0, seed=7)
        answers.append([answer(session, text) for text in ("abc", "abc", "d")])
        session.reset()
        assert (session.messages, session.cache.offset) == ([], 0)
        answers[-1].append(answer(session, "abc"))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][3]  # a reset does not repeat the draws


@pytest.mark.parametrize("start", sampled([20], [0, 20, 60]))
def test_rewinding_with_quantized_caches(tiny_models, start):
    model, _ = tiny_models(2, vocab_size=len(VOCAB), head_dim=32)
    options = {"kv_bits": 8, "mtp_kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    session = make_session(model, REWRITING, **options)
    for text in MESSAGES[: 6 if SWEEP else 4]:
        fresh = make_session(model, REWRITING, **options, num_draft_tokens=0)
        fresh.messages = list(session.messages)
        assert answer(session, text) == answer(fresh, text)


def test_memory_is_flat_beyond_the_caches(model):
    session = make_session(model, REWRITING)
    beyond = []
    while session.cache.offset < 1_600:
        answer(session, "abcdefghij" * 20)
        assert len(session._snapshots) <= KEPT_SNAPSHOTS
        mx.clear_cache()
        beyond.append(mx.get_active_memory() - session.cache.nbytes)
    assert max(beyond[5:]) - min(beyond[5:]) < 250_000, beyond


def test_without_a_template(model):
    session = make_session(model, None, system_prompt="s")
    first = "".join(response.text for response in session.ask("abc"))
    encoded = session.tokenizer.encode
    assert session.cache.tokens[: len(encoded("s\nabc"))] == encoded("s\nabc")
    cached = session.cache.offset
    answer(session, "de")
    assert session.turn.reused == cached
    assert session.turn.prompt_tokens == len(encoded(f"s\nabc{first}\nde"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses this conversation"),
        ("{{ 1 + 'a' }}", "refuses this conversation"),
        ("{# nothing #}", "renders nothing for this conversation"),
    ],
)
def test_refusing_template(model, template, message):
    session = make_session(model, template)
    with pytest.raises(ValueError, match=message):
        list(session.ask("a"))
    assert session.messages == []


def test_a_conversation_that_is_too_long_names_the_remedy(model):
    session = make_session(model, max_tokens=-1, max_context=2000)
    with pytest.raises(ValueError, match=r"has 2,.* tokens; allowed are at most 1,999, .*; shorten the message$"):
        list(session.ask("a" * 2100))
    session.messages = [{"role": "user", "content": "a" * 1990}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=r"; shorten the message or start a new conversation$"):
        list(session.ask("a" * 20))


@pytest.mark.parametrize(("name", "value"), [("num_draft_tokens", 4), ("temp", -1), ("top_k", 999), ("kv_bits", 7)])
def test_options_out_of_range(model, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make_session(model, **{name: value})
