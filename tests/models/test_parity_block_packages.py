"""Compare block drafters with z-lab's own MLX classes, where the package `dflash` is installed."""

import block_drafters
import drafters
import families
import mlx.core as mx
import numpy as np
import pytest
from eagle_scratch import streams

import mlx_mtp
from mlx_mtp.decoding.drafters.block_choice import BlockChoice
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.sampling import Picker

zlab = pytest.importorskip("dflash.model_mlx", reason="parity with z-lab's classes needs the package dflash")
ROUNDS = [5, 9, 3, 6, 4, 16, 2]  # not 1: the package's rotating cache then gives rows out of order


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_rows_and_drafts_of_every_cycle(tmp_path, monkeypatch, kind):
    directory, plain = families.headless(tmp_path / "target", drafters.HEADLESS["qwen3"])
    config = {**block_drafters.KINDS[kind], "num_target_layers": 5}
    path = block_drafters.save(tmp_path / "drafter", config)
    monkeypatch.setattr(zlab, "snapshot_download", lambda *_, **__: str(path))
    theirs, model = zlab.load_draft("any").bind(plain), mlx_mtp.load_model(directory, draft_model=path)
    text = np.random.default_rng(0).integers(0, families.V, 60).tolist()
    context, caches = streams(plain, text, [1, 2])[None], theirs.make_cache()
    net, own, position = model.drafter.net, mlx_mtp.make_prompt_cache(model).heads, 0
    for verified in ROUNDS:
        end = position + verified
        block, new = mx.array([[text[end], *[5] * 7]]), context[:, position:end]
        expected = theirs.hidden_states(block, new, caches, 1)
        for kv in own:
            kv.seek(mx.array([position]), position)
        net.append(net.fused(new), own)
        rows = net(model.embedded(block), own)[:, 1:]
        np.testing.assert_allclose(np.array(rows), np.array(expected), atol=1e-4, rtol=0)
        logits = theirs.compute_logits(expected)
        tokens = mx.argmax(logits, axis=-1)
        if kind == "dflash2":
            tokens = theirs.candidate_selector.select(expected, logits, block[:, 0], 0.0)[0]
        choose = BlockChoice(model, net, [Single(Picker())], block[:, :1], mx.array([end + 1]), confidence=False)
        assert choose(rows).tokens.tolist() == tokens.tolist()
        position = end
