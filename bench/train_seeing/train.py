"""Train the demo that reads pictures: python -m bench.train_seeing.train [--out DIR].

Needs the extras `parity` and `vision`. Pictures are drawn as they are needed; none is seen twice.
"""

import json
import random
import time
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mlx_mtp.pictures.rows import Picture, places_in, positions_of

from . import card, scenes
from .answers import right_answers
from .checkpoint import PREPROCESSOR, config_of, make_tokenizer
from .network import Seeing, loss_of

BATCH, PEAK = 32, 3e-3
SIDES = (64, 80, 96, 112, 128)  # pixels
EDGE = PREPROCESSOR["patch_size"] * PREPROCESSOR["merge_size"]


def example(rng: random.Random, size: tuple[int, int], count: int) -> tuple[list[Image.Image], str, str]:
    """Return the pictures of this size, a question about them, and the answer."""
    drawn = [scenes.draw_scene(rng) for _ in range(count)]
    pictures = [scenes.render(scene, *size, rng) for scene in drawn]
    if count == 0:
        return pictures, rng.choice(scenes.GREETINGS), scenes.NO_PICTURE
    return pictures, *(scenes.ask(drawn[0], rng) if count == 1 else scenes.compare(drawn, rng))


def batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, processor: Qwen2VLImageProcessorPil) -> tuple:
    """Return tokens, pixels, grids, positions and the places of the answers of one batch, all of one layout."""
    size, count = (rng.choice(SIDES), rng.choice(SIDES)), rng.choices((0, 1, 2), (1, 12, 4))[0]
    grid = (1, size[1] // EDGE, size[0] // EDGE)
    texts, answers, pictures = [], [], []
    for _ in range(BATCH):
        shown, question, answer = example(rng, size, count)
        pictures += shown
        parts = [{"type": "image"}] * count + [{"type": "text", "text": question}]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        prompt = prompt.replace("<|image_pad|>", "<|image_pad|>" * (grid[1] * grid[2]))
        first = tokenizer.encode(prompt, add_special_tokens=False)
        rest = tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
        texts.append(first + rest)
        answers.append([0.0] * len(first) + [1.0] * len(rest))
    length = max(map(len, texts))
    tokens = torch.tensor([text + [tokenizer.pad_token_id] * (length - len(text)) for text in texts])
    answer = torch.tensor([each + [0.0] * (length - len(each)) for each in answers])
    mark, ids = tokenizer.convert_tokens_to_ids("<|image_pad|>"), texts[0]
    rows = iter(Picture(b"", grid).tokens * count)
    marked = [next(rows) if token == mark else token for token in ids] + [0] * (length - len(ids))
    positions = torch.tensor(positions_of(places_in(marked), 0, length).astype(np.int64))[:, None].expand(
        3, BATCH, -1
    )
    pixels = grids = None
    if count:
        found = processor(images=pictures, return_tensors="pt")
        pixels, grids = found["pixel_values"], found["image_grid_thw"]
    return tokens, pixels, grids, positions, answer


def save(model: Seeing, out: Path, steps: int, minutes: float) -> None:
    """Write model.safetensors in bfloat16, with the updates and minutes that all runs took together."""
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.tensors().items()}
    metadata = {"format": "pt", "steps": str(steps), "minutes": f"{minutes:.1f}"}
    save_file(tensors, out / "partial.safetensors", metadata=metadata)
    (out / "partial.safetensors").replace(out / "model.safetensors")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="mlx-mtp-seeing", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4000, show_default=True, help="Updates of 32 texts.")
@click.option("--resume", is_flag=True, help="Start from the weights in OUT, with a schedule of its own.")
@click.option("--seed", default=0, show_default=True, help="Seed of new weights, and of the pictures of this run.")
def main(out: Path, steps: int, seed: int, resume: bool) -> None:
    """Train the demo that reads pictures, and write a Qwen3.5-VL checkpoint to OUT."""
    rng = random.Random(seed)
    torch.manual_seed(seed)  # of the weights, unless they are read
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out) if resume else make_tokenizer(rng)
    config = config_of(tokenizer)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")
    tokenizer.save_pretrained(out)
    processor, model = Qwen2VLImageProcessorPil.from_pretrained(out), Seeing(config)
    before, spent = 0, 0.0
    if resume:
        with safe_open(out / "model.safetensors", "pt") as file:
            model.take({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
            before, spent = int(file.metadata()["steps"]), float(file.metadata()["minutes"])
        rng = random.Random(f"{seed}, after {before} updates")  # other pictures than the earlier runs drew
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.99), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps, pct_start=0.05)
    start, shares = time.perf_counter(), []
    for step in range(1, steps + 1):
        tokens, pixels, grids, positions, answer = batch(rng, tokenizer, processor)
        loss, right = loss_of(model(tokens, pixels, grids, positions), tokens, answer)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shares.append((loss.item(), *right))
        if step % 20 == 0:
            means = " ".join(f"{value:.3f}" for value in np.mean(shares[-20:], axis=0))
            click.echo(f"step {step}/{steps}  loss, model and depths {means}  {time.perf_counter() - start:.0f} s")
        if step % 200 == 0 or step == steps:
            minutes = spent + (time.perf_counter() - start) / 60
            save(model, out, before + step, minutes)
    parameters = sum(value.numel() for value in model.tensors().values())
    right = np.mean(shares[-100:], axis=0)[1:].tolist()
    figures = {"steps": before + steps, "minutes": minutes, "right": right, "answers": right_answers(out)}
    card.write(out, parameters=parameters, **figures)


if __name__ == "__main__":
    main()
