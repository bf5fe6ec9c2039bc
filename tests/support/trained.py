"""Train the heads of tiny checkpoints, so that wrong wiring or storage lowers their agreement.

The next token is a fixed function of the last two; one in eight is random, so that all pairs occur. The heads'
attention is kept near zero, so that their only information is the hidden state. Training takes
half a minute a family, so fixtures/trained contains the result; `python tests/support/trained.py` renews it.
"""

import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import tiny
from families import FAMILIES, random_weights
from mlx.utils import tree_unflatten

import mlx_mtp
from mlx_mtp.cache.kinds import make_caches
from mlx_mtp.cache.make_cache import make_prompt_cache

KINDS = 8  # tokens that occur
TABLE = np.random.default_rng(1).integers(0, KINDS, (KINDS, KINDS))
LENGTH = 192
STEPS = 350
NAMES = ("step3p5", "mimo", "mimo_v2_flash")
FIXTURES = Path(__file__).parent / "fixtures" / "trained"


def text(seed: int, length: int = LENGTH) -> list[int]:
    rng, tokens = np.random.default_rng(seed), [0, 1]
    while len(tokens) < length:
        usual = int(TABLE[tokens[-2], tokens[-1]])
        tokens.append(int(rng.integers(KINDS)) if rng.random() < 0.125 else usual)
    return tokens


def outputs(model, tokens: mx.array, hidden: mx.array):
    """Yield (depth, logits of all rows) of every draft, and of a recycled head's second one."""
    rows = model.capture(hidden)
    recycled = model.spec.topology == "recycle"
    for j in range(2 if recycled else len(model.mtp)):
        depth = 0 if recycled else j
        head = model.mtp[depth]
        (cache,) = make_caches([head.window], starts=[0])
        fed = rows[:, : tokens.size - 1 - j]
        output = head(model.embed(tokens[None, 1 + j :], depth), fed, cache)
        yield j, model.draft_logits(depth, output)[0]
        rows = head.feedback(output, fed)


def loss(model, parameters, tokens: mx.array) -> mx.array:
    model.update(tree_unflatten(list(parameters.items())))
    pairs = mx.array(TABLE)[tokens[:-1], tokens[1:]]  # the successors of tokens i and i + 1
    hidden = model.hidden(tokens[None], make_prompt_cache(model, num_draft_tokens=0).layers)
    total = cross_entropy(model.logits(hidden)[0, 1:], pairs)
    for j, logits in outputs(model, tokens, hidden):
        total = total + cross_entropy(logits, pairs[j:])
    return total


def cross_entropy(logits: mx.array, labels: mx.array) -> mx.array:
    return (mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]).mean()


def train(model, weights: dict[str, mx.array], zero_centred: bool, steps: int) -> dict[str, mx.array]:
    """Return the checkpoint's tensors after `steps` of one sequence each."""
    layers = model.args.num_hidden_layers
    fixed = [n for n in weights if (place := model.spec.locate(n, layers)) and place[1].endswith("o_proj.weight")]

    def objective(weights, tokens):
        kinds = {True: {}, False: {}}
        for name, w in weights.items():
            kinds[model.spec.locate(name, layers) is not None][name] = w
        parameters = model.sanitized(kinds[False], kinds[True], shift_trunk=zero_centred, shift_heads=zero_centred)
        return loss(model, parameters, tokens)

    weights = {n: w * (1e-3 if n in fixed else 1.0) for n, w in weights.items()}
    kept = {n: weights[n] for n in fixed}
    optimizer = optim.Adam(learning_rate=optim.cosine_decay(1e-2, steps))
    step = mx.value_and_grad(objective)
    for i in range(steps):
        _, gradients = step(weights, mx.array(text(i)))
        weights = optimizer.apply_gradients(gradients, weights) | kept
        mx.eval(weights, optimizer.state)
    return weights


def untrained(name: str) -> tuple[dict, dict[str, mx.array], bool]:
    """Return (config.json, random tensors by their hub names, whether norms are stored zero-centred)."""
    if name == "step3p5":
        config, centred = {**tiny.CONFIG, "vocab_size": KINDS + 1}, True
        weights = tiny.random_weights(config)
    else:
        family = FAMILIES[name]
        config, centred = family.config, family.zero_centred
        weights = random_weights(family.trunk(config) | family.heads(config), 0, zero_centred=centred)
    # Norms with a large spread, so that the input and the output of one differ.
    rng = np.random.default_rng(2)
    for n, w in weights.items():
        if n.endswith("norm.weight") and w.size == config["hidden_size"]:
            weights[n] = mx.array(rng.uniform(0.4, 1.6, w.shape).astype(np.float32) - centred)
    return config, weights, centred


def checkpoint(name: str) -> tuple[dict, dict[str, mx.array]]:
    """Return (config.json, the trained tensors by their hub names)."""
    stored: dict = mx.load(str(FIXTURES / f"{name}.safetensors"))  # type: ignore[assignment]
    return untrained(name)[0], {n: w.astype(mx.float32) for n, w in stored.items()}


def main() -> None:
    for name in NAMES:
        config, weights, centred = untrained(name)
        with tempfile.TemporaryDirectory() as directory:
            model = mlx_mtp.load_model(tiny.save(Path(directory), config, weights))
        weights = train(model, weights, centred, STEPS)
        mx.save_safetensors(
            str(FIXTURES / f"{name}.safetensors"), {n: w.astype(mx.float16) for n, w in weights.items()}
        )


if __name__ == "__main__":
    main()
