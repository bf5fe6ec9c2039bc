"""Tool calls as chat templates render them: each template's format is found, and reads them back."""

import json
import re
from types import SimpleNamespace

import grammars
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sweep import SWEEP
from templates import OFFERED, OWN, TOOLS, A, U, all_templates, call, tokenizer_of, turn

from mlx_mtp.serve.answer import Splitter, calls_of, text_of
from mlx_mtp.serve.forms import Conversation
from mlx_mtp.serve.frames import FramedSplitter, frames_of
from mlx_mtp.serve.history import linked
from mlx_mtp.serve.prompts import ESCAPED, ChatTemplate, marks_of
from mlx_mtp.serve.template_traits import renders_tools, traits_of
from mlx_mtp.serve.tool_calls.grammars import OfferedTools, call_grammar
from mlx_mtp.serve.tool_calls.schema import Tools
from mlx_mtp.serve.tool_calls.table import format_of

MARKS = re.compile(r"\]<\]minimax\[>\[|<[^<>]*>|\[[A-Z_]+\]|[{}\":,\n\\]+|call:")
# Released templates whose calls cannot be read back, and why.
UNREAD = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "repeats its instructions after each conversation",
    "Kimi-K2-Instruct": "refuses calls in transformers' sandbox",
    "Kimi-K2-Thinking": "refuses calls in transformers' sandbox",
    "MiroThinker": "reads a variable that is not set",
    "fireworks-ai-llama-3-firefunction-v2": "needs a variable `functions`",
    "google-gemma-2-2b-it": "has no tools",
    "llama-cpp-deepseek-r1": "writes a generator as JSON",
}
FOUND = {}


class Rendered:
    """A template's tool-call format, and its renderings of answers as a model would write them."""

    def __init__(self, template):
        tokenizer = tokenizer_of(template)
        self.format, self.frames = format_of(tokenizer), frames_of(tokenizer)
        self.chat = ChatTemplate(tokenizer, marks_of(tokenizer), traits_of(tokenizer))
        text = self._text(U, A)
        self.start = len(self._text(U))
        self.head, _, self.eos = text[self.start :].partition(A["content"])

    def _text(self, *messages):
        form = Conversation(linked(list(messages), self.chat.traits), OFFERED)
        found = self.chat.rendered(form, {"add_generation_prompt": False})
        return ESCAPED.sub(lambda mark: bytes.fromhex(mark[1]).decode(), found.text) if found.whole else None

    def answer(self, calls):
        """An answer of these calls without the template's marks around it; None if it does not render them all."""
        ids = (f"abcdefg{i:02}" for i in range(len(calls)))
        written = [call(name, json.dumps(given, ensure_ascii=False), next(ids)) for name, given in calls]
        try:
            text = self._text(U, turn("assistant", "", *written))
        except ValueError:
            return None
        if text is None or "<|eom|>" in text:  # one call per message
            return None
        text = text[self.start :]
        if self.frames:  # the marks of frames belong to the answer
            return text
        begins = [i for i, letter in enumerate(self.eos) if letter in "<["]
        text = next((text.removesuffix(self.eos[i:]) for i in [0, *begins] if text.endswith(self.eos[i:])), text)
        begins = [at for mark in self.format.marks if (at := text.find(mark)) >= 0]
        return text[min(begins) :] if begins else text.removeprefix(self.head)


def found(name):
    if name in UNREAD:
        pytest.skip(UNREAD[name])
    if name not in FOUND:
        FOUND[name] = Rendered(all_templates()[name])
    return FOUND[name]


def printing(name):
    """The same; skips a template that prints no calls."""
    rendered = found(name)
    if rendered.format is None or not rendered.chat.traits.calls:
        pytest.skip("prints no calls")
    return rendered


PRINTED = [name for name in all_templates() if not name.startswith("no ") or name in ("no results", "no system")]


@pytest.mark.parametrize("name", PRINTED)
@given(st.data())
@settings(max_examples=20_000 if SWEEP else 6, deadline=None)
def test_calls_are_read_back_as_the_template_renders_them(name, data):
    rendered = printing(name)
    pieces = sorted({*MARKS.findall(rendered.answer([("write", {"text": "x"})])), "a", " ", "\n", "é", "'", "0"})
    text = st.lists(st.sampled_from(pieces), max_size=8).map("".join)
    one = st.fixed_dictionaries({}, optional={"text": text, "count": st.integers()})
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["write", "run"]), one), min_size=1, max_size=2))
    if (written := rendered.answer(calls)) is None:
        return
    cuts = sorted(cut % len(written) for cut in data.draw(st.lists(st.integers(0, 9999), max_size=5)))
    splitter, parts = Splitter(SimpleNamespace(), (), tool_format=rendered.format, tools=OFFERED), []
    splitter = FramedSplitter(rendered.frames, splitter) if rendered.frames else splitter
    for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        parts += splitter.feed(written[start:end])
    parts += splitter.end(cut=False)
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(parts)] == calls, written
    assert name not in OWN or text_of(parts).strip() == ""


@pytest.mark.parametrize("name", PRINTED)
@given(st.data())
@settings(max_examples=2000 if SWEEP else 2, deadline=None)
def test_a_grammar_of_calls_accepts_them_as_the_template_renders_them(name, data):
    rendered = printing(name)
    text = st.lists(st.sampled_from(["a", " ", "\n", "é", "'", '"', "0", "<x>", "</y>", "{"]), max_size=8).map(
        "".join
    )
    one = st.tuples(text, st.none() | st.integers()).map(
        lambda given: {"text": given[0], **({} if given[1] is None else {"count": given[1]})}
    )
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["write", "run"]), one), min_size=1, max_size=2))
    if (written := rendered.answer(calls)) is not None:
        made = call_grammar(
            rendered.chat.tokenizer, rendered.format, OfferedTools(Tools(OFFERED), True, False, ["write", "run"])
        )
        begin = rendered.format.opening(Tools(OFFERED)).search(written).start()
        reading = rendered.format.read(written[begin:], Tools(OFFERED), complete=True)
        assume([(call.name, json.loads(call.arguments)) for call in reading.calls] == calls)  # see the test above
        assert grammars.accepted(made, written[begin:][: reading.end].strip()) is None, written


SPREAD = '{\n    "text": "a"}'


@pytest.mark.parametrize(("name", "arguments"), [("json in ASCII", r'{"text": "\u00e9"}'), ("json, spread", SPREAD)])
def test_a_grammar_has_the_letters_and_spaces_of_the_templates_json(name, arguments):
    for own in (name, "json"):
        rendered = found(own)
        made = call_grammar(
            rendered.chat.tokenizer, rendered.format, OfferedTools(Tools(OFFERED), True, True, ["write"])
        )
        written = f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
        assert (grammars.accepted(made, written) is None) is (own == name)


def test_a_template_without_tools_is_detected_even_if_it_refuses_system_prompts():
    for name, with_tools in (("json", True), ("no system", True), ("described", True)):
        template = OWN[name]
        assert renders_tools(tokenizer_of(template), {}) is with_tools
    assert not renders_tools(tokenizer_of(OWN["no system"].removeprefix(TOOLS)), {})
