"""Train tiny block drafters for a tiny target, so that wrong wiring or storage lowers their agreement.

The texts are those of `trained`. fixtures/trained contains the results; `python tests/support/trained_block.py`
renews them, which takes some minutes.
"""

import sys
import tempfile
from pathlib import Path

import block_drafters
import drafters
import families
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import tiny
import trained
from mlx.utils import tree_flatten, tree_unflatten

import mlx_mtp
from mlx_mtp.cache.kinds import make_caches
from mlx_mtp.cache.make_cache import make_prompt_cache
from mlx_mtp.lossless.block import shared

BLOCK, MASK = 3, 11
TARGET = {**drafters.HEADLESS["qwen3"], "vocab_size": block_drafters.V, "num_hidden_layers": 4}
TAPS = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
KINDS = {
    "dflash": {**block_drafters.CONFIG, "block_size": BLOCK + 1, "dflash_config": TAPS},
    "dflash2": {
        **block_drafters.DFLASH2,
        "block_size": BLOCK + 1,
        "dflash_config": {**block_drafters.DFLASH2["dflash_config"], **TAPS},
    },
    "dspark": {**block_drafters.DSPARK, "block_size": BLOCK, "dflash_config": TAPS},
}
STEPS = {"target": 800, "dflash": 1000, "dflash2": 700, "dspark": 700}


def file(name: str) -> Path:
    return trained.FIXTURES / f"block_{name}.safetensors"


def stored(name: str) -> dict[str, mx.array]:
    tensors: dict = mx.load(str(file(name)))  # type: ignore[assignment]
    return {n: w.astype(mx.float32) for n, w in tensors.items()}


def keep(name: str, weights: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(file(name)), {n: w.astype(mx.float16) for n, w in weights.items()})


def save(path: Path, kind: str, *, weights=None, config=None) -> tuple[Path, Path]:
    """Write the target and a drafter's directory; return both. weights, config: replace the drafter's."""
    target = tiny.save(path / "target", TARGET, stored("target"))
    return target, tiny.save(path / kind, config or KINDS[kind], weights or stored(kind))


def spread_norms(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Give norms a large spread, so that the input and the output of one differ."""
    rng = np.random.default_rng(2)
    return {
        n: mx.array(rng.uniform(0.4, 1.6, w.shape).astype(np.float32)) if "norm" in n else w
        for n, w in weights.items()
    }


def growth(name: str) -> float:
    """The factor of a target's first weights: each layer adds three times as much, so that streams differ."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 3.0 ** int(name.split(".")[2])
    return 0.3 if "embed_tokens" in name else 1.0


def descend(weights, objective, steps: int, seed: int = 0) -> dict[str, mx.array]:
    optimizer = optim.Adam(learning_rate=optim.cosine_decay(1e-2, steps))
    step = mx.value_and_grad(objective)
    for i in range(steps):
        value, gradients = step(weights, mx.array(trained.text(seed + i)))
        weights = optimizer.apply_gradients(gradients, weights)
        mx.eval(weights, optimizer.state)
        if i % 100 == 99:
            sys.stderr.write(f"{i + 1}: {value.item():.3f}\n")
    return weights


def train_target() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path, _ = families.headless(Path(directory), TARGET)
        model = mlx_mtp.load_model(path)
    weights = {n: w * growth(n) for n, w in spread_norms(dict(tree_flatten(model.parameters()))).items()}

    def objective(weights, tokens):
        model.update(tree_unflatten(list(weights.items())))
        hidden = model.hidden(tokens[None], make_prompt_cache(model, num_draft_tokens=0).layers)
        pairs = mx.array(trained.TABLE)[tokens[:-1], tokens[1:]]
        return trained.cross_entropy(model.logits(hidden)[0, 1:], pairs)

    keep("target", descend(weights, objective, STEPS["target"]))


def logits_of(model, hidden: mx.array, tokens: mx.array, positions: mx.array, truth: mx.array) -> mx.array:
    """Return the logits [n, BLOCK, V] of blocks at positions [n]; truth [n, 1 + BLOCK]: the tokens from there on."""
    net = model.drafter.net
    contexts = make_caches([None] * len(net.layers), starts=[0] * len(net.layers))
    for kv in contexts:
        kv.reserve(tokens.size + 32)
    net.append(model.drafter.context(model, hidden), contexts)
    caches = [shared(kv.parts, positions, tokens.size) for kv in contexts]
    rows = model.drafter.rows(model, caches, truth[:, :1], BLOCK)
    logits = model.unembedding()(rows) * net.shape.scale
    logits = mx.tanh(logits / net.shape.softcap) * net.shape.softcap if net.shape.softcap else logits
    before = truth[:, :-1]
    if net.shape.markov:
        logits = logits + net.markov_head.markov_w2(net.markov_head.markov_w1(before))
    if net.shape.selector:
        selector = net.candidate_selector
        mixed = selector.predecessor_codebook[before] * selector.hidden_projection(rows)
        logits = logits + mixed @ selector.successor_codebook.T
    return logits


def train_drafter(kind: str) -> None:
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as directory:
        weights = {n: w * 0.5 for n, w in block_drafters.weights(KINDS[kind]).items()}
        target, drafter = save(Path(directory), kind, weights=spread_norms(weights))
        model = mlx_mtp.load_model(target, draft_model=drafter)
    net = model.drafter.net
    weights = dict(tree_flatten(net.parameters()))

    def objective(weights, tokens):
        net.update(tree_unflatten(list(weights.items())))
        hidden = mx.stop_gradient(model.hidden(tokens[None], make_prompt_cache(model, num_draft_tokens=0).layers))
        predicted = mx.argmax(model.logits(hidden)[0], axis=-1)
        positions = mx.array(np.sort(rng.choice(np.arange(2, tokens.size - BLOCK - 1), 24, replace=False)))
        truth = mx.stack([mx.take(tokens, positions + j) for j in range(BLOCK + 1)], axis=1).astype(mx.int32)
        labels = mx.stack([mx.take(predicted, positions + j) for j in range(BLOCK)], axis=1)
        logits = logits_of(model, hidden, tokens, positions, truth)
        return trained.cross_entropy(logits.flatten(0, 1), labels.flatten())

    found = descend(weights, objective, STEPS[kind], seed=5000)
    keep(kind, found)


if __name__ == "__main__":
    for name in sys.argv[1:] or STEPS:
        sys.stderr.write(f"{name}\n")
        train_target() if name == "target" else train_drafter(name)
