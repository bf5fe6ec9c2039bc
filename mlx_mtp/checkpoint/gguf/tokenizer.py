"""Make the files of a Hugging Face tokenizer, with stop tokens and chat templates, from a GGUF file's metadata."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from ...machine.errors import one_line
from ...models.gguf.meta import Meta
from ...models.gguf.pre import BEGIN, BYTE_LEVEL, END_TOKENS, MORE_ENDS, NFC, PRE, SENTENCEPIECE, WHOLE_TOKENS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PREFIX = "tokenizer."
ADVICE = "give --config-from REPO to take the released model's tokenizer"
SPACE = "\u2581"
MAX_LETTERS = 256  # longer tokens get no merges
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of tokenizer.json and tokenizer_config.json, and the stop tokens."""

    backend: dict[str, Any]
    config: dict[str, Any]
    end_tokens: list[int] = field(default_factory=list)

    def files(self) -> dict[str, bytes]:
        """Return the content of each file by its name."""
        content = {"tokenizer.json": self.backend, "tokenizer_config.json": self.config}
        return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in content.items()}


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer's checked metadata: all values, and each token's text and type."""

    file: str
    values: dict[str, Any]
    tokens: list[str]
    kinds: list[int]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of the tokenizer's metadata, else `default`; ValueError for another type than `kind`."""
        value = self.values.get(PREFIX + key, default)
        if value is not default and type(value) is not kind:
            raise ValueError(f"{self.file}: metadata {PREFIX}{key} is {str(value)[:60]!r}; expected {kind.__name__}")
        return value

    def token(self, name: str) -> tuple[int, str] | None:
        """Return (id, text) of a special token, None if the metadata have none; ValueError for an id out of range.

        name: in the metadata keys, such as "bos".
        """
        number = self.get(f"ggml.{name}_token_id", int)
        if number is None or number == 2**32 - 1:
            return None
        if not 0 <= number < len(self.tokens):
            expected = f"expected less than {len(self.tokens)}, and no negative number"
            raise ValueError(f"{self.file}: {name}_token_id is {number}; {expected}")
        return number, self.tokens[number]

    @property
    def pre(self) -> str:
        """The pre-tokenizer's name."""
        return self.get("ggml.pre", str, "default")


def make_tokenizer(meta: Meta) -> TokenizerFiles:
    """Return the contents of a Hugging Face tokenizer's files, and its stop tokens, from a GGUF file's metadata.

    Nothing is written; the tokenizer is built once as a check. ValueError if the metadata have no tokenizer, or one
    that is not supported or cannot be built.
    """
    vocabulary = _read(meta)
    kind = vocabulary.get("ggml.model", str)
    make_backend = {BYTE_LEVEL: _byte_level, SENTENCEPIECE: _sentencepiece}.get(kind)
    if make_backend is None:
        raise ValueError(f"{meta.file}: a tokenizer of kind {kind!r} is not supported; {ADVICE}")
    backend = make_backend(vocabulary)
    with one_line(f"{meta.file}: its tokenizer cannot be built"):
        Backend.from_str(json.dumps(backend))
    return TokenizerFiles(backend, _config(vocabulary, meta), _end_tokens(vocabulary))


def described(meta: Meta) -> str:
    """Return a line with the kind and pre-tokenizer of a file's tokenizer, and a note if they are not supported."""
    kind, pre = (meta.values.get(f"{PREFIX}ggml.{key}") for key in ("model", "pre"))
    known = kind == SENTENCEPIECE or (kind == BYTE_LEVEL and pre in PRE)
    return f"{kind}, pre-tokenizer {pre}" + ("" if known else f"; not supported: {ADVICE}")


def _read(meta: Meta) -> _Vocabulary:
    tokens = meta.values.get(PREFIX + "ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{meta.file}: it has no tokenizer; {ADVICE}")
    kinds = meta.values.get(PREFIX + "ggml.token_type")
    kinds = [NORMAL] * len(tokens) if kinds is None else kinds
    numbers = isinstance(kinds, list) or (isinstance(kinds, np.ndarray) and kinds.dtype.kind in "iu")
    if not numbers or len(kinds) != len(tokens):
        raise ValueError(f"{meta.file}: tokenizer.ggml.token_type: expected {len(tokens)} integers, one per token")
    return _Vocabulary(meta.file, dict(meta.values), tokens, [int(kind) for kind in kinds])


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json for byte-level BPE; ValueError without merges or a known pre-tokenizer."""
    steps = PRE.get(vocabulary.pre)
    if steps is None:
        raise ValueError(f"{vocabulary.file}: pre-tokenizer {vocabulary.pre!r} is not supported; {ADVICE}")
    merges = vocabulary.values.get(PREFIX + "ggml.merges")
    pairs = [merge.split(" ") for merge in merges] if isinstance(merges, list) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{vocabulary.file}: its tokenizer has no merges of two tokens each; {ADVICE}")
    found = _backend(vocabulary, pairs, begins=vocabulary.pre in BEGIN)
    found["model"]["ignore_merges"] = vocabulary.pre in WHOLE_TOKENS
    found["normalizer"] = {"type": "NFC"} if vocabulary.pre in NFC else None
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    found["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return found


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json for a SentencePiece model, as BPE with merges from the tokens' scores.

    ValueError unless each token has a score.
    """
    scores = vocabulary.values.get(PREFIX + "ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{vocabulary.file}: its tokenizer has no score for each token; {ADVICE}")
    found = _backend(vocabulary, merges_by_score(vocabulary.tokens, scores.tolist()), begins=True)
    prefix = vocabulary.get("ggml.add_space_prefix", bool, True)
    unknown = vocabulary.token("unknown")
    found["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown and unknown[1]}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]
    found["normalizer"] = {"type": "Sequence", "normalizers": steps}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    found["decoder"] = {"type": "Sequence", "decoders": decoders}
    return found


def merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, sorted by the joined token's score, best first.

    scores: one per token. Of equal scores, joined tokens are sorted by id, and pairs of one token by the ids of their
    parts. Tokens longer than MAX_LETTERS have no merges.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for number, token in enumerate(tokens):
        if len(token) > MAX_LETTERS:
            continue
        for cut in range(1, len(token)):
            left, right = numbers.get(token[:cut]), numbers.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:4])
    return [merge[4:] for merge in found]


def _backend(vocabulary: _Vocabulary, merges: list[Any], *, begins: bool) -> dict[str, Any]:
    """Return the entries that every tokenizer.json has; merges of tokens outside the vocabulary are dropped.

    begins: add the begin token unless metadata forbid it.
    """
    numbered = list(enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)))
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": token, **form, "special": kind in (CONTROL, UNKNOWN)}
        for number, (token, kind) in numbered
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    words = {token: number for number, (token, kind) in numbered if kind != UNUSED}
    merges = [pair for pair in merges if all(t in words for t in (*pair, pair[0] + pair[1]))]
    unset = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder"))
    model = {"type": "BPE", "vocab": words, "merges": merges}
    template = _template(vocabulary, begins)
    return {"version": "1.0", **unset, "added_tokens": added, "post_processor": template, "model": model}


def _template(vocabulary: _Vocabulary, begins: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds begin and end tokens, None if neither is added."""
    entries = (("bos", "add_bos_token", begins), ("eos", "add_eos_token", False))
    found = {name: vocabulary.token(name) for name, key, on in entries if vocabulary.get(f"ggml.{key}", bool, on)}
    special = {name: token for name, token in found.items() if token}
    if not special:
        return None
    marks = {name: {"SpecialToken": {"id": token[1], "type_id": 0}} for name, token in special.items()}
    before, after = ([marks[name]] if name in marks else [] for name in ("bos", "eos"))
    one, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for number, text in special.values()}
    single = [*before, one, *after]
    pair = [*single, *before, other, *after]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _config(vocabulary: _Vocabulary, meta: Meta) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with special tokens and chat templates.

    If a named chat template is no text, only the unnamed template is returned.
    """
    special = {name: token[1] for name, key in NAMED.items() if (token := vocabulary.token(key))}
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.size("context_length"),
        **special,
    }
    named = PREFIX + "chat_template."
    others = {key.removeprefix(named): text for key, text in meta.values.items() if key.startswith(named)}
    usual = vocabulary.get("chat_template", str)
    if others and all(isinstance(text, str) for text in others.values()):
        templates = ({"default": usual} if usual else {}) | others
        found["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif usual:
        found["chat_template"] = usual
    return found


def _end_tokens(vocabulary: _Vocabulary) -> list[int]:
    """Return the ids of the stop tokens: those with metadata keys, then control tokens with known names."""
    keyed = [token[0] for name in ("eos", "eot", "eom") if (token := vocabulary.token(name))]
    names = {*END_TOKENS, *MORE_ENDS.get(vocabulary.pre, ())}
    both = enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    named = [number for number, (token, kind) in both if kind == CONTROL and token in names]
    return list(dict.fromkeys([*keyed, *named]))
