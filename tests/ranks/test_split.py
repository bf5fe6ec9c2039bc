"""Check that a target split over ranks decodes exactly, each rank's share, and which models cannot be split."""

import importlib
import json
import re
from pathlib import Path

import block_drafters
import families
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import packed_kinds
import pytest
import rank_cases
import rank_group
import rank_worker
import seeing
import tiny
import type_runs as runs
from mlx.nn.layers import distributed
from mlx.utils import tree_map
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models import llama
from model_types import save, tiny_config
from picture_requests import noise
from sweep import SWEEP, paired, sampled, sweep

import mlx_mtp
from mlx_mtp.checkpoint.inspect import inspect_checkpoint
from mlx_mtp.layers.scaled import SCALE, SCALED, ScaledLinear
from mlx_mtp.ranks import split

SPLIT = (2, 3, 4)
TOKENS = 12  # of each text of a made port
ENDS = "its attention or MLP returns other values if summed at its end"
MADE = {  # types without a port that mlx-lm splits: None, or the reason for which they are not
    **dict.fromkeys(("gpt_oss", "minimax", "ministral3"), None),
    "kimi_k3": ENDS,
}
DIVISIBLE = {"minimax": {"num_attention_heads": 8, "num_key_value_heads": 4}, "deepseek_v41": {"o_groups": 4}}
MORE = {
    **dict.fromkeys(("deepseek_v2", "exaone_moe", "minimax_m3_vl", "mistral4"), None),
    **dict.fromkeys(("deepseek_v41", "iquestloopcoder", "longcat_flash", "longcat_flash_ngram"), ENDS),
}
WHOLE = r"norm\.|mlp\.gate\.|shared_expert_gate|indexer\.|_a_proj"  # tensors that are not split


class Group:
    """A group without processes, of which this one has index `rank`."""

    def __init__(self, size: int, rank: int = 0):
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


@pytest.fixture(scope="module")
def both_of_two(tmp_path_factory):
    """Run functions in the same two processes, whose start costs most; return each one's path and results."""
    folder = tmp_path_factory.mktemp("two")
    paths = rank_cases.write(folder, "step3p5"), str(seeing.build(folder / "seeing")[0])
    files = [folder / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        file.write_bytes(noise(seed))
    names = [str(file) for file in files]
    options = {"path": paths[0], "few": not SWEEP}, {"path": paths[1], "k": 2, "files": names}
    made = [str(save(folder / name, tiny_config(name))) for name in MADE]
    calls = ("of_types", {"paths": made, "length": TOKENS}), ("branched", {"path": paths[0]})
    found = rank_group.work_all(2, folder, ("texts", options[0]), ("pictured", options[1]), *calls)
    texts, pictured, types, branched = zip(*found, strict=True)
    return (paths[0], texts), (paths[1], pictured, names), (made, types), branched


def check(n: int, folder, path: str, whole: str, atol: float | None = 1e-4, found=None) -> None:
    """Compare all ways to decode on n ranks. whole: pattern of the weights that are not split; others are shared.

    found: results of the ranks; None runs them.
    """
    mine, *others = found or rank_group.work(n, folder, "texts", path=path, few=not SWEEP)
    assert all(rank == mine for rank in others)
    for kind, text in mine["texts"].items():
        assert text == mine["texts"]["seeded" if kind.startswith("seeded") else "plain"], kind
    assert mine["rows apart"] == 0
    truth = rank_worker.texts(path, None, few=True)
    assert atol is None or np.allclose(mine["logits"], truth["logits"], atol=atol)
    for name, size in mine["bytes"].items():
        assert size * (1 if re.search(whole, name) else n) == truth["bytes"][name], name


def test_texts_and_rows_do_not_depend_on_drafts_and_ranks_agree(both_of_two, tmp_path):
    path, found = both_of_two[0]
    check(2, tmp_path, path, WHOLE, found=found)


def test_trees_have_the_text_of_plain_decoding_on_both_ranks(both_of_two):
    """Only rank 0 plans; both draft the same trees, in cycles that are built or recorded."""
    mine, other = both_of_two[3]
    assert mine["texts"] == other["texts"]
    assert mine["trees"] > 1
    for kind, text in mine["texts"].items():
        assert text == mine["texts"][kind.split()[0]], kind


def test_two_ranks_read_the_features_of_rank_0(both_of_two):
    """Rank 0 alone opens and encodes pictures; texts on two ranks are those of one process, with and without drafts.

    Pictures are given to the decoder, to Python's functions and in requests to the server. There another answer
    advances while a picture is prepared, and a preparation that fails or is cancelled ends only its own request.
    """
    path, (mine, other), names = both_of_two[1]
    alone = rank_worker.pictured(path, None, 0, names)
    assert mine["text"] == other["text"] == alone["text"]
    assert "Picture" in mine["error"]
    assert mine["error"] == other["error"]
    assert mine["answers"] == alone["answers"]
    assert other["answers"] == alone["answers"][:1]
    *texts, (failures, cancelled), (advanced, _) = mine["answers"]
    assert len(set(texts)) == 3
    assert texts[3] == texts[1]
    assert failures == [[500, "RuntimeError: lost"], [400, "damaged"]]
    assert cancelled
    assert advanced == [True]


def check_types(types: dict[str, str | None], paths: list[str], found, n: int) -> None:
    """Compare texts of made ports on n ranks with mlx-lm's own. found: results of `rank_worker.of_types`."""
    mine, *others = found
    assert all(rank == mine for rank in others)
    for path, (name, why), result in zip(paths, types.items(), mine, strict=True):
        if why:
            assert result == f"ranks={n}: model_type {name!r} cannot be split: {why}; allowed is 1"
            continue
        plain, _ = mlx_lm_utils.load_model(Path(path))
        truth = [runs.plain_text(plain, prompt, TOKENS) for prompt in runs.PROMPTS]
        assert result in ([*truth, truth[0]], truth), name
        assert (len(result) > len(truth)) == (name != "minimax_m3_vl"), name


def test_made_ports_on_two_ranks_have_mlx_lms_text(both_of_two):
    """With experts, with norms across all heads, and dense; and one whose sum is not its MLP's last step."""
    check_types(MADE, *both_of_two[2], 2)


@sweep
@pytest.mark.parametrize("n", [2, 4])
def test_every_made_port_on_several_ranks(tmp_path, n):
    paths = [str(save(tmp_path / name, tiny_config(name) | DIVISIBLE.get(name, {}))) for name in MADE | MORE]
    check_types(MADE | MORE, paths, rank_group.work(n, tmp_path, "of_types", paths=paths, length=TOKENS), n)


@sweep
@pytest.mark.parametrize("n", SPLIT)
@pytest.mark.parametrize("name", rank_cases.FAMILIES)
def test_every_family_on_every_number_of_ranks(tmp_path, name, n):
    whole = WHOLE + (r"|[kv]_proj" if name == "qwen2" else "")  # its single key-value head is repeated
    check(n, tmp_path, rank_cases.write(tmp_path, name), whole)


@sweep
def test_a_block_drafter_is_whole_on_each_rank(tmp_path):
    target = rank_cases.write(tmp_path, "qwen3")
    drafter = str(block_drafters.save(tmp_path / "drafter", block_drafters.DFLASH2))
    mine, other = rank_group.work(2, tmp_path, "blocks", path=target, drafter=drafter)
    whole = rank_worker.blocks(target, None, drafter)
    assert mine == other
    assert mine["bytes"] == whole["bytes"]
    for texts in mine["texts"]:
        assert all(text == texts[0] for text in texts)


@sweep
def test_heads_and_a_block_drafter_are_whole_on_each_rank(tmp_path):
    target = rank_cases.write(tmp_path, "step3p5")
    model = mlx_mtp.load_model(target, mtp=False)
    width, vocab = model.no_hidden().shape[-1], model.vocab_size
    drafter = str(block_drafters.save_for(tmp_path / "drafter", "dflash2", width, vocab))
    mine, other = rank_group.work(2, tmp_path, "heads_and_blocks", path=target, drafter=drafter)
    assert mine == other
    assert mine["text"] == mine["plain"]
    assert mine["drafted"].keys() == {"heads", "block"}


@sweep
@pytest.mark.parametrize(("n", "dtype", "atol"), [
    *((n, mx.float32, 1e-4) for n in (2, 4)),
    (2, mx.bfloat16, None),  # with one rank near-ties choose other experts
])  # fmt: skip
def test_quantized_weights_are_split(tmp_path, n, dtype, atol):
    check(n, tmp_path, rank_cases.write_quantized(tmp_path / "model", dtype), WHOLE, atol)


@pytest.mark.parametrize(("kv_heads", "bits"), paired([12, 1], [None, 4]))
def test_parts_of_biased_linears_sum_to_the_whole(bits, kv_heads):
    """Each bias of a summed output is added once, and one key-value head is repeated on all ranks."""
    sizes = {"hidden_size": 96, "intermediate_size": 384, "head_dim": 32, "num_key_value_heads": kv_heads}
    config = {**rank_cases.HEADLESS["llama"], **sizes, "attention_bias": True, "mlp_bias": True}

    def modules(group):
        mx.random.seed(0)
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.update(tree_map(lambda w: mx.random.normal(w.shape, scale=0.2), model.parameters()))
        if bits:
            nn.quantize(model, group_size=32, bits=bits)
        whole = [module for layer in model.layers for module in (layer.self_attn, layer.mlp)]
        return whole if group is None else split.take_part(model, group, "llama")

    x = mx.random.normal((1, 3, sizes["hidden_size"]), key=mx.random.key(1))
    expected = [np.array(module(x)) for module in modules(None)]
    for n in sampled(SPLIT[1:], SPLIT):
        parts = [[np.array(module(x)) for module in modules(Group(n, rank))] for rank in range(n)]
        for whole, found in zip(expected, map(sum, zip(*parts, strict=True)), strict=True):
            assert np.allclose(found, whole, atol=1e-3 * np.abs(whole).max()), n


def scaled(model, *, by_row: bool) -> None:
    """Quantize a model's linears to nvfp4 and give each an output scale: one per row, or one per matrix."""
    nn.quantize(model, 16, 4, mode="nvfp4", class_predicate=lambda path, m: "_proj" in path)
    for _, module in model.named_modules():
        if "scales" in module:
            shape = module.scales.shape[:-1] if by_row else module.scales.shape[:-2] or (1,)
            module.__class__ = SCALED[type(module)]
            module[SCALE] = mx.random.uniform(0.5, 2, shape)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_output_scales_are_split_with_their_rows(name, by_row):
    """Of biased linears, of repeated key-value heads, and of experts: the parts' sum is the whole layer's output."""
    config = {**rank_cases.HEADLESS[name], "hidden_size": 96, "intermediate_size": 192, "head_dim": 16}
    config |= {"moe_intermediate_size": 192, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
    port = importlib.import_module(f"mlx_lm.models.{name}")

    def modules(group):
        mx.random.seed(0)
        model = port.Model(port.ModelArgs.from_dict(config))
        model.update(tree_map(lambda w: mx.random.normal(w.shape, scale=0.2), model.parameters()))
        scaled(model, by_row=by_row)
        whole = [module for layer in model.layers[:1] for module in (layer.self_attn, layer.mlp)]
        return whole if group is None else split.take_part(model, group, name)[:2]

    x = mx.random.normal((1, 3, 96), key=mx.random.key(1))
    expected = [np.array(module(x)) for module in modules(None)]
    for n in sampled([2], SPLIT):
        shares = [modules(Group(n, rank)) for rank in range(n)]
        parts = [[np.array(module(x)) for module in share] for share in shares]
        for whole, found in zip(expected, map(sum, zip(*parts, strict=True)), strict=True):
            assert np.allclose(found, whole, atol=1e-3 * np.abs(whole).max()), n
        kinds = {type(module) for module in shares[0][0].modules() if SCALE in module}
        assert kinds == {ScaledLinear}


@sweep
@pytest.mark.parametrize("name", ["modelopt", "mxfp8", "gptq asymmetric"])
def test_packed_weights_are_split(tmp_path, name):
    config = {**rank_cases.MOE, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
    kind = packed_kinds.KINDS[name]
    path, _ = packed_kinds.write(tmp_path, json.dumps(config), packed_kinds.linears(kind), kind.config)
    check(2, tmp_path, str(path), WHOLE + r"|output_scale")


@pytest.mark.parametrize(("name", "ranks", "message"), [
    ("mimo", 2, "ranks=2: mlx-lm has no way to split model_type 'mimo'; allowed is 1"),
    ("glm4_moe", 3, "ranks=3: model_type 'glm4_moe' has 4 heads in layer 0; allowed ranks are 1, 2, 4"),
    ("glm4_moe", 16, "ranks=16: model_type 'glm4_moe' has 4 heads in layer 0; allowed ranks are 1, 2, 4"),
])  # fmt: skip
def test_a_model_that_cannot_be_split_is_refused_by_name(tmp_path, monkeypatch, name, ranks, message):
    path, _, _ = families.build(name, tmp_path)
    monkeypatch.setattr("mlx_mtp.checkpoint.build.check_numbers", None)  # no weight may be read
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mlx_mtp.load_model(path, tensor_group=Group(ranks))


class Summed(nn.Linear):
    def __init__(self, linear, group):
        super().__init__(1, 1)
        self.weight, self.group = linear.weight, group


def split_head(model, group):
    model.lm_head = distributed.shard_linear(model.lm_head, "all-to-sharded", group=group)


def sum_in_layer(model, group):
    model.layers[1].sharding_group = group


def sum_in_own_class(model, group):
    model.layers[0].mlp.up_proj = Summed(model.layers[0].mlp.up_proj, group)


@pytest.mark.parametrize(("change", "path"), [
    (split_head, "lm_head"),
    (sum_in_layer, "model.layers.1"),
    (sum_in_own_class, "model.layers.0.mlp.up_proj"),
])  # fmt: skip
def test_a_model_that_is_split_in_other_places_is_refused(monkeypatch, change, path):
    model = llama.Model(
        llama.ModelArgs.from_dict({**rank_cases.HEADLESS["llama"], "tie_word_embeddings": False, "vocab_size": 12})
    )
    shard = model.shard
    monkeypatch.setattr(llama.Model, "shard", lambda self, group: (shard(group), change(self, group)))
    message = f"ranks=2: model_type 'llama' cannot be split: mlx-lm splits its {path}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        split.take_part(model, Group(2), "llama")


@pytest.mark.parametrize(("name", "ranks", "message"), [
    ("starcoder2", 2, "mlx-lm has no way to split model_type 'starcoder2'; allowed is 1"),
    ("minimax", 4, "model_type 'minimax' has 2 key value heads in layer 0; allowed ranks are 1, 2"),
    ("exaone_moe", 3, "model_type 'exaone_moe' has 4 heads in layer 0; allowed ranks are 1, 2, 4"),
    ("deepseek_v41", 4, "mlx-lm cannot split model_type 'deepseek_v41' (Tensor parallelism over 4 ranks needs 4"),
])  # fmt: skip
def test_inspect_and_load_refuse_a_made_port_by_name(tmp_path, name, ranks, message):
    path = save(tmp_path / "model", tiny_config(name))
    (problem,) = inspect_checkpoint(path, ranks=ranks).problems
    assert problem.startswith(f"ranks={ranks}: {message}")
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        mlx_mtp.load_model(path, tensor_group=Group(ranks))


def test_inspect_has_the_part_of_a_made_port(tmp_path):
    path = save(tmp_path / "model", tiny_config("minimax"))
    whole, half = inspect_checkpoint(path), inspect_checkpoint(path, ranks=2)
    assert not half.problems
    assert half.part < 0.7 * whole.target.loaded


def test_a_group_of_one_is_no_group(tmp_path):
    path = tiny.save(tmp_path, tiny.CONFIG, tiny.random_weights(tiny.CONFIG))
    assert mlx_mtp.load_model(path, tensor_group=Group(1)).ranks is None


def test_adapters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="adapter_path=a: not on 2 ranks"):
        mlx_mtp.load(tmp_path, adapter_path="a", tensor_group=Group(2))
