"""The demo's byte-level BPE tokenizer: cheap indentation, one token per digit, ChatML turns."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# A line break takes the indentation that follows it; a word takes one space, dot or underscore before it.
SPLIT = r"\n *|[ ._]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+| +(?! )|\s"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(messages: list[dict]) -> str:
    """The chat template in Python: what `apply_chat_template` writes for these messages."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def as_text(document: str | list[dict]) -> str:
    """A document as the model reads it: source as it is or a chat rendered, closed by end-of-text."""
    return (document if isinstance(document, str) else render(document)) + END_OF_TEXT


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 2048) -> Tokenizer:
    """Byte-level BPE over `texts`; the special tokens have ids 0, 1, 2 in the order of SPECIAL_TOKENS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers' AutoTokenizer reads them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
