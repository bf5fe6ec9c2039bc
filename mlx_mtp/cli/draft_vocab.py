"""Define `mlx-mtp draft-vocab`: choose the tokens that a model's heads may draft, from the user's texts."""

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click import option

from .given_file import text_files
from .options import check_place, checkpoint_options, checkpoint_path

SHARE = 4  # the default size is this fraction of the vocabulary
PIECE = 1 << 20  # characters to encode at a time


@click.command("draft-vocab")
@checkpoint_options
@option("--out", required=True, callback=check_place, help="File to write, for --draft-vocab of other commands.")
@option("--size", type=click.IntRange(1), help="Number of tokens.  [default: a quarter of the vocabulary]")
@click.argument("texts", nargs=-1, metavar="[TEXTS]...", type=click.Path(exists=True, allow_dash=True))
def draft_vocab(
    model: str | None, trust_remote_code: bool, out: Path, size: int | None, texts: tuple[str, ...]
) -> None:
    """Choose the tokens that a model's heads may draft.

    These are the most frequent tokens of TEXTS: files, directories (all files in them that are not hidden) and '-'
    for standard input. Give texts similar to those the model will write. The tokens that the tokenizer ranks first
    fill the list. The list does not affect the model's text, because tokens that it lacks are only not drafted.
    """
    from ..checkpoint.draft_vocab import most_frequent, write
    from ..checkpoint.files import read_config
    from ..checkpoint.load import load_tokenizer

    logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings about long texts are false
    path = checkpoint_path(model, code=trust_remote_code)
    config = read_config(path)
    vocab_size = (config | config.get("text_config", {})).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ValueError(f"{path}/config.json: vocab_size is {vocab_size!r}, expected an integer")
    tokenizer = load_tokenizer(path, {"trust_remote_code": True} if trust_remote_code else {})
    pieces = (text[start : start + PIECE] for text in _read(texts) for start in range(0, len(text), PIECE))
    counts = Counter(token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False))
    if texts and not counts:
        raise click.UsageError(f"no text in {', '.join(texts)}; name other files")
    try:
        tokens = most_frequent(tokenizer, counts, size or max(1, vocab_size // SHARE), vocab_size)
    except ValueError as e:
        if size:
            raise
        raise ValueError(
            f"{path}: give --size, as a quarter of its vocabulary does not suit its tokenizer: {e}"
        ) from None
    write(out, tokens, vocab_size, tokenizer)
    click.echo(f"{out}: {len(tokens):,} of {vocab_size:,} tokens")
    if texts:
        covered = sum(counts[token] for token in tokens)
        click.echo(f"They are {covered / counts.total():.1%} of the texts' {counts.total():,}.")


def _read(names: Iterable[str]) -> Iterator[str]:
    """Yield the texts of files, directories and standard input ('-'); report and skip files that are not UTF-8."""
    for file in (file for name in names for file in ([None] if name == "-" else text_files(Path(name)))):
        try:
            yield (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode()
        except UnicodeDecodeError:
            click.echo(f"skipped: {file or 'standard input'} is not UTF-8 text", err=True)
