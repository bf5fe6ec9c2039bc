"""Chat templates that accept different forms of conversations, and unusual conversations for them.

MLX_MTP_TEMPLATES names a directory of released templates (*.jinja, such as llama.cpp's `models/templates`), which are
then tested like those here.
"""

import copy
import functools
import importlib
import os
from pathlib import Path

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper, _infer_tool_parser
from thinking import plain_tokenizer

TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson ~ '\\n' }}{% endfor %}{% endif %}"
DESCRIBED = (
    "{% for t in tools %}{{ t.function.description + (t.function.parameters.properties | tojson) }}{% endfor %}"
)
GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def turns(calls, content="(m.content or '')", before=""):
    """A ChatML template that prints `before`, then the content, then `calls` in each message."""
    turn = "{{ '<|im_start|>' + m.role + '\\n' + " + content + " }}"
    return "{% for m in messages %}" + before + turn + calls + "{{ '<|im_end|>\\n' }}{% endfor %}" + GENERATION_PROMPT


def each_call(printed):
    return "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + printed + "{% endfor %}"


HERMES = each_call(
    '{{ \'\\n<tool_call>\\n{"name": "\' ~ f.name ~ \'", "arguments": \' ~ (f.arguments | tojson) }}'
    "{{ '}\\n</tool_call>' }}"
)
CODER = each_call(
    "{{ '\\n<tool_call>\\n<function=' ~ f.name ~ '>\\n' }}{% for k, v in f.arguments | items %}"
    "{{ '<parameter=' ~ k ~ '>\\n' ~ (v if v is string else v | tojson) ~ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}"
)
STRINGS = each_call("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}")
PYTHON = each_call("{{ '[TOOL_CALLS]' ~ f.name ~ '[ARGS]' ~ f.arguments }}")
KIMI = each_call(
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}"
    "{{ (f.arguments | tojson) ~ '<|tool_call_end|><|tool_calls_section_end|>' }}"
)
REFUSED = "{{ raise_exception('REASON') }}"


def refusing(test, reason):
    return "{% if " + test + " %}" + REFUSED.replace("REASON", reason) + "{% endif %}"


ALTERNATES = (
    "{% set ns = namespace(role='assistant') %}"
    "{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    + refusing("m.role == ns.role", "roles must alternate")
    + "{% set ns.role = m.role %}{% endfor %}"
)
OWN = {
    "json": TOOLS + turns(HERMES),
    "json in ASCII": TOOLS + turns(HERMES.replace("tojson", "tojson(ensure_ascii=True)")),
    "json, spread": TOOLS + turns(HERMES.replace("tojson", "tojson(indent=2)")),
    "members": TOOLS + turns(CODER),
    "strings": TOOLS + turns(STRINGS),
    "strings, silently": TOOLS + turns(PYTHON),
    "numbered ids": TOOLS + turns(KIMI),
    "short ids": TOOLS + turns(refusing("m.tool_calls and m.tool_calls[0].id | length != 9", "short ids") + HERMES),
    "one call": TOOLS + turns(refusing("(m.tool_calls or []) | length > 1", "one call") + HERMES),
    "silently one call": TOOLS + turns(HERMES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")),
    "calls or content": TOOLS + turns(HERMES, "(m.content if not m.tool_calls else '')"),
    "no calls": TOOLS + turns(""),
    "no results": TOOLS + turns(HERMES).replace("in messages", "in messages if m.role != 'tool'"),
    "no role for results": turns(HERMES, before=refusing("m.role == 'tool'", "no tools")),
    "system first": TOOLS + turns(HERMES, before=refusing("m.role == 'system' and not loop.first", "system first")),
    "one system turn": TOOLS + turns(HERMES, "('' if m.role == 'system' and not loop.first else m.content or '')"),
    "no system": TOOLS + turns(HERMES, before=refusing("m.role == 'system'", "no system")),
    "alternates": ALTERNATES + TOOLS + turns(HERMES, before=refusing("m.role == 'system'", "no system")),
    "needs a question": refusing("'user' not in messages | map(attribute='role')", "no question") + turns(HERMES),
    "no empty answer": turns(HERMES, before=refusing("not (m.content or m.tool_calls)", "empty")),
    "described": "{% if tools %}" + DESCRIBED + "{% endif %}" + turns(HERMES),
    "needs a list of tools": DESCRIBED + turns(HERMES),
    "no role for results, no calls": turns("", before=refusing("m.role == 'tool'", "no tools")),
}  # fmt: skip


def all_templates():
    """All templates by name, including those in the directory that MLX_MTP_TEMPLATES names."""
    directory = os.environ.get("MLX_MTP_TEMPLATES")
    released = sorted(Path(directory).glob("*.jinja")) if directory else []
    return {**OWN, **{file.stem: file.read_text() for file in released}}


@functools.cache
def _tokenizer():
    """The demo's tokenizer, with a token at the beginning that templates may write."""
    plain = plain_tokenizer()
    plain.bos_token = "<|endoftext|>"
    return plain


def tokenizer_of(template):
    """The demo's tokenizer with this chat template, and mlx-lm's parser for it."""
    plain = copy.copy(_tokenizer())
    plain.chat_template = template
    parser = _infer_tool_parser(plain)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None
    marks = (module.tool_call_start, module.tool_call_end, module.parse_tool_call) if module else ()
    return TokenizerWrapper(plain, BPEStreamingDetokenizer, None, None, *marks)


def call(name="write", arguments='{"text": "x"}', id="call_0123456789abcdef01234567"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, id="call_0123456789abcdef01234567"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def turn(role, content="", *calls, **more):
    return {"role": role, "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


PARAMETERS = {"text": "string", "count": "integer"}
OFFERED = [
    {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": {
        "type": "object", "required": ["text"],
        "properties": {name: {"type": kind, "description": kind} for name, kind in PARAMETERS.items()},
    }}} for name in ("write", "run")
]  # fmt: skip
S, U, A = (turn(role, role.upper()) for role in ("system", "user", "assistant"))
TWO_CALLS = turn("assistant", "", call(id="a"), call("run", id="b"))
GIVEN = call(arguments={"text": "x"})
CUT = call(arguments='{"text": "cut he')
# (messages, tools), by what is unusual in them.
CONVERSATIONS = {
    "nothing": ([S, U, A, U], None),
    "tools with a name only": ([U], [{"type": "function", "function": {"name": "now"}}]),
    "two questions": ([S, U, turn("user", "MORE")], None),
    "an answer first": ([A, U], None),
    "an answer first, after a system prompt": ([S, A, U], None),
    "system prompts": ([S, turn("system", "MORE"), U, turn("system", "MID"), A, turn("system", "END")], None),
    "a system prompt only": ([S], None),
    "an empty answer": ([U, turn("assistant"), turn("user", "MORE")], None),
    "an empty answer at the end": ([U, turn("assistant")], None),
    "reasoning only": ([U, turn("assistant", reasoning_content="hm"), turn("user", "MORE")], None),
    "a call": ([S, U, turn("assistant", "", call()), result("RESULT"), A], OFFERED),
    "a call and content": ([U, turn("assistant", "SAID", call()), result("RESULT"), A], OFFERED),
    "a call without an id": ([U, turn("assistant", "", call(id="")), result("RESULT", ""), A], OFFERED),
    "a call without a result": ([U, turn("assistant", "", call()), turn("user", "MORE")], OFFERED),
    "no question": ([S, turn("assistant", "", call()), result("RESULT")], OFFERED),
    "a result without a call": ([U, result("RESULT", "other"), turn("user", "MORE")], OFFERED),
    "two calls": ([U, TWO_CALLS, result("RB", "b"), result("RA", "a")], OFFERED),
    "cut arguments": ([U, turn("assistant", "", CUT), result("RESULT"), A], OFFERED),
    "arguments that are a list": ([U, turn("assistant", "", call(arguments="[1]")), result("RESULT"), A], OFFERED),
    "no arguments": ([U, turn("assistant", "", call(arguments="")), result("RESULT"), A], OFFERED),
    "an object as arguments": ([U, turn("assistant", "", GIVEN), result("RESULT"), A], OFFERED),
}  # fmt: skip
