"""The heads' caches are exact: drafts and hidden states equal a recomputation from scratch."""

import mlx.core as mx
import pytest
import tiny
from mlx_lm.models.base import create_causal_mask
from sweep import paired, sampled

import mlx_mtp
from mlx_mtp.cache.absorb import AT_FIRST
from mlx_mtp.decoding.drafters.heads import Heads


def head_outputs(model, tokens, hidden, drafts):
    """Cacheless reference: every depth over all its slots, drafted tokens appended. Outputs [n_slots, H] each.

    hidden: the target's rows h_0..h_{T-2} [1, T-1, H] for tokens x_0..x_{T-1}.
    """
    outputs, rows = [], hidden
    for depth, head in enumerate(model.mtp):
        following = (tokens + drafts)[1 + depth : 1 + depth + rows.shape[1]]
        e, h = head.enorm(model.embed(mx.array(following)[None], depth)), head.hnorm(rows)
        x = head.eh_proj(mx.concatenate([e, h], axis=-1))
        mask = create_causal_mask(x.shape[1], window_size=model.args.sliding_window)
        rows = head.block(x, mask, None)
        outputs.append(rows)
    return outputs


def plain_hidden(model, tokens):
    """The target's rows before the final norm, with no cache."""
    x = model.model.embed_tokens(mx.array(tokens)[None])
    n = len(tokens)
    masks = {True: create_causal_mask(n, window_size=model.args.sliding_window), False: create_causal_mask(n)}
    for layer in model.layers:
        x = layer(x, mask=masks[layer.is_sliding], cache=None)
    return x


@pytest.mark.parametrize(("length", "step"), paired(sampled([1, 3, 40], [1, 2, 3, 8, 40]), [2048, 5]))
def test_drafts_equal_recomputation(tiny_models, monkeypatch, length, step):
    model, _ = tiny_models(1, vocab_size=4)
    mx.random.seed(length)
    prompt = mx.random.randint(0, 4, (length,)).tolist()
    calls, real = [], Heads.propose

    def spy(heads, frame, run, k):
        drafts = real(heads, frame, run, k)
        calls.append((frame.cache.layers[0].offset, drafts.tokens[0], list(frame.cache.kept)))
        return drafts

    monkeypatch.setattr(Heads, "propose", spy)
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=20, num_draft_tokens=3, adaptive=False, prefill_step_size=step
    )
    text = prompt + [token for token, _, _ in steps]
    assert len(calls) > 5
    for offset, drafts, kept in calls:
        known = text[: offset.item() + 1]
        if len(known) <= offset.item():
            continue  # built ahead of the last cycle and never used
        drafts = drafts.tolist()
        outputs = head_outputs(model, known, plain_hidden(model, known[:-1]), drafts)
        for depth, output in enumerate(outputs):
            answer = model.draft_logits(depth, output[:, -1:])
            assert mx.argmax(answer).item() == drafts[depth]
        for depth, row in enumerate(kept):
            # Depth j's last exact slot is T-2-j, one before each drafted token that it would need.
            slot = len(known) - 2 - depth
            if slot >= 0:
                assert mx.allclose(row[0, 0], outputs[depth][0, slot], rtol=1e-4, atol=1e-5)


def test_windows_limit_what_the_heads_read_of_a_prompt(tiny_models):
    """Three windows of 8 reach back 24 rows: of a longer prompt the heads read exactly these."""
    model, _ = tiny_models(1, vocab_size=4)
    cache = mlx_mtp.make_prompt_cache(model)
    assert cache.reach == 24
    list(mlx_mtp.generate_step([1] * 300, model, prompt_cache=cache, max_tokens=0, num_draft_tokens=0))
    held = sum(rows.shape[1] for rows in cache.backlog)
    assert 24 <= held < 24 + 64 + 1


def test_heads_of_wide_windows_begin_shortly_before_their_first_draft(tiny_models, monkeypatch):
    """Their drafts equal those of heads that read a sequence which begins there."""
    model, _ = tiny_models(1, vocab_size=4, sliding_window=64)
    prompt, calls, real = mx.random.randint(0, 4, (100,), key=mx.random.key(0)).tolist(), [], Heads.propose

    def spy(heads, frame, run, k):
        drafts, cache = real(heads, frame, run, k), frame.cache
        calls.append((cache.layers[0].offset, drafts.tokens[0], [c.start for c in cache.heads]))
        return drafts

    monkeypatch.setattr(Heads, "propose", spy)
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=12, num_draft_tokens=3, adaptive=False)
    text = prompt + [token for token, _, _ in steps]
    for offset, drafts, (first, *others) in calls[:3]:
        known = text[: offset.item() + 1]
        assert others == [first + 1, first + 2]
        assert 100 - first == AT_FIRST
        rows = plain_hidden(model, known[:-1])[:, first:]
        outputs = head_outputs(model, known[first:], rows, drafts.tolist())
        answers = [mx.argmax(model.draft_logits(j, output[:, -1:])).item() for j, output in enumerate(outputs)]
        assert answers == drafts.tolist()


def test_paused_heads_are_prefilled(tiny_models):
    """After a pause drafts are as without a pause."""
    model, _ = tiny_models(2)
    prompt = [1, 2, 3, 4, 0, 1]
    cache = mlx_mtp.make_prompt_cache(model)
    parked = [
        t for t, _, _ in mlx_mtp.generate_step(prompt, model, prompt_cache=cache, max_tokens=40, num_draft_tokens=0)
    ]
    assert cache.primed == 0
    on, off = mlx_mtp.Stats(), mlx_mtp.Stats()
    go_on = mlx_mtp.generate_step(parked[-1:], model, prompt_cache=cache, max_tokens=20, adaptive=False, stats=on)
    fresh = mlx_mtp.generate_step(prompt + parked, model, max_tokens=20, adaptive=False, stats=off)
    assert [t for t, _, _ in go_on] == [t for t, _, _ in fresh]
    assert on.accepted == off.accepted
    assert tiny.CONFIG["sliding_window"] == 8
