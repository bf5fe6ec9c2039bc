"""Compare rules of logits, in all rows of several sequences at once, with mlx-lm's processors on each row alone."""

import itertools
from types import MappingProxyType

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import linux_only
from mlx_lm.sample_utils import make_logits_processors
from sweep import SWEEP, sampled

from mlx_mtp import emulator
from mlx_mtp.decoding.logit_rules import LogitRules, changed
from mlx_mtp.serve.token_rules import bad_words_of

PIECES = ["a", "b", "c", "ab", "ca", "cab", "bc", "Ġa", "Ã", "©", *(f"<{i}>" for i in range(60))]
VOCAB = len(PIECES) + 3  # the model's vocabulary is larger than the tokenizer's, and no multiple of 32
PENALTIES = {
    "repetition_penalty": (None, 1.3, 0.7),
    "presence_penalty": (None, 0.4),
    "frequency_penalty": (None, 0.35, -0.2),
}
QUICK = emulator.Options(traffic=False)


class Tokenizer:
    """A byte-level tokenizer of PIECES."""

    added_tokens_decoder = MappingProxyType({})

    def __len__(self):
        return len(PIECES)

    def convert_ids_to_tokens(self, ids):
        return [PIECES[i] for i in ids]


TOKENIZER = Tokenizer()
TEXTS = [piece.replace("Ġ", " ").replace("Ã", "\u00c3").encode("latin-1") for piece in PIECES]
TEXTS[8], TEXTS[9] = b"\xc3", b"\xa9"


def random_rules(rng, prompt):
    """Return rules and what the oracle needs of them; half of all options are off."""
    given = {name: values[rng.integers(len(values))] for name, values in PENALTIES.items()}
    sizes = {name.replace("penalty", "context_size"): int(rng.choice([0, 1, 3, 20])) for name in given}
    bias = {int(t): float(v) for t, v in zip(rng.integers(0, VOCAB, 4), rng.normal(size=4), strict=True)}
    of_mlx_lm = {**given, **sizes, "logit_bias": bias if rng.random() < 0.5 else None}
    banned = {int(t) for t in rng.integers(0, VOCAB + 9, 3)} if rng.random() < 0.4 else set()
    allowed = {int(t) for t in rng.integers(0, VOCAB, 40)} if rng.random() < 0.3 else set()
    early = {int(t) for t in rng.integers(0, VOCAB, 5)} if rng.random() < 0.5 else set()
    words = tuple(rng.choice(["abc", "cabc", "c a", "é", "aaaa", "bcbca"], 3)) if rng.random() < 0.6 else ()
    rules = LogitRules(
        **{**of_mlx_lm, "logit_bias": of_mlx_lm["logit_bias"] or {}},
        banned=banned,
        allowed=allowed,
        early=early,
        until=prompt + 2,
        bad_words=bad_words_of(TOKENIZER, words) if words else None,
        prompt=prompt,
    )
    return rules, (of_mlx_lm, banned, allowed, early, words)


def one_row(logits, path, prompt, given):
    """Return logits [1, V] after a path of tokens: mlx-lm's processors, then the excluded tokens by brute force."""
    of_mlx_lm, banned, allowed, early, words = given
    for process in make_logits_processors(**of_mlx_lm):
        logits = process(mx.array(path), logits)
    before = b"".join(TEXTS[t] if t < len(TEXTS) else b"" for t in path[prompt:])
    out = set(banned) | (early if len(path) < prompt + 2 else set())
    out |= set(range(VOCAB)) - allowed if allowed else set()
    for token, word in itertools.product(range(len(TEXTS)), (word.encode() for word in words)):
        text = before + TEXTS[token]
        if any(text.startswith(word, at) for at in range(max(0, len(before) - len(word) + 1), len(text))):
            out.add(token)
    out = mx.array([token for token in out if token < VOCAB], mx.int32)
    return (
        mx.put_along_axis(logits, out[None], mx.array(mx.finfo(logits.dtype).min, logits.dtype), -1)
        if out.size
        else logits
    )


def random_case(seed, n, rows, dtype):
    """Return logits, rules, histories, drafts and masks of n sequences, and the logits that the oracle expects."""
    rng = np.random.default_rng(seed)
    logits = mx.array(rng.normal(size=(n, rows, VOCAB)) * 4).astype(dtype)
    histories = [rng.integers(0, 12, rng.integers(2, 30)).astype(np.int32) for _ in range(n)]
    drafts = rng.integers(0, 12, (n, rows - 1)).astype(np.int32)
    made, masks, want = [], [], []
    for i, history in enumerate(histories):
        prompt = int(rng.integers(1, len(history) + 1))
        rules, given = random_rules(rng, prompt) if i != 1 else (None, ({}, set(), set(), set(), ()))
        bits = (
            rng.integers(-(2**31), 2**31, (rows, -(-VOCAB // 32) + 1)).astype(np.int32)
            if rng.random() < 0.5
            else None
        )
        own = [
            one_row(logits[i, r : r + 1], [*history.tolist(), *drafts[i, :r].tolist()], prompt, given)
            for r in range(rows)
        ]
        own = mx.concatenate(own)
        if bits is not None:
            kept = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB] == 1
            own = mx.where(mx.array(kept), own, -mx.inf)
        made.append(rules)
        masks.append(np.full((rows, -(-VOCAB // 32) + 1), -1, np.int32) if bits is None else bits)
        want.append(own)
    joined = mx.array(np.stack(masks)) if any((mask != -1).any() for mask in masks) else None
    return logits, made, histories, mx.array(drafts) if rows > 1 else None, joined, mx.stack(want)


def same(found, want):
    return found.dtype == want.dtype and mx.array_equal(found, want).item()


SHAPES = [(1, 1), (1, 4), (3, 5), (2, 16)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("n", "rows"), SHAPES)
def test_the_reference_gives_each_row_what_processors_give_it(n, rows, dtype):
    for seed in range(20 if SWEEP else 4):
        *given, want = random_case(seed, n, rows, dtype)
        assert same(changed(*given, fused=False), want), seed


@linux_only
@pytest.mark.parametrize("dtype", sampled([mx.float32, mx.bfloat16], [mx.float32, mx.bfloat16, mx.float16]))
@pytest.mark.parametrize(("n", "rows"), SHAPES)
def test_the_kernel_gives_each_row_what_processors_give_it(n, rows, dtype):
    for seed in range(20 if SWEEP else 3):
        *given, want = random_case(100 + seed, n, rows, dtype)
        with emulator.emulated(QUICK if seed else emulator.Options(order="reverse")) as launches:
            found = changed(*given)
        assert same(found, want), seed
        assert [launch.kernel for launch in launches] == ["change_logits"]


@pytest.mark.parametrize("seed", range(6))
def test_rules_are_a_processor_of_one_row(seed):
    rng = np.random.default_rng(seed)
    path, logits = rng.integers(0, 12, 9).tolist(), mx.array(rng.normal(size=(1, VOCAB))).astype(mx.float32)
    rules, given = random_rules(rng, 4)
    assert same(rules(mx.array(path), logits), one_row(logits, path, 4, given))


def test_without_rules_and_masks_the_logits_are_returned():
    logits = mx.zeros((2, 3, VOCAB))
    assert changed(logits, [None, None], [None, None], mx.zeros((2, 2), mx.int32)) is logits


def test_a_negative_repetition_penalty_is_refused():
    with pytest.raises(ValueError, match=r"^repetition_penalty=-1: allowed is 0 or more$"):
        LogitRules(repetition_penalty=-1)


def test_a_context_of_any_size_is_that_of_all_tokens():
    logits, path = mx.zeros((1, VOCAB)), mx.array([3, 4, 5])
    for name in PENALTIES:
        size = name.replace("penalty", "context_size")
        whole, large = (LogitRules(**{name: 0.5, size: many}) for many in (0, 2**31))
        assert same(large(path, logits + 1), whole(path, logits + 1))
        assert not same(large(path, logits + 1), logits + 1)


@linux_only
def test_a_bad_word_may_be_all_of_the_answer_and_not_of_the_prompt():
    """For every split of the prompt, the answer and the drafts; the prompt's own bytes complete no word."""
    letters = {piece: i for i, piece in enumerate(PIECES)}
    rules = bad_words_of(TOKENIZER, ("abc",))
    for prompt, drafted in itertools.product(range(1, 4), range(3)):
        path = np.array([letters["c"], letters["a"], letters["b"]], np.int32)
        history, drafts = path[: 3 - drafted], path[3 - drafted :]
        own, rows = LogitRules(bad_words=rules, prompt=min(prompt, len(history))), drafted + 1
        given = mx.zeros((1, rows, VOCAB)), [own], [history], mx.array(drafts)[None] if drafted else None
        with emulator.emulated(QUICK):
            found = changed(*given)
        assert same(found, changed(*given, fused=False))
        assert (found[0, -1, letters["c"]].item() < 0) == (own.prompt == 1)
