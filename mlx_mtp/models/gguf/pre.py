"""List the pre-tokenizers that GGUF files name, as the released tokenizer.json files have them, and end tokens.

Sources: released tokenizer.json files, Kimi's `tokenization_kimi.py`; llama.cpp's `llama-vocab.cpp` for the names.
"""

from typing import Any

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # kinds of BPE by the names that files have for them
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
LLAMA3 = rf"{WORDS}|\p{{N}}{{1,3}}|{OTHERS}"
QWEN2 = rf"{WORDS}|\p{{N}}|{OTHERS}"
MARKED = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+"
QWEN35 = rf"{MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{REST}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, after: str) -> str:
    """Return a regex of words, each ending where a capital follows a small letter.

    upper, lower: contents of character classes. after: a regex of what a word may have behind it.
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}[{upper}]*[{lower}]+{after}|{before}[{upper}]+[{lower}]*{after}"


O200K = rf"{_cased(UPPER, LOWER, CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
TEKKEN = rf"{_cased(UPPER, LOWER, '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
NOT_HAN = r"&&[^\p{Han}]"
KIMI = rf"[\p{{Han}}]+|{_cased(UPPER + NOT_HAN, LOWER + NOT_HAN, CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{OTHERS}"
PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{REST}",
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
GPT2 = {**BYTES, "use_regex": True}
SMOLLM = ({"type": "Digits", "individual_digits": True}, GPT2)


def _split(*patterns: str) -> tuple[dict[str, Any], ...]:
    """Return the steps of a pre-tokenizer that splits by one regex after another, then maps bytes to characters."""
    rule = {"type": "Split", "behavior": "Isolated", "invert": False}
    return (*({**rule, "pattern": {"Regex": pattern}} for pattern in patterns), BYTES)


PRE: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "smaug-bpe", "dbrx"), _split(LLAMA3)
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _split(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _split(QWEN2)),
    "qwen35": _split(QWEN35),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _split(O200K)),
    "tekken": _split(TEKKEN),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _split(*DEEPSEEK)),
    **dict.fromkeys(("kimi-k2", "kimi-k25"), _split(KIMI)),
    "smollm": SMOLLM,
    "gpt-2": (GPT2,),
}
NFC = ("qwen2", "deepseek-r1-qwen", "qwen35", "megrez")  # whose releases normalise text
WHOLE_TOKENS = ("llama3", "llama-v3", "llama-bpe", "pixtral", "tekken", "gpt-4o", "llama4")  # ignore merges of these
BEGIN = ("llama3", "llama-v3", "llama-bpe", "tekken", "pixtral")  # that add the begin token unless metadata deny it
END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<｜end▁of▁sentence｜>", "[EOS]", "<end_of_utterance>"),
)
MORE_ENDS = {"glm4": ("<|user|>", "<|observation|>"), "chatglm-bpe": ("<|user|>", "<|observation|>")}
