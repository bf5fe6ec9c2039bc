"""Prompts with pictures, random features instead of a tower's, and a model that recomputes every row of a text."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import seeing
from mlx_lm.models import qwen3_5, qwen3_5_moe
from shapes import H

import mlx_mtp
from mlx_mtp.pictures.rows import Picture

A, B, C = (Picture(bytes([i]), (1, h, w)) for i, (h, w) in enumerate([(2, 5), (3, 3), (5, 2)]))
TWIN = Picture(b"twin", A.grid)  # of A's size, so that only its words differ


class Vision:
    """Random features by picture instead of a tower's; `encoded` lists the pictures whose features were computed."""

    mark, fingerprint = seeing.PAD, "random"

    def __init__(self):
        self.known, self.encoded = {}, []

    def features(self, picture):
        if picture not in self.known:
            seed = int.from_bytes(picture.digest[:4])
            self.encoded.append(picture)
            self.known[picture] = mx.random.normal((picture.rows, H), key=mx.random.key(seed))
        return self.known[picture]

    def stages(self, picture):
        yield None
        yield self.features(picture)

    def stored(self, picture):
        return self.known.get(picture)


class Pictured(NamedTuple):
    """A tiny model with random features, and a reference of the same weights."""

    model: Any
    reference: "Reference"


@cache
def pictured(*, moe: bool = False) -> Pictured:
    with tempfile.TemporaryDirectory() as directory:
        path, weights = seeing.build(Path(directory), moe=moe)
        model = mlx_mtp.load_model(path)
        mx.eval(model.parameters(), weights)
    model.runtime.vision = Vision()
    return Pictured(model, Reference(weights, moe=moe))


def generated(model, parts, k=0, n=12, **options) -> list[int]:
    """Return the n tokens after a prompt."""
    pictures = [part for part in parts if isinstance(part, Picture)]
    options = {"max_tokens": n, "adaptive": False, "pictures": pictures, **options}
    return [token for token, *_ in mlx_mtp.generate_step(tokens_of(*parts), model, num_draft_tokens=k, **options)]


def tokens_of(*parts) -> list[int]:
    """Return the tokens of a prompt: lists of token ids, and pictures."""
    return [token for part in parts for token in (part.tokens if isinstance(part, Picture) else part)]


class Turned:
    """RoPE of rows at given positions on three axes, by cosines and sines of 64 bits."""

    def __init__(self, rope, sections):
        self.dims, self.base, self.sections, self.positions = rope.dims, rope.base, sections, []

    def __call__(self, x, offset=0):
        half = self.dims // 2
        axis = np.zeros(half, int)
        for number in (1, 2):
            axis[number : 3 * self.sections[number] : 3] = number
        positions = np.array(self.positions, float)[offset : offset + x.shape[2]]
        angles = positions[:, axis] * self.base ** (-np.arange(half) / half)
        cos, sin = (mx.array(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


class Reference:
    """Greedy texts after prompts of text and pictures, every row recomputed for each token."""

    def __init__(self, weights, *, moe=False):
        module, config = (qwen3_5_moe if moe else qwen3_5), seeing.config_of(moe=moe)
        self.model = module.Model(module.ModelArgs.from_dict(config))
        trunk = {name: w for name, w in weights.items() if "mtp." not in name}
        self.model.load_weights(list(self.model.sanitize(trunk).items()))
        self.text, self.turned = self.model.language_model.model, []
        for layer in self.text.layers:
            if not layer.is_linear:
                layer.self_attn.rope = Turned(layer.self_attn.rope, seeing.ROPE["mrope_section"])
                self.turned.append(layer.self_attn.rope)

    def logits(self, parts, answer=()) -> mx.array:
        """Return the logits [T, V] of all rows of a prompt and its answer."""
        rows, positions, place = [], [], 0
        for part in (*parts, list(answer)):
            if isinstance(part, Picture):
                rows.append(Vision().features(part))
                _, height, width = part.grid
                positions += [(place, place + y, place + x) for y in range(height) for x in range(width)]
                place += max(height, width)
            elif part:
                rows.append(self.text.embed_tokens(mx.array(part)))
                positions += [(p,) * 3 for p in range(place, place + len(part))]
                place += len(part)
        for rope in self.turned:
            rope.positions = positions
        x = mx.concatenate(rows)[None]
        return self.model.language_model.lm_head(self.text(None, input_embeddings=x))[0]

    def greedy(self, parts, n: int, expected: Sequence[int] = ()) -> list[int]:
        """Return the n greedy tokens after a prompt.

        expected: the tokens if they are known; one forward confirms that each is greedy after all those before it.
        """
        if len(expected) == n > 0:
            confirmed = mx.argmax(self.logits(parts, expected[:-1])[-n:], axis=-1).tolist()
            if confirmed == list(expected):
                return confirmed
        answer = []
        for _ in range(n):
            answer.append(int(mx.argmax(self.logits(parts, answer)[-1])))
        return answer
