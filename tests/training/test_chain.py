"""The chain of drafts in training equals the chain in decoding, row by row."""

from types import MethodType

import families
import mlx.core as mx
import numpy as np
import pytest
from drafters import HEADLESS
from sweep import sampled

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.training import heads
from mlx_mtp.training.chain import chain
from mlx_mtp.training.reading import read

DRAFTS, TOKENS = 3, 10


def demo(_folder):
    return mlx_mtp.load_model(demo_path(), kernels="off")


def family(name):
    def load(folder):
        return mlx_mtp.load_model(families.build(name, folder)[0], kernels="off")

    return load


def new(config):
    def load(folder):
        model = mlx_mtp.load_model(families.headless(folder, config)[0], kernels="off")
        workshop = heads.new(model, list(range(0, model.vocab_size, 2)), DRAFTS, None, mx.float32)
        keys = iter(mx.random.split(mx.random.key(1), 100))
        noisy = {
            "eh_proj": {"weight": mx.random.normal(workshop.trained.mtp[0].eh_proj.weight.shape, key=next(keys))}
        }
        workshop.trained.mtp[0].update(noisy)
        return model

    return load


def drafted(model, prompt: list[int]) -> list[tuple[list[int], list[np.ndarray]]]:
    """Decode, and return of every cycle the tokens known before it with its drafts, and the heads' output rows."""
    rows = []

    def spy(self, depth, output):
        best = type(self).draft_choice(self, depth, output)
        rows.append((np.array(output[0, 0]), self.mtp[depth].token(best).item()))
        return best

    model.draft_choice = MethodType(spy, model)
    options = {"max_tokens": TOKENS, "num_draft_tokens": DRAFTS, "adaptive": False, "compile_cycles": False}
    text = [*prompt, *(int(token) for token, *_ in mlx_mtp.generate_step(mx.array(prompt), model, **options))]
    found, known = [], len(prompt) + 1
    for first in range(0, len(rows) - DRAFTS + 1, DRAFTS):
        outputs, drafts = zip(*rows[first : first + DRAFTS], strict=True)
        if known + DRAFTS > len(text):
            break
        found.append(([*text[:known], *drafts], outputs))
        right = [draft == token for draft, token in zip(drafts, text[known:], strict=False)]
        known += 1 + (right.index(False) if False in right else DRAFTS)
    return found


CASES = {"demo": demo, "mimo": family("mimo"), "mimo_v2_flash": family("mimo_v2_flash")}
CASES |= {f"new {name}": new(config) for name, config in HEADLESS.items()}


FEW = "demo", "mimo", "mimo_v2_flash", "new llama_sliding", "new qwen3_moe", "new gemma3_text"


@pytest.mark.parametrize("case", sampled(FEW, CASES))
def test_training_computes_the_rows_of_decoding(case, tmp_path):
    model = CASES[case](tmp_path)
    cycles = drafted(model, [3, 1, 4, 1, 2, 0, 3])
    assert len(cycles) > 2
    for text, outputs in cycles:
        hidden, _ = read(model, text)
        rows = model.capture(hidden[None, :-1])
        starts = mx.zeros(rows.shape[:2], mx.int32)
        computed = chain(model, rows, mx.array([text[1:]]), starts, DRAFTS)
        for depth, row in enumerate(outputs):
            place = len(text) - DRAFTS - 2 + depth
            np.testing.assert_allclose(np.array(computed[depth][0, place]), row, rtol=1e-4, atol=1e-4)
