"""Compare texts after pictures with transformers' Qwen3.5-VL: its features, our positions, prefill and drafts."""

import mlx.core as mx
import pytest
import seeing
from picture_prompts import Vision, tokens_of

import mlx_mtp
from mlx_mtp.pictures.rows import Picture

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")
transformers = pytest.importorskip("transformers", "5.23", reason="parity needs mlx-mtp[parity]")

N = 24
A, B = Picture(b"a", (1, 3, 5)), Picture(b"b", (1, 6, 2))
TWIN = Picture(b"twin", A.grid)


def framed(*pictures):
    return [part for picture in pictures for part in ([seeing.START], picture, [seeing.END])]


PROMPTS = [
    ([5, 6, 7, 8],),
    ([5, 6], *framed(A), [7, 8]),
    ([5, 6], *framed(TWIN), [7, 8]),
    (*framed(B, A), [9]),
    ([5], *framed(A), [7, 8, 9, 10], *framed(B, TWIN), [11, 12, 13]),
]


class Torch:
    """transformers' model of a checkpoint, with random pixels for each picture."""

    def __init__(self, path):
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # texts do not end before n tokens

    def pixels(self, picture):
        rows = 4 * picture.rows  # patches of 3 x 2 x 4 x 4 values
        generator = torch.Generator().manual_seed(int.from_bytes(picture.digest))
        return torch.randn(rows, 3 * 2 * 4 * 4, generator=generator), [1, 2 * picture.grid[1], 2 * picture.grid[2]]

    @torch.no_grad()
    def features(self, picture) -> mx.array:
        pixels, grid = self.pixels(picture)
        found = self.model.model.get_image_features(pixels, torch.tensor([grid]))
        found = getattr(found, "pooler_output", found)
        return mx.array((found[0] if isinstance(found, list | tuple) else found).numpy())

    @torch.no_grad()
    def greedy(self, parts, n):
        ids = torch.tensor([[t if t >= 0 else seeing.PAD for t in tokens_of(*parts)]])
        given = {"input_ids": ids, "mm_token_type_ids": (ids == seeing.PAD).int()}
        if pictures := [self.pixels(part) for part in parts if isinstance(part, Picture)]:
            pixels, grids = zip(*pictures, strict=True)
            given |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
        return self.model.generate(**given, max_new_tokens=n, do_sample=False)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_texts_after_pictures_are_those_of_transformers(moe, tmp_path):
    path, _ = seeing.build(tmp_path, moe=moe)
    theirs, model = Torch(path), mlx_mtp.load_model(path)
    model.runtime.vision = vision = Vision()
    vision.known = {picture: theirs.features(picture) for picture in (A, B, TWIN)}
    texts = set()
    for parts in PROMPTS:
        expected = theirs.greedy(parts, N)
        texts.add(tuple(expected))
        for k, chunk in ((0, 2048), (2, 7), (3, 1)):
            options = {"num_draft_tokens": k, "adaptive": False, "prefill_step_size": chunk, "pictures": [A, B, TWIN]}
            found = mlx_mtp.generate_step(tokens_of(*parts), model, max_tokens=N, **options)
            assert [token for token, *_ in found] == expected, (parts, k, chunk)
    assert len(texts) == len(PROMPTS)
