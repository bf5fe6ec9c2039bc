"""Count what fewer bits in the draft heads cost: accepted drafts per depth, and what the heads weigh.

    python bench/head_quantization.py [--model DIR] [--max-tokens 100] [--out FILE]

The heads are taken out of one checkpoint by `mlx_mtp.checkpoint.convert.extract_heads`, in 4, 6 and 8 bits and as
they are, and drafted with beside the same target, which is not quantized. All drafts of every cycle are verified:
these are counts, not times, and the texts must be equal. The last line is one JSON object.
"""

import json
import tempfile
import warnings
from pathlib import Path

import click
from decode import HERE, read_prompts
from rich.console import Console
from rich.table import Table

import mlx_mtp
from mlx_mtp.bench.result import environment
from mlx_mtp.checkpoint.convert import extract_heads
from mlx_mtp.decoding.summary import percentages, shares
from mlx_mtp.demo import demo_path

WIDTHS = (4, 6, 8, None)


def counted(model, prompts: list, stops: set[int], n: int) -> tuple[list[list[int]], mlx_mtp.Stats]:
    """(texts, counts) of greedy decoding with all drafts."""
    texts, stats = [], mlx_mtp.Stats()
    for _, prompt in prompts:
        own = mlx_mtp.Stats()
        steps = mlx_mtp.generate_step(
            prompt, model, max_tokens=n, stop_tokens=stops, adaptive=False, prompt_lookup=False, stats=own
        )
        texts.append([token for token, _, _ in steps])
        stats.add(own)
    return texts, stats


def measure(model: Path, prompts: Path, n: int) -> dict:
    """By bits: bytes of the heads' file, drafted and accepted per depth, cycles and tokens."""
    found, texts = {}, None
    with tempfile.TemporaryDirectory() as folder:
        for bits in WIDTHS:
            name = f"{bits} bits" if bits else "as they are"
            extracted = extract_heads(model, Path(folder) / f"{bits}.safetensors", mtp_q_bits=bits)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded, tokenizer = mlx_mtp.load(model, mtp_path=extracted.path)
            stops = set(tokenizer.eos_token_ids)
            written, stats = counted(loaded, read_prompts(tokenizer, prompts), stops, n)
            texts = texts or written
            if written != texts:
                raise SystemExit(f"heads of {name} wrote another text")
            found[name] = {
                "precision": extracted.report.head_quantization,
                "bytes": extracted.path.stat().st_size,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "cycles": stats.cycles,
                "tokens": sum(map(len, written)),
                "tokens_per_cycle": stats.tokens_per_cycle,
            }
    return found


@click.command()
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), default=demo_path(), help="Checkpoint directory."
)
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=HERE / "prompts.json")
@click.option("--max-tokens", default=100, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON there too.")
def main(model: Path, prompts: Path, max_tokens: int, out: Path | None) -> None:
    """Acceptance per depth and size of heads in 4, 6 and 8 bits and as they are."""
    found = measure(model, prompts, max_tokens)
    whole = found["as they are"]["bytes"]
    table = Table("heads", "in them", "file", "of whole", "accepted per depth", "tokens per cycle", "cycles")
    for name, counts in found.items():
        rates = percentages(shares(counts["drafted"], counts["accepted"]), decimals=1)
        size = f"{counts['bytes'] / 1e6:.2f} MB", f"{counts['bytes'] / whole:.0%}"
        table.add_row(
            name, counts["precision"], *size, rates, f"{counts['tokens_per_cycle']:.3f}", str(counts["cycles"])
        )
    Console(width=120).print(table)
    line = json.dumps(
        {"bench": "head_quantization", "environment": environment(), "max_tokens": max_tokens, "heads": found}
    )
    print(line)
    if out is not None:
        out.write_text(line + "\n")


if __name__ == "__main__":
    main()
