"""Compare block drafters with transformers' assistant and its candidate generator, through our loader."""

import block_drafters
import drafters
import families
import mlx.core as mx
import numpy as np
import pytest

import mlx_mtp

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")
from transformers.cache_utils import DFlashCache  # noqa: E402

TOLERANCE = 1e-4
V, H = families.V, families.H
TARGET = {**drafters.HEADLESS["qwen3"], "architectures": ["Qwen3ForCausalLM"]}
ROUNDS = [9, 3, 1, 6, 4, 16, 2]  # verified rows of each cycle


@pytest.fixture(scope="module", params=["short", "long"])
def pair(request, tmp_path_factory):
    """(model with a drafter, transformers' target, transformers' drafter, tokens of a text)"""
    path = tmp_path_factory.mktemp("parity")
    directory, _ = families.headless(path / "target", TARGET)
    config = {**block_drafters.ASSISTANT, "sliding_window": {"short": 8, "long": 64}[request.param]}
    drafter = block_drafters.save(path / "drafter", config)
    model = mlx_mtp.load_model(directory, draft_model=drafter)
    target = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs = transformers.MuseGlimmerAssistantModel.from_pretrained(drafter, dtype=torch.float32)
    return model, target.eval(), theirs.eval(), np.random.default_rng(0).integers(0, V, 80).tolist()


@torch.no_grad()
def states(target, tokens):
    """The target's states at the drafter's taps [1, T, taps * H]."""
    out = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1] for i in block_drafters.ASSISTANT["target_layer_ids"]], dim=-1)


@torch.no_grad()
def rows_of(theirs, target, context, cache, newest, first, rows):
    """transformers' output rows for a block that begins at position `first`."""
    ids = torch.tensor([[newest, *[5] * (rows - 1)]])
    cache.set_previous_accepted_tokens(context.shape[1])
    positions = torch.arange(first - context.shape[1], first + rows)[None]
    embeddings = target.model.embed_tokens(ids)
    out = theirs(embeddings, context_hidden_states=context, position_ids=positions, past_key_values=cache)
    return out.last_hidden_state


def test_rows_of_every_cycle(pair):
    """Rows of a block behind verified rows of every number; ours are given rejected rows, too."""
    model, target, theirs, text = pair
    net, context = model.drafter.net, states(target, text)
    cache, theirs_cache = mlx_mtp.make_prompt_cache(model), DFlashCache(config=theirs.config)
    theirs_cache.activate_past_recording()
    prompt, position = 5, 0
    for i, verified in enumerate([prompt, *ROUNDS]):
        rows = 16 if i else prompt  # those behind `verified` are rejected
        given = mx.array(context[:, position : position + verified].numpy())
        given = mx.concatenate([given, mx.full((1, rows - verified, given.shape[2]), 7.0)], axis=1)
        for kv in cache.heads:
            kv.seek(mx.array([position]), position)
        net.append(net.fused(given), cache.heads)
        end = position + verified
        for kv in cache.heads:
            kv.seek(mx.array([end]), position + rows)
        tokens = mx.array([[text[end], *[5] * 15]])
        ours = net(model.embedded(tokens), cache.heads)
        if i:
            theirs_cache.crop(-16)
        expected = rows_of(theirs, target, context[:, position:end], theirs_cache, text[end], end, 16)
        np.testing.assert_allclose(np.array(ours), expected.numpy(), atol=TOLERANCE, rtol=0)
        fresh = DFlashCache(config=theirs.config)
        scratch = rows_of(theirs, target, context[:, :end], fresh, text[end], end, 16)
        np.testing.assert_allclose(np.array(ours), scratch.numpy(), atol=TOLERANCE, rtol=0)
        position = end


def test_candidates_of_the_generator(pair, monkeypatch):
    """The drafts of transformers' own loop, cycle by cycle."""
    model, target, theirs, text = pair
    theirs.config.vocab_size = V
    theirs.generation_config = transformers.GenerationConfig()
    kind = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    candidates, own = [], kind.get_candidates

    def noted(self, input_ids, *args, **kwargs):
        found = own(self, input_ids, *args, **kwargs)
        if found[1] is not None:
            candidates.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist()))
        return found

    monkeypatch.setattr(kind, "get_candidates", noted)
    prompt = torch.tensor([text[:12]])
    options = {"do_sample": False, "max_new_tokens": 30, "assistant_model": theirs, "speculation_type": "dflash"}
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}  # else zeros of the prompt are masked
    answer = target.generate(prompt, **options)[0].tolist()
    calls, propose = [], model.drafter.propose

    def kept(frame, run, k):
        calls.append((frame.cache.layers[0].offset, propose(frame, run, k)))
        return calls[-1][1]

    monkeypatch.setattr(model.drafter, "propose", kept)
    steps = mlx_mtp.generate_step(text[:12], model, max_tokens=30, num_draft_tokens=15, adaptive=False)
    assert text[:12] + [token for token, _, _ in steps] == answer
    ours = {at.item() + 1: drafts.tokens.tolist()[0] for at, drafts in calls}
    assert len(candidates) > 5
    for known, drafts in candidates:
        assert ours[len(known)][: len(drafts)] == drafts
