"""Load a small model as drafter: recognise it, compare its tokens, and refuse others in one line."""

import json

import drafters
import families
import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.small_model import first_difference
from mlx_mtp.decoding.drafters.small_model import SmallModel

TOKENS = [f"w{i}" for i in range(families.V)]


def written(path, tokens=None, name="qwen3", seed=0, **changes):
    """A checkpoint directory, with a tokenizer of these tokens."""
    families.headless(path, {**drafters.HEADLESS[name], **changes}, seed)
    if tokens is not None:
        vocab = {token: i for i, token in enumerate(tokens) if token is not None}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]}
        whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
        (path / "tokenizer.json").write_text(json.dumps(whole))
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return written(tmp_path_factory.mktemp("target"), TOKENS)


def refused(match, *args, load=mlx_mtp.load, **options):
    with pytest.raises(ValueError, match=match) as error:
        load(*args, **options)
    assert "\n" not in str(error.value)


def test_its_weights_and_caches_are_the_models(tmp_path, target):
    small = written(tmp_path, TOKENS, "llama_sliding", 1)
    model, _ = mlx_mtp.load(target, draft_model=small)
    assert isinstance(model.drafter, SmallModel)
    assert model.max_draft_tokens == 15
    assert str(small) in str(model.report)
    assert model.head_windows() == [None, 8, 8, 8, 8]
    names = {name for name, _ in tree_flatten(model.parameters())}
    assert "drafter.model.layers.4.mlp.up_proj.weight" in names
    model.drafter = None
    assert model.max_draft_tokens == 0
    assert not any(name.startswith("drafter") for name, _ in tree_flatten(model.parameters()))


def test_lazy_weights_and_heads_of_either_are_left_out(tmp_path):
    target, small = (families.build(name, tmp_path / name)[0] for name in ("qwen3_5", "glm4_moe"))
    model = mlx_mtp.load_model(target, draft_model=small, lazy=True)
    assert model.mtp == model.drafter.small.mtp == []
    assert len(list(mlx_mtp.generate_step([1, 2], model, max_tokens=3, num_draft_tokens=2))) == 3


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (TOKENS, None),
        ([*TOKENS, "added"], None),
        (TOKENS[:-2], None),
        ([*TOKENS[:5], "other", *TOKENS[6:]], r"token 5 is 'other', the target's 'w5'"),
        ([*TOKENS[:5], None, *TOKENS[6:]], r"token 5 is None, the target's 'w5'"),
        ([TOKENS[1], TOKENS[0], *TOKENS[2:]], r"token 0 is 'w1', the target's 'w0'"),
    ],
)
def test_tokens_are_compared_one_by_one(tmp_path, target, own, found):
    small = written(tmp_path, own, vocab_size=families.V + 1)
    for load in (mlx_mtp.load, mlx_mtp.load_model):
        if found:
            refused(rf"{tmp_path}: .*{found}", target, draft_model=small, load=load)
        else:
            load(target, draft_model=small)


def test_a_gap_is_no_end():
    assert first_difference(["a", None, "c"], ["a", "b", "c"]) == (1, (None, "b"))
    assert first_difference(["a", None], ["a", None, "c"]) is None


def test_without_a_tokenizer(tmp_path, target):
    small = written(tmp_path)
    mlx_mtp.load_model(target, draft_model=small)  # nothing can be compared
    refused(f"{tmp_path}: no usable tokenizer", target, draft_model=small)


def test_options_of_heads(tmp_path, target):
    small = written(tmp_path, TOKENS)
    refused(
        "mtp_overrides=.*: not together with a small model", target, draft_model=small, mtp_overrides={"fuse": "he"}
    )
    refused("not together with mtp=False", target, draft_model=small, mtp=False)
    refused("no heads that draft", target, draft_model=small, draft_vocab=[1, 2, 3], load=mlx_mtp.load_model)
    model, _ = mlx_mtp.load(target, draft_model=small)
    refused("kv_group_size=64", model, mtp_kv_bits=4, kv_group_size=64, load=mlx_mtp.make_prompt_cache)
    latent = families.build("deepseek_v3", tmp_path / "latent")[0]
    model = mlx_mtp.load_model(target, draft_model=latent)
    refused("mtp_kv_bits=4: not with multi-head latent", model, mtp_kv_bits=4, load=mlx_mtp.make_prompt_cache)


def test_damaged_directories(tmp_path, target):
    weights = mx.load(str(written(tmp_path / "whole") / "model.safetensors"))
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    name = "model.layers.2.self_attn.q_proj.weight"
    cases = [
        ({n: w for n, w in weights.items() if n != name}, f"tensor {name} is missing"),
        ({**weights, name: mx.full(weights[name].shape, float("nan"))}, f"tensor {name} holds NaN"),
        ({**weights, name: mx.zeros((3, 3))}, rf"tensor {name} has shape \(3, 3\)"),
        ({**weights, "model.layers.1.mlp.extra.weight": mx.zeros(3)}, "is not part of the model"),
    ]
    for i, (tensors, match) in enumerate(cases):
        path = tiny.save(tmp_path / str(i), config, tensors)
        refused(match, target, draft_model=path, load=mlx_mtp.load_model)
    foreign = tiny.save(tmp_path / "foreign", {**config, "model_type": "phi99"}, weights)
    refused("a model of 5 layers, model_type 'phi99'", target, draft_model=foreign, load=mlx_mtp.load_model)


def test_a_cache_of_another_small_model_is_refused(tmp_path, target):
    models = [mlx_mtp.load_model(target, draft_model=written(tmp_path / str(seed), seed=seed)) for seed in (1, 2)]
    cache = mlx_mtp.make_prompt_cache(models[0])
    list(mlx_mtp.generate_step([1, 2, 3], models[0], max_tokens=4, num_draft_tokens=2, prompt_cache=cache))
    mlx_mtp.save_prompt_cache(tmp_path / "cache", cache)
    mlx_mtp.load_prompt_cache(tmp_path / "cache", models[0])
    refused("made with other MTP heads", tmp_path / "cache", models[1], load=mlx_mtp.load_prompt_cache)
