"""Serve a tiny model whose answer is dictated, with a chat template for tools."""

import functools
from contextlib import contextmanager

import mlx.core as mx
import tiny
from compile_mode import NO_FUSE, set_mode
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from served import serving
from thinking import plain_tokenizer, thinks

import mlx_mtp
from mlx_mtp.serve.server import Loaded

TEMPLATE = (
    "{% if tools %}{{ 'tools ' + (tools | tojson) + '\\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}{% if m.reasoning_content %}"
    "{{ '[reasoning ' + m.reasoning_content + ']' }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + ' ' + c.function.arguments.city + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if effort or reasoning_effort %}{{ effort or reasoning_effort }}{% endif %}{% endif %}"
)


class Dictated:
    """A logits processor that makes the model emit `words` and end the answer."""

    words = ""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.encoded = functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False))

    def __call__(self, tokens, logits):
        words, mark = self.encoded(self.words), self.encoded("<|im_start|>assistant\n")
        ids = tokens.tolist()
        start = next(i for i in range(len(ids), 0, -1) if ids[i - len(mark) : i] == mark)
        done = len(ids) - start
        token = words[done] if done < len(words) else self.tokenizer.eos_token_id
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -1e9)[None]


# The logits processor chooses the tokens, so one layer is enough.
ONE_LAYER = {"num_hidden_layers": 1, "moe_layers_enum": "", "swiglu_limits": [0], "swiglu_limits_shared": [0]}


@contextmanager
def dictated(tmp_path_factory, drafts=1):
    """Yield a client of a server whose model writes `Dictated.words`, as far as it is free to choose.

    drafts: the number of tokens that a cycle drafts.
    """
    config = {**tiny.CONFIG, **ONE_LAYER, "vocab_size": 2048}
    path = tiny.save(tmp_path_factory.mktemp("tiny"), config, tiny.random_weights(config))

    def load():
        set_mode(NO_FUSE)
        model, plain = mlx_mtp.load_model(path), plain_tokenizer()
        plain.chat_template = TEMPLATE
        marks = ("<tool_call>", "</tool_call>", json_tools.parse_tool_call)
        tokenizer = TokenizerWrapper(plain, BPEStreamingDetokenizer, None, None, *marks)
        thinks(tokenizer, (1, 1, 1), (1, 1, 1, 1))
        options["logits_processors"] = [Dictated(tokenizer)]
        return Loaded(model, tokenizer, {}, {})

    options = {"adaptive": False, "num_draft_tokens": drafts}
    with serving(load, options=options) as client:
        yield client
