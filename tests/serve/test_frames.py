"""Answers in frames are split into reasoning, content and calls without the frames, whatever marks they contain."""

import json
import re
from types import SimpleNamespace

import pytest
from call_renderers import RENDERERS, harmony, harmony_rendered, kimi_k3, muse
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import SWEEP
from templates import OFFERED, tokenizer_of

from mlx_mtp.serve import frames, job
from mlx_mtp.serve.answer import Splitter, TextPart, calls_of, text_of
from mlx_mtp.serve.frames import CONTENT, REASONING, FramedSplitter, add_reasoning_marks, begun_in, frames_of
from mlx_mtp.serve.tool_calls.table import BY_PARSER, format_of, unread_calls


def named(name):
    plain = SimpleNamespace(has_tool_calling=False, chat_template=name, get_vocab=dict)
    return BY_PARSER.get(name) or format_of(plain)


def muse_framed(name, arguments):
    return f"<|start|>assistant to={name}<|message|>{muse(name, arguments)}"


def solar(name, arguments):
    written = json.dumps(arguments, ensure_ascii=False)
    call = f"<|tool_call:begin|>abc<|tool_call:name|>{name}<|tool_call:args|>{written}<|tool_call:end|>"
    return f"<|begin|>assistant<|tool_calls|>{call}<|calls|>"


def command(name, arguments):
    written = json.dumps({"tool_call_id": "0", "tool_name": name, "parameters": arguments}, ensure_ascii=False)
    return f"<|START_ACTION|>[\n    {written}\n]<|END_ACTION|>"


SOLAR_FORMAT = format_of(tokenizer_of("{% for m in messages %}{% for c in m.tool_calls or [] %}<|tool_calls|>"
    "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>"
    "{{ c.function.arguments | tojson }}<|tool_call:end|><|calls|>{% endfor %}{% endfor %}"))  # fmt: skip
HARMONY_FORMAT, START = named(RENDERERS[harmony]), "<|start|>assistant"
# Frames: (tool-call format, renderings of a call, starts of reasoning and of content, their ends)
WRITTEN = {
    frames.HARMONY: (
        HARMONY_FORMAT, (harmony, harmony_rendered), f"{START}<|channel|>analysis<|message|>",
        (f"{START}<|channel|>final<|message|>", f"{START}<|channel|>commentary<|message|>"), "<|end|>", "<|end|>",
    ),
    frames.SOLAR: (
        SOLAR_FORMAT, (solar,), "<|begin|>assistant<|think|>", ("<|begin|>assistant<|content|>",), "<|end|>",
        "<|end|>",
    ),
    frames.MUSE: (
        named("muse_spark"), (muse_framed,), f"{START} to=self<|message|>", (f"{START} to=user<|message|>",),
        "<|eom|>", "<|eom|>",
    ),
    frames.KIMI_K3: (
        named("kimi_k3"), (kimi_k3,), "<|open|>think<|sep|>", ("<|open|>response<|sep|>",), "<|close|>think<|sep|>",
        "<|close|>response<|sep|>",
    ),
    frames.COMMAND: (
        named("<|START_ACTION|>"), (command,), "<|START_THINKING|>", ("<|START_RESPONSE|>", "<|START_TEXT|>"),
        "<|END_THINKING|>", "<|END_RESPONSE|>",
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("framing", WRITTEN, ids=["harmony", "solar", "muse", "kimi_k3", "command"])
CUTS = st.lists(st.integers(0, 9999), max_size=5)


def split(framing, text, cuts=(), *, begun=None, cut=False, tools=OFFERED):
    """The reasoning, the content and the calls of an answer that arrives in pieces, cut at these positions."""
    inner = Splitter(SimpleNamespace(), (), tool_format=WRITTEN[framing][0], tools=tools)
    splitter, parts, at = FramedSplitter(framing, inner, begun), [], 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        parts += splitter.feed(text[at:end])
        at = end
    parts += splitter.end(cut=cut)
    calls = [(call.name, json.loads(call.arguments)) for call in calls_of(parts)]
    return text_of(parts, reasoning=True), text_of(parts), calls


@EVERY
@given(st.data())
@settings(max_examples=20_000 if SWEEP else 12, deadline=None)
def test_an_answer_is_split_without_its_frames(framing, data):
    _, renderers, think, contents, think_end, end = WRITTEN[framing]
    marks = re.findall(r"<[^<>]*>", "".join((think, *contents, think_end, end, renderers[0]("write", {"text": "x"}))))
    text = st.lists(st.sampled_from([*marks, "assistant", "final", "a", " ", "\n", '"']), max_size=8).map("".join)
    ends = re.compile(rf"(?:{framing.end})\s*(?:{framing.end}|{framing.reasoning}|{framing.content}|\Z)")
    plain = text.filter(lambda each: not ends.search(each) and not each.startswith(tuple(WRITTEN[framing][0].marks)))
    reasoning, content = data.draw(text.filter(lambda each: think_end not in each)), data.draw(plain)
    content = content if content.strip() else f"{content}a"  # white space alone before a call is dropped
    calls = data.draw(st.lists(st.fixed_dictionaries({"text": text}), max_size=1))
    written = f"{think}{reasoning}{think_end}" + f"{data.draw(st.sampled_from(contents))}{content}"
    written += "".join(end + data.draw(st.sampled_from(renderers))("write", each) for each in calls)
    written += data.draw(st.sampled_from(["", end] if not calls else [""]))
    found = split(framing, written, data.draw(CUTS))
    begins = any(mark in content for mark in WRITTEN[framing][0].marks)  # a call may start in the content
    assert (begins and found[2]) or found == (reasoning, content, [("write", each) for each in calls]), written


@EVERY
@given(st.data())
@settings(max_examples=20_000 if SWEEP else 12, deadline=None)
def test_a_call_in_frames_is_that_call(framing, data):
    _, renderers, think, contents, think_end, end = WRITTEN[framing]
    renderer = data.draw(st.sampled_from(renderers))
    marks = re.findall(r"<[^<>]*>|\W", "".join((think, *contents, think_end, end, renderer("write", {"text": "x"}))))
    text = st.lists(st.sampled_from([*marks, think, *contents, "a", " ", "\n", '"', "\\"]), max_size=8).map("".join)
    arguments = data.draw(st.fixed_dictionaries({}, optional={"text": text, "count": st.integers()}))
    before = data.draw(st.sampled_from(["", f"{think}hm{think_end}", f"{contents[0]}I write.{end}"]))
    found = split(framing, before + renderer("write", arguments), data.draw(CUTS))
    content = "I write." if "I write" in before else ""
    assert found == ("hm" if "hm" in before else "", content, [("write", arguments)])


def test_what_gpt_oss_writes():
    prompted = [  # after a prompt that ends with <|start|>assistant
        ("<|channel|>final<|message|>Yes.", ("", "Yes.", [])),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
         ("hm", "Yes.", [])),
        ('<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"text":"x"}',
         ("", "", [("write", {"text": "x"})])),
        (' to=functions.write<|channel|>commentary json<|message|>{"text":"x"}<|call|>',
         ("", "", [("write", {"text": "x"})])),
        ('<|channel|>analysis to=functions.run code<|message|>{"text":"x"}', ("", "", [("run", {"text": "x"})])),
        ("<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.run "
         '<|constrain|>json<|message|>{"text":"<|end|>"}<|call|>', ("", "Look.", [("run", {"text": "<|end|>"})])),
        ("<|channel|>final<|message|>It ends with <|end|> and `<|channel|>`.",
         ("", "It ends with <|end|> and `<|channel|>`.", [])),
        ("plain text", ("", "plain text", [])),
    ]  # fmt: skip
    for text, expected in prompted:
        for cuts in ((), range(len(text))):
            assert split(frames.HARMONY, text, cuts) == expected, text


def test_a_prompt_may_end_within_a_frame():
    _, _, think, contents, think_end, end = WRITTEN[frames.HARMONY]
    for prompt, kind in ((think, REASONING), (contents[0] + "be", CONTENT), (contents[0] + end, None), ("", None)):
        assert begun_in(frames.HARMONY, f"<|start|>user<|message|>?<|end|>{prompt}") == kind
    assert split(frames.HARMONY, f"hm{think_end}{contents[0]}Yes.", begun=REASONING) == ("hm", "Yes.", [])


@EVERY
def test_a_hostile_answer_in_frames_is_read_in_bounded_steps(framing):
    _, _, think, contents, _, end = WRITTEN[framing]
    for piece in (end, end + contents[0], think, end + " ", contents[0]):
        text = piece * (8000 // len(piece))
        split(framing, text, range(0, len(text), 7))


TEMPLATE = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}PRINTED{% endfor %}{% endfor %}"
)


def test_marks_of_reasoning_are_found_in_a_template():
    for framing in WRITTEN:
        tokenizer = tokenizer_of(TEMPLATE + "{# " + " ".join(framing.known_by) + " #}")
        assert frames_of(tokenizer) is framing
    tokenizer = tokenizer_of(TEMPLATE + "{# [THINK] [/THINK] #}")
    tokenizer._think_start = None
    add_reasoning_marks(tokenizer)
    assert (tokenizer.think_start, tokenizer.think_end, tokenizer.has_thinking) == ("[THINK]", "[/THINK]", True)
    assert frames_of(tokenizer) is None


def test_why_calls_cannot_be_read():
    unknown = TEMPLATE.replace(
        "PRINTED", "{{ '<<call ' ~ c.function.name ~ ' with ' ~ c.function.arguments ~ '>>' }}"
    )
    for template, reason in ((unknown, "no known format"), (unknown + "{# <tool_call> #}", "renders tool calls")):
        tokenizer = tokenizer_of(template)
        assert reason in (unread_calls(tokenizer, format_of(tokenizer)) or "")


@pytest.mark.parametrize(("ask", "kind"), [
    ({"chat": True}, None), ({"chat": True, "continues": True}, CONTENT),
    ({"chat": True, "thinking": True}, REASONING),
])  # fmt: skip
def test_a_request_is_split_by_the_models_frames(ask, kind):
    tokenizer = SimpleNamespace(has_thinking=True, decode=lambda _: "<|channel|>final<|message|>It beg")
    served = SimpleNamespace(tokenizer=tokenizer, frames=frames.HARMONY, tool_format=HARMONY_FORMAT)
    text = "x" if kind else "<|channel|>final<|message|>x"
    splitter = job._splitter_for(served, job.DecodeRequest([1], **ask))
    assert splitter.feed(text) + splitter.end(cut=False) == [TextPart("x", kind == REASONING)]
    assert type(job._splitter_for(served, job.DecodeRequest([1]))) is Splitter
