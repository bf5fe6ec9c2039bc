"""Set every field of the spec to every value on each kind of heads: drafts change, tokens do not."""

import warnings

import families
import pytest
import tiny
from sweep import SWEEP, sampled

import mlx_mtp

VALUES = [
    *({"topology": value} for value in ("chain", "target_each", "recycle")),
    *({"capture": value} for value in ("pre", "post")),
    *({"feedback": value} for value in ("pre", "post")),
    *({"fuse": value} for value in ("eh", "he")),
    *({"head": value} for value in ("shared", "shared_or_own")),
]
PROMPT = [1, 2, 3, 4, 1]
N = 18 if SWEEP else 9


def ours(model, k, n=N):
    return [
        token
        for token, _, _ in mlx_mtp.generate_step(PROMPT, model, max_tokens=n, num_draft_tokens=k, adaptive=False)
    ]


@pytest.mark.parametrize(
    "name", sampled(["mimo_v2_flash"], ["glm4_moe", "deepseek_v3", "qwen3_5", "mimo", "mimo_v2_flash"])
)
def test_tokens_do_not_change(tmp_path, name):
    path, _, plain = families.build(name, tmp_path)
    tried = {}
    for overrides in VALUES:
        model = mlx_mtp.load_model(path, mtp_overrides=overrides)
        (field, value), *_ = overrides.items()
        assert getattr(model.spec, field) == value or value == "shared_or_own"
        if model.spec not in tried:  # half of the values are the family's defaults
            tried[model.spec] = ours(model, min(4, model.max_draft_tokens))
    assert len(tried) > 3
    texts = list(tried.values())
    assert texts == [tiny.greedy(plain, PROMPT, N, texts[0])] * len(texts)


@pytest.mark.parametrize("name", ["mimo_v2_flash", "step3p5"])
def test_recycling_several_heads_uses_the_first(tmp_path, name):
    if name == "step3p5":
        weights = tiny.random_weights(tiny.CONFIG)
        path, plain = (
            tiny.save(tmp_path, tiny.CONFIG, weights),
            tiny.plain_model(tiny.CONFIG, tiny.random_weights(tiny.CONFIG, heads=0)),
        )
    else:
        path, weights, plain = families.build(name, tmp_path)
    model = mlx_mtp.load_model(path, mtp_overrides={"topology": "recycle"})
    assert (len(model.mtp), model.max_draft_tokens) == (1, 15)
    assert "more" in str(model.report)  # the report names the other heads' tensors as unused
    texts = [ours(model, k) for k in (1, 15)]
    assert texts == [tiny.greedy(plain, PROMPT, N, texts[0])] * 2
    with pytest.raises(ValueError, match="num_draft_tokens=16: allowed is 0 to 15"):
        ours(model, 16)


def test_an_own_lm_head_in_a_family_without_one_is_refused(tmp_path):
    path, _, _ = families.build("qwen3_5", tmp_path / "qwen")
    with pytest.raises(ValueError, match=r"head='own'; this family's heads have no own LM head; use 'shared'$"):
        mlx_mtp.load_model(path, mtp_overrides={"head": "own"})
    path, _, _ = families.build("glm4_moe_untied", tmp_path / "glm")
    with pytest.raises(ValueError, match=r"tensor model\.layers\.2\.shared_head\.head\.weight is missing"):
        mlx_mtp.load_model(path, mtp_overrides={"head": "own"})


def test_options_that_contradict(tmp_path):
    path, _, _ = families.build("mimo", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"mtp_overrides": {"fuse": "eh"}}, {"mtp_path": "x"}):
            with pytest.raises(ValueError, match=f"{next(iter(options))}=.*: not together with mtp=False"):
                mlx_mtp.load_model(path, mtp=False, **options)
    model = mlx_mtp.load_model(path)
    for k in (1.0, True, "2"):
        with pytest.raises(ValueError, match=f"^num_draft_tokens={k!r}: allowed is 0 to the drafter.s maximum"):
            ours(model, k)
    for size in (0, 16, 48):
        with pytest.raises(ValueError, match=f"kv_group_size={size}: allowed is 32, 64, 128 or None"):
            mlx_mtp.make_prompt_cache(model, kv_bits=8, kv_group_size=size)
