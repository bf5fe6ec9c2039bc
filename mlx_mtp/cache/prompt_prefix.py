"""Encode conversations, and the beginning of a first message whose state a saved cache holds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..machine.errors import one_line

# Whose tokens depend on what follows: often a mark is of one token with the letters behind it.
LAST_RUNS = re.compile(r"(\w+|\s+|[^\w\s]+){1,2}\Z")
PROBES = ("a", " a", "\n", ".", "1")  # what may follow; the template's own ending does not
# The commands set these, or need the text that comes without them.
RESERVED_KEYS = {
    *("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
}


@dataclass(frozen=True)
class PromptPrefix:
    """A text that the first message begins with; what follows it is told later.

    template:  it goes through the chat template, of which `template_config` are variables.
    model:     what a command loaded, and with which end-of-text token; None: the demo, the tokenizer's own.
    """

    prompt: str
    system_prompt: str | None = None
    template: bool = True
    template_config: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    eos_token: str | None = None

    def tokens(self, tokenizer: Any, text: str) -> list[int]:
        """Encode the whole prompt, where `text` follows; ValueError where the chat template refuses it."""
        text = self.prompt + text
        if not (self.template and tokenizer.has_chat_template):
            return tokenizer.encode(text)
        messages = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        messages.append({"role": "user", "content": text})
        options = {**self.template_config, "add_generation_prompt": True}
        return tokenizer.encode(render(tokenizer, messages, options), add_special_tokens=False)

    def settled(self, tokenizer: Any) -> list[int]:
        """Find the tokens that the prompt begins with whatever follows: up to about its last words."""
        tokens = self.tokens(tokenizer, "")
        whole = replace(self, prompt=LAST_RUNS.sub("", self.prompt)).tokens(tokenizer, "")
        kept = shared(tokens[:-1], whole)
        for text in PROBES:
            kept = shared(tokens[:kept], self.tokens(tokenizer, text))
        return tokens[:kept]

    def check(self, **asked: Any) -> None:
        """Raise ValueError where another system prompt or other variables of the template are asked for."""
        for name, value in asked.items():
            if value and value != (own := getattr(self, name)):
                raise ValueError(f"{name}={value!r}: the prompt cache was made with {own or None!r}")


def render(tokenizer: Any, messages: list[dict], options: dict[str, Any]) -> str:
    """Render the chat template; raises ValueError, in one line, where the template fails."""
    with one_line("the chat template refuses this conversation"):  # a program of the checkpoint's: anything can fail
        text = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
    if any("\ud800" <= c <= "\udfff" for c in text):  # what Python makes of bytes that are no text
        raise ValueError("the prompt is not valid UTF-8 text")
    return text


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
