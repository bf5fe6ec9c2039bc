"""Every model type of mlx-lm has mlx-lm's greedy text, with drafts if its row of docs/model_types.md has any."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
import type_runs as runs
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from model_types import NOT_RUN, model_types, save, tiny_config
from plans import Listed
from sweep import SWEEP, sampled, sweep
from tree_drafts import TreeDrafts, drafted_by

from bench import supported_types as table
from mlx_mtp.models import port_names
from mlx_mtp.tuning.plan import Plan

PAGE = table.PAGE.read_text()
ROWS = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
TYPES = [name for name in model_types() if name not in NOT_RUN]
DRAFTING = [name for name in TYPES if "| plain |" not in ROWS.get(name, "")]
FIRST, _, LONGEST = runs.PROMPTS
SHORT, LONG = 7, 40  # tokens: prompt and text exceed the window of 8


def alone(model: Any, truth: Callable, file: Path) -> None:
    text = truth(FIRST)
    assert runs.with_wrong(model, FIRST + text, FIRST, SHORT, 3, 0) == text


def copied(model: Any, truth: Callable, file: Path) -> None:
    assert runs.with_lookup(model, LONGEST, SHORT) == truth(LONGEST)


def batched(model: Any, truth: Callable, file: Path) -> None:
    texts = [truth(prompt) for prompt in runs.PROMPTS]
    assert runs.together(model, runs.PROMPTS, texts, 3, 0) == texts


def resumed(model: Any, truth: Callable, file: Path) -> None:
    text = truth(FIRST)
    assert runs.resumed(model, file, FIRST, text, 3, 3) == text


def branched(model: Any, truth: Callable, file: Path) -> None:
    """Trees, which every made port without states verifies."""
    assert (getattr(model, "form", None) is None or not model.form.no_trees) == ("no trees" not in model.report.port)
    if "no trees" in model.report.port:
        return
    text, plans = truth(LONGEST), Listed([Plan(k=7, tree=True), Plan(k=3, tree=True), Plan(k=2), Plan()])
    drafter = TreeDrafts().grow(model, [LONGEST + text], right=0.8)
    with drafted_by(model, drafter, plans):
        assert runs.drafted(model, LONGEST, SHORT, num_draft_tokens=15) == text
    assert drafter.drafted


WAYS = (alone, copied, batched, resumed, branched)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_has_mlx_lms_text_and_its_row_of_the_table(model_type, tmp_path):
    """A default run has one way of drafting for each type."""
    model, plain = runs.loaded(save(tmp_path / "model", tiny_config(model_type)))
    assert ROWS[model_type] == table.row(model_type, model.report.port)

    def truth(prompt: list[int]) -> list[int]:
        return runs.plain_text(plain, prompt, SHORT)

    if "| plain |" in ROWS[model_type]:
        assert runs.drafted(model, FIRST, SHORT) == truth(FIRST)
        return
    if "| made: streams |" in ROWS[model_type]:
        expected = mx.concatenate(runs.plain_streams(plain, mx.array([FIRST])), axis=-1)
        found = runs.streams(model, mx.array([FIRST]), len(model.layers))
        assert mx.allclose(found[..., -expected.shape[-1] :], expected, rtol=1e-4, atol=1e-4)
    for way in WAYS if SWEEP else [WAYS[TYPES.index(model_type) % len(WAYS)]]:
        way(model, truth, tmp_path / "cache.safetensors")


@pytest.mark.parametrize("model_type", ["mistral3", "smollm3"])
def test_a_window_that_only_a_mask_has_keeps_the_text(model_type, tmp_path):
    """Types without rotating caches; released checkpoints of these have no window."""
    config = tiny_config(model_type)
    config.get("text_config", config)["layer_types"] = ["sliding_attention", "full_attention"]
    model, plain = runs.loaded(save(tmp_path / "model", config))
    for prompt in (FIRST, LONGEST):
        assert runs.drafted(model, prompt, SHORT) == runs.plain_text(plain, prompt, SHORT)


@sweep
@pytest.mark.parametrize("model_type", sampled(DRAFTING[:1], DRAFTING))
@pytest.mark.parametrize("seed", range(2))
def test_rejections_of_every_length(model_type, seed, tmp_path):
    """Long texts, one to fifteen drafts, every prompt alone and together, caches saved at several lengths."""
    model, plain = runs.loaded(save(tmp_path / "model", tiny_config(model_type), seed))
    texts = [runs.plain_text(plain, prompt, LONG) for prompt in runs.PROMPTS]
    for k, (prompt, text) in itertools.product((1, 2, 4, 7, 15), zip(runs.PROMPTS, texts, strict=True)):
        drafter = runs.Wrong([prompt + text], model.vocab_size, k, seed)
        assert runs.with_drafter(model, drafter, prompt, LONG) == text, k
        assert k > 4 or drafter.accepted == set(range(k + 1))
    for prompt, text in zip(runs.PROMPTS, texts, strict=True):
        assert runs.with_lookup(model, prompt, LONG) == text
        for at in (1, 5, 13, 30):
            assert runs.resumed(model, tmp_path / "cache.safetensors", prompt, text, at, 4) == text, at
    for k in () if "no batches" in ROWS[model_type] else (1, 3, 7):
        assert runs.together(model, runs.PROMPTS, texts, k, seed) == texts, k
    if model.NO_KV_BITS is None:
        bits = {"kv_bits": 8, "kv_group_size": 32}
        for prompt in runs.PROMPTS:
            text = runs.drafted(model, prompt, LONG, num_draft_tokens=0, **bits)
            assert runs.with_wrong(model, prompt + text, prompt, LONG, 4, seed, **bits) == text


@sweep
@pytest.mark.parametrize("model_type", sampled(DRAFTING[:1], DRAFTING))
def test_a_small_model_drafts(model_type, tmp_path):
    """A llama, and unless it has states, which drafters cannot have, the model itself: all drafts are accepted."""
    path, other = save(tmp_path / "model", tiny_config(model_type)), save(tmp_path / "other", tiny_config("llama"))
    states = {ArraysCache, CacheList} & {type(cache) for cache in make_prompt_cache(runs.loaded(path)[1])}
    for small in (other, *(() if states else (path,))):
        model, plain = runs.loaded(path, draft_model=small)
        for prompt in runs.PROMPTS:
            assert runs.drafted(model, prompt, LONG, num_draft_tokens=3) == runs.plain_text(plain, prompt, LONG)


def test_a_type_whose_module_ends_the_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model_type 'olmo'"):
        runs.loaded(tiny.save(tmp_path / "model", {"model_type": "olmo"}, {"weight": mx.zeros(1)}))


def test_the_table_has_every_type_once_and_counts_them():
    rows = list(ROWS.values())
    assert list(ROWS) == model_types()
    assert table.page(PAGE, rows) == PAGE
    written = {name for name, line in ROWS.items() if "| written |" in line}
    assert {name for name in port_names() if name in ROWS} <= written
