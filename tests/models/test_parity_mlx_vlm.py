"""Compare texts after pictures with mlx-vlm's Qwen3.5-VL, from the same pixels: tower, positions, prefill, drafts."""

import mlx.core as mx
import numpy as np
import pytest
import seeing
from picture_prompts import tokens_of
from picture_requests import noise
from sweep import SWEEP

import mlx_mtp
from mlx_mtp.pictures.image import open_image
from mlx_mtp.pictures.rows import Picture
from mlx_mtp.session import ChatSession

WHY = "mlx-vlm is no dependency: pip install --no-deps mlx-vlm"
utils = pytest.importorskip("mlx_vlm.utils", reason=WHY)
generate_step = pytest.importorskip("mlx_vlm.generate", reason=WHY).generate_step

N = 40 if SWEEP else 12
SIZES = {"A": (40, 24), "B": (16, 48), "TWIN": (40, 24)}  # of pictures, in pixels
WAYS = [(0, 2048), (1, 5), (3, 1)]  # drafts and rows of a chunk
if SWEEP:
    WAYS = [(k, chunk) for k in range(4) for chunk in (1, 2, 3, 5, 7, 16, 64, 2048)]


class Pair:
    """Our model and mlx-vlm's of one checkpoint, and the pictures A, B and TWIN, which has A's size."""

    def __init__(self, path):
        self.theirs = utils.load_model(path)
        self.ours, self.tokenizer = mlx_mtp.load(path)
        self.files = {name: noise(seed, *SIZES[name]) for seed, name in enumerate(SIZES)}
        images = {name: open_image(file) for name, file in self.files.items()}
        self.pictures = {name: self.ours.vision.picture(image) for name, image in images.items()}

    def greedy(self, tokens, pictures, n=N) -> tuple[list[int], mx.array]:
        """Return mlx-vlm's tokens and log-probabilities [n, V] after a prompt.

        The prompt's negative tokens are rows of `pictures`.
        """
        ids, more = mx.array([[token if token >= 0 else seeing.PAD for token in tokens]]), {}
        pixels = None
        if pictures:
            patches = [self.ours.vision._pixels.patches(picture.image.pixels, picture.grid) for picture in pictures]
            pixels = mx.array(np.concatenate(patches))
            more = {"image_grid_thw": mx.array([[1, 2 * p.grid[1], 2 * p.grid[2]] for p in pictures])}
        steps = generate_step(ids, self.theirs, pixels, mx.ones_like(ids), max_tokens=n, temperature=0.0, **more)
        found, logprobs = zip(*steps, strict=True)
        return [int(token) for token in found], mx.stack([each.flatten() for each in logprobs])


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def pair(request, tmp_path_factory):
    return Pair(seeing.build(tmp_path_factory.mktemp("seeing"), moe=request.param)[0])


def framed(*names):
    return [part for name in names for part in ([seeing.START], name, [seeing.END])]


PROMPTS = {
    "no picture": [[5, 6, 7, 8]],
    "one": [[5, 6], *framed("A"), [7, 8]],
    "another of its size": [[5, 6], *framed("TWIN"), [7, 8]],
    "two adjacent": [*framed("B", "A"), [9]],
    "three, two adjacent": [[5], *framed("A"), [7, 8, 9, 10], *framed("B", "TWIN"), [11, 12, 13]],
    "one at the end": [[5, 6, 7], *framed("B")],
}


def test_tokens_after_pictures_are_those_of_mlx_vlm(pair):
    texts = set()
    for name, parts in PROMPTS.items():
        parts = [pair.pictures.get(part) if isinstance(part, str) else part for part in parts]
        tokens, pictures = tokens_of(*parts), [part for part in parts if isinstance(part, Picture)]
        expected, _ = pair.greedy(tokens, pictures)
        texts.add(tuple(expected))
        for k, chunk in WAYS:
            options = {"num_draft_tokens": k, "adaptive": False, "prefill_step_size": chunk, "pictures": pictures}
            found = mlx_mtp.generate_step(tokens, pair.ours, max_tokens=N, **options)
            assert [token for token, *_ in found] == expected, (name, k, chunk)
    assert len(texts) == len(PROMPTS)


@pytest.mark.parametrize(("k", "chunk"), WAYS)
def test_turns_of_a_conversation_are_those_of_mlx_vlm(pair, k, chunk):
    options = {
        "num_draft_tokens": k,
        "adaptive": False,
        "prefill_step_size": chunk,
        "max_tokens": 8,
        "logprobs": True,
    }
    session, sent = ChatSession(pair.ours, pair.tokenizer, **options), []
    for text, names in [("What?", ["A"]), ("And?", []), ("These?", ["B", "TWIN"])]:
        sent += [pair.pictures[name] for name in names]
        found = list(session.ask(text, images=[pair.pictures[name] for name in names]))
        prompt = session.cache.tokens[: session.turn.prompt_tokens]
        tokens, logprobs = pair.greedy(prompt, sent, n=len(found))
        assert [response.token for response in found] == tokens, text
        assert mx.abs(mx.stack([response.logprobs for response in found]) - logprobs).max() < 1e-3, text
    assert session.turn.reused > 20
