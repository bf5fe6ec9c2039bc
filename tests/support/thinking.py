"""The demo's tokenizer as transformers loads it, and marks of reasoning for a tokenizer of mlx-lm."""

from transformers import AutoTokenizer

from mlx_mtp.demo import demo_path

MARKS = "<think>", "</think>"


def plain_tokenizer():
    return AutoTokenizer.from_pretrained(demo_path())


def thinks(tokenizer, start=None, end=None):
    """Give a tokenizer of mlx-lm the marks; start, end: the tokens of each, None for those of its text."""
    tokenizer._think_start, tokenizer._think_end = MARKS
    encoded = [
        tokens or tuple(tokenizer.encode(mark, add_special_tokens=False))
        for tokens, mark in zip((start, end), MARKS, strict=True)
    ]
    tokenizer._think_start_tokens, tokenizer._think_end_tokens = encoded
