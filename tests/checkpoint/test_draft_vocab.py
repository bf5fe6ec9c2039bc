"""Draft from a list of tokens: the same output, the whole head's best listed token as draft, and less memory."""

import sys
from types import SimpleNamespace

import drafters
import families
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

import mlx_mtp
from mlx_mtp.checkpoint.draft_vocab import reduce_heads
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.layers.lm_head import place_heads, sliced

PROMPT = [1, 3, 2, 4, 0, 1]
LISTS = {
    "step3p5": [4, 1],  # three heads with LM heads of their own
    "glm4_moe_untied": [11, 2, 3, 7, 5],  # one recycled head, whose LM head is the target's
    "mimo_v2_flash": [2, 3, 5, 11, 7],  # three heads that share the target's
    "eagle3": [12, 0, 1, 2, 3, 4, 5, 6, 8],  # a drafter with 7 tokens
    "tied": [2, 7, 5, 3, 11],  # a drafter whose LM head is the target's embedding
}


def arguments_of(name, path):
    """Return the arguments of `load_model`."""
    if name == "step3p5":
        return {"path": tiny.save(path, tiny.CONFIG, tiny.random_weights(tiny.CONFIG))}
    if name not in ("eagle3", "tied"):
        return {"path": families.build(name, path)[0]}
    tie = name == "tied"
    target, _ = families.headless(
        path / "target", {**drafters.GQA, "model_type": "qwen2", "tie_word_embeddings": tie}
    )
    config = {**drafters.CONFIG, "draft_vocab_size": 13 if tie else 7}
    weights = drafters.weights(config, families.H)
    if tie:
        del weights["lm_head.weight"]
    return {"path": target, "draft_model": tiny.save(path / "drafter", config, weights)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """name -> (arguments of `load_model`, the model without a list, its plain text, its model with one of LISTS)"""
    made = {}

    def make(name):
        if name not in made:
            arguments = arguments_of(name, tmp_path_factory.mktemp("vocab"))
            whole = mlx_mtp.load_model(**arguments)
            model = mlx_mtp.load_model(**arguments, draft_vocab=LISTS[name])
            made[name] = arguments, whole, text(whole, k=0), model
        return made[name]

    return make


@pytest.fixture
def drafted(monkeypatch):
    """Return every draft of the decoding loop as arrays."""
    arrays, real = [], Heads.propose

    def recording(*args):
        drafts = real(*args)
        arrays.append(drafts.tokens[0])
        return drafts

    monkeypatch.setattr(Heads, "propose", recording)
    return arrays


def text(model, n=7, k=None, **options):
    return [
        t
        for t, _, _ in mlx_mtp.generate_step(
            PROMPT, model, max_tokens=n, num_draft_tokens=k, adaptive=False, **options
        )
    ]


def tokens_of(drafted):
    found = [array.tolist() for array in drafted]
    drafted.clear()
    return found


@pytest.mark.parametrize("name", LISTS)
def test_the_text_is_the_targets_and_drafts_are_from_the_list(name, checkpoints, drafted):
    _, whole, truth, model = checkpoints(name)
    assert text(model, k=min(3, model.max_draft_tokens)) == truth
    drafts = {t for drafts in tokens_of(drafted) for t in drafts}
    assert drafts <= set(LISTS[name])
    assert drafts
    assert text(model, n=4, temp=0.9, seed=3) == text(whole, n=4, k=0, temp=0.9, seed=3)


@pytest.mark.parametrize("name", LISTS)
def test_a_draft_is_the_whole_heads_best_of_the_list(name, checkpoints):
    _, whole, _, model = checkpoints(name)
    chosen = set()
    for depth, head in enumerate(whole.mtp):
        known = head.token(mx.arange(whole.unembedding(depth).weight.shape[0])).tolist()
        outside = mx.array([0.0 if token in LISTS[name] else -mx.inf for token in known])
        for row in mx.random.normal((20, 1, 1, families.H)):
            best = known[mx.argmax(whole.draft_logits(depth, row) + outside).item()]
            assert model.mtp[depth].token(model.draft_choice(depth, row)).item() == best
            chosen.add(best)
        rows = mx.array([row for row, token in enumerate(known) if token in LISTS[name]])
        logits = model.draft_logits(depth, row)
        assert logits.shape == (1, 1, rows.size)
        assert mx.allclose(logits, whole.draft_logits(depth, row)[..., rows], atol=1e-5)
    assert len(chosen) > 1


@pytest.mark.parametrize("name", ["step3p5", "glm4_moe_untied", "eagle3"])
def test_a_list_of_all_tokens_changes_nothing(name, checkpoints, drafted):
    arguments, whole, truth, _ = checkpoints(name)
    assert text(whole) == truth
    expected = tokens_of(drafted)
    assert text(mlx_mtp.load_model(**arguments, draft_vocab=range(whole.vocab_size))) == truth
    assert tokens_of(drafted) == expected != []


def test_one_token(checkpoints, drafted):
    arguments, _, truth, _ = checkpoints("glm4_moe_untied")
    assert text(mlx_mtp.load_model(**arguments, draft_vocab=[6])) == truth
    assert {t for drafts in tokens_of(drafted) for t in drafts} == {6}


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [("affine", 4, 32), ("affine", 3, 64), ("affine", 8, 128), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
def test_quantized_rows_have_the_bits_of_the_whole_product(mode, bits, group_size):
    rows, x = mx.array([40, 3, 3, 0, 36]), mx.random.normal((3, 128))
    how = {"group_size": group_size, "bits": bits, "mode": mode}
    linear = nn.QuantizedLinear.from_linear(nn.Linear(128, 41), **how)
    linear.bias = mx.random.normal((41,))
    embedding = nn.QuantizedEmbedding.from_embedding(nn.Embedding(41, 128), **how)
    for module, product in ((linear, linear(x)), (embedding, embedding.as_linear(x))):
        part = sliced(module, rows)
        assert mx.array_equal(part(x), product[:, rows])
        assert ("biases" in part, "bias" in part) == (mode == "affine", module is linear)
        assert part.weight.nbytes == module.weight.nbytes // 41 * 5


def test_rows_of_layers_that_are_not_quantized():
    rows, x, linear, embedding = mx.array([8, 0, 5]), mx.random.normal((2, 16)), nn.Linear(16, 9), nn.Embedding(9, 16)
    assert mx.allclose(sliced(linear, rows)(x), linear(x)[:, rows], atol=1e-6)
    assert mx.allclose(sliced(embedding, rows)(x), embedding.as_linear(x)[:, rows], atol=1e-6)


def test_memory_of_own_heads_falls(tmp_path):
    V, n, H = 4000, 100, tiny.CONFIG["hidden_size"]
    config = {**tiny.CONFIG, "vocab_size": V}
    directory = tiny.save(tmp_path, config, tiny.random_weights(config))
    held = []
    for listed in (None, range(n)):
        before = mx.get_active_memory()
        model = mlx_mtp.load_model(directory, draft_vocab=listed)
        report = model.report
        held.append((mx.get_active_memory() - before, report.head_bytes))
        del model
    saved = 3 * ((V - n) * H * 4 - n * 4)  # d2t is new
    assert [a - b for a, b in zip(*held, strict=True)] == [pytest.approx(saved, rel=0.02), saved]
    assert (report.drafted_from, report.saved_bytes) == ((n, V), saved)
    assert f"drafts     from 100 of 4,000 tokens, {saved / 1e6:.2f} MB less" in str(report)


def test_a_shared_head_is_copied_once(checkpoints):
    _, whole, _, model = checkpoints("mimo_v2_flash")
    assert len(model.mtp) == 3
    assert len({id(head.head) for head in model.mtp}) == len({id(head.d2t) for head in model.mtp}) == 1
    report, copied = model.report, 5 * families.H * 4 + 5 * 4
    assert (report.head_bytes - whole.report.head_bytes, -report.saved_bytes) == (copied, copied)
    assert "MB more for a copy of their rows" in str(report)
    assert "shared with the target" in str(report)
    assert report.agreement == whole.report.agreement
    assert model.lm_head.weight.shape == whole.lm_head.weight.shape


def test_kernels_find_the_reduced_heads(checkpoints, monkeypatch):
    """Kernels are placed on the reduced heads, and choose the same tokens."""
    seen = []

    def switch_on(model, lane, *, lazy):
        seen.extend(place_heads(model))
        return (), ()

    monkeypatch.setattr(sys.modules["mlx_mtp.checkpoint.load"], "switch_on", switch_on)
    model = mlx_mtp.load_model(**checkpoints("step3p5")[0], draft_vocab=[0, 3, 4])
    assert [head.module.weight.shape[0] for head in seen] == [5, 3, 3, 3]
    assert [id(head.module) for head in seen[1:]] == [id(head.head) for head in model.mtp]
    for row in mx.random.normal((10, 1, 1, families.H)):
        chosen = []
        for rows in (frozenset(), frozenset({1})):
            seen[2].rows = rows
            chosen.append(model.draft_choice(1, row).item())
        assert chosen[0] == chosen[1] == mx.argmax(model.draft_logits(1, row)).item()


def test_lists_compose(checkpoints):
    """A list reduces a drafter with a vocabulary of its own, and an earlier list."""
    arguments, _, truth, _ = checkpoints("eagle3")
    model = mlx_mtp.load_model(**arguments)
    known = model.mtp[0].token(mx.arange(7)).tolist()
    assert reduce_heads(model, known[1:5]) == (4, 7)
    assert reduce_heads(model, [*known[:2], *known[4:]]) == (2, 4)
    assert model.mtp[0].token(mx.arange(2)).tolist() == [known[1], known[4]]
    assert text(model) == truth
    with pytest.raises(ValueError, match="draft_vocab: the drafter has 2 tokens, and none of the 1 listed"):
        reduce_heads(model, known[2:3])


def test_a_saved_cache_fits_whatever_is_drafted_from(checkpoints, tmp_path):
    for name in ("step3p5", "mimo_v2_flash"):
        _, whole, truth, model = checkpoints(name)
        for one, following in ((whole, model), (model, whole)):
            cache = mlx_mtp.make_prompt_cache(one)
            begun = text(one, n=4, prompt_cache=cache)
            mlx_mtp.save_prompt_cache(tmp_path / f"{name}.safetensors", cache)
            cache = mlx_mtp.load_prompt_cache(tmp_path / f"{name}.safetensors", following)
            steps = mlx_mtp.generate_step(begun[-1:], following, max_tokens=3, prompt_cache=cache)
            assert begun + [token for token, _, _ in steps] == truth
    with pytest.raises(ValueError, match="another model"):
        mlx_mtp.load_prompt_cache(tmp_path / "step3p5.safetensors", checkpoints("mimo_v2_flash")[1])


def test_weights_that_stay_on_disk(checkpoints):
    arguments, _, truth, _ = checkpoints("step3p5")
    assert text(mlx_mtp.load_model(**arguments, draft_vocab=[0, 2], lazy=True)) == truth


def test_wrong_arguments(checkpoints, tmp_path):
    arguments = checkpoints("step3p5")[0]
    for listed, message in (
        ([5], "draft_vocab: token 5 in the list; allowed are 0 to 4"),
        ([], "draft_vocab: the tokens are empty"),
        (tmp_path, "not a file"),
    ):
        with pytest.raises(ValueError, match=message):
            mlx_mtp.load_model(**arguments, draft_vocab=listed)
    with pytest.raises(ValueError, match=r"draft_vocab=\[1\]: not together with mtp=False"):
        mlx_mtp.load_model(**arguments, draft_vocab=[1], mtp=False)
    target = checkpoints("eagle3")[0]["path"]
    with (
        pytest.warns(UserWarning, match="no MTP heads found"),
        pytest.raises(ValueError, match="the model has no heads that draft"),
    ):
        mlx_mtp.load_model(target, draft_vocab=[1])
    other = SimpleNamespace(mtp=[SimpleNamespace()], unembedding=lambda depth: nn.QQLinear(32, 8))
    with pytest.raises(ValueError, match="an LM head of kind QQLinear; allowed are Linear, QuantizedLinear, Emb"):
        reduce_heads(other, [1])
