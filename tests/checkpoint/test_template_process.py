"""Chat templates in a process of their own: the same texts and errors as here, and limits that stop any template."""

import copy
import json
import os
import signal
import threading
import time

import pytest
from sweep import SWEEP, sampled
from templates import CONVERSATIONS, OWN, A, S, U, all_templates, tokenizer_of, turn

from mlx_mtp.checkpoint import template_process
from mlx_mtp.checkpoint.chat_template import render
from mlx_mtp.checkpoint.template_limits import DEADLINE, MOST_TEXT, TemplateStopped
from mlx_mtp.checkpoint.template_process import PROCESSES, Process, Processes, isolate, processes, rendered_within

PICTURES = turn("user", [{"type": "image"}, {"type": "text", "text": "What?"}])
MORE = {
    "a conversation without messages": ([], None),
    "pictures": ([S, PICTURES, A, turn("user", [{"picture": object()}, {"type": "text", "text": "And?"}])], None),
    "text that JSON escapes": ([turn("user", "\ud800 \x00 \u2028 \U0001f600 \ufdd0 \n \\ \" '")], None),
    "values of all types": ([U], [{"function": {"n": [1, -2.5, 1e300, 2**70, None, True, float("inf")], "m": {}}}]),
    "reasoning": ([U, turn("assistant", "SAID", reasoning_content="WHY"), U], None),
}
OPTIONS = (
    {}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"enable_thinking": False, "x": "y"},
    {"documents": [{"title": "t", "text": "d"}]}, {"documents": 5}, {"unknown": [{"a": ["b", 1]}]},
)  # fmt: skip
PROGRAMS = {
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "time": "{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    "every variable": "{{ messages | tojson }}{{ tools | tojson }}{{ documents }}{{ x }}{{ enable_thinking }}",
    "printed objects": "{{ messages }}{{ tools }}{{ unknown }}{{ messages[0].content }}",
    "an error in two lines": "{{ raise_exception('one\ntwo') }}",
    "an error without a text": "{{ raise_exception('') }}",
    "no such name": "{{ no_such() }}",
    "no template": "{% for %}",
    "surrogates": "{{ '\ud800' }}",
    "sandbox": "{{ messages.append(1) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "named templates": {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools }}"},
    "named, without a default": {"other": "x"},
    "none": None,
}


def outcome(tokenizer, messages, options):
    try:
        return render(tokenizer, messages, options)
    except ValueError as e:  # Python's words for a recursion depend on the call that is too deep
        return str(e).replace(" while calling a Python object", "")


def isolated(tokenizer):
    """A copy of a tokenizer that renders its template in the other process."""
    other = copy.copy(tokenizer)
    other._tokenizer = copy.copy(tokenizer._tokenizer)
    isolate(other)
    return other


@pytest.mark.parametrize("name", [*all_templates(), *PROGRAMS])
def test_texts_and_errors_are_those_of_this_process(name):
    tokenizer, texts = tokenizer_of({**all_templates(), **PROGRAMS}[name]), set()
    other = isolated(tokenizer)
    conversations = MORE if name in PROGRAMS and not SWEEP else {**CONVERSATIONS, **MORE}
    for i, (what, (messages, tools)) in enumerate(conversations.items()):
        for options in sampled([OPTIONS[i % len(OPTIONS)], OPTIONS[-1]], OPTIONS):
            given = {**options, **({} if tools is None else {"tools": tools})}
            here = outcome(tokenizer, messages, given)
            assert outcome(other, messages, given) == here, (what, options)
            texts.add(str(here))
    assert name in PROGRAMS or len(texts) > 5


def test_tokens_are_those_of_this_process():
    tokenizer = tokenizer_of(OWN["json"])
    for options in ({}, {"add_generation_prompt": True}):
        tokens = tokenizer.apply_chat_template([S, U], **options)
        assert isolated(tokenizer).apply_chat_template([S, U], **options) == tokens


def test_templates_that_python_renders_stay_in_this_process(monkeypatch):
    monkeypatch.setattr(template_process, "processes", None)  # would raise if it were called
    module = tokenizer_of("")
    module._chat_template = lambda messages, **options: f"module {len(messages)}"
    own = tokenizer_of("")
    own._tokenizer.__class__ = type(
        "Own", (type(own._tokenizer),), {"apply_chat_template": lambda self, m, **_: "own"}
    )
    for tokenizer, expected in ((module, "module 1"), (own, "own")):
        isolate(tokenizer)
        assert render(tokenizer, [U], {}) == expected


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
SLOW = ("{{ 9**(9**9) }}", NESTED, "{{ (9**(9**7)) | string | length }}", "{{ range(9**5) | sum ** (9**9) }}")
LARGE = (
    "{{ 'a' * 10**11 }}",
    DOUBLING,
    "{{ 'x' | center(10**10) }}",
    "{{ '%99999999999d' % 3 }}",
    "{{ [0] * 10**9 }}",
)
LONG = (f"{{{{ 'a' * {MOST_TEXT + 1} }}}}", NESTED.replace("BODY", "{{ 'x' * 1000 }}"))


def stopped(template, seconds=DEADLINE):
    """Why a template was stopped, in one line."""
    tokenizer = isolated(tokenizer_of(template))
    with rendered_within(seconds), pytest.raises(TemplateStopped) as error:
        render(tokenizer, [U], {})
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("template", [*sampled(LARGE[:2], LARGE), *sampled(LONG[:1], LONG)])
def test_a_large_template_is_stopped_and_its_process_renders_the_next(template):
    limits = ("more than 256 MB of memory", "more than 20,000,000 characters")
    assert any(limit in stopped(template) for limit in (limits if template in LONG else limits[:1]))
    process, tokenizer = processes()._idle[-1], isolated(tokenizer_of(OWN["json"]))
    assert len(render(tokenizer, [turn("user", "\u4e2d" * 2_000_000)], {})) > 2_000_000
    assert processes()._idle[-1] is process is not None


@pytest.mark.parametrize("template", sampled(SLOW[:1], SLOW))
def test_a_slow_template_is_stopped_while_others_are_rendered(template):
    pool, tokenizer, found = processes(), tokenizer_of(OWN["json"]), []
    render(isolated(tokenizer), [U], {})  # a process has started
    thread = threading.Thread(target=lambda: found.append(stopped(template, 0.5)))
    thread.start()
    while len(pool._idle) == 2:  # until the slow template occupies the process
        time.sleep(0.01)
    assert render(isolated(tokenizer), [U], {}) == render(tokenizer, [U], {})
    thread.join()
    assert found == ["the chat template was stopped: it took longer than 0.5 seconds"]


def test_resident_memory_is_limited_where_the_system_does_not(monkeypatch):
    monkeypatch.setattr(template_process, "LIMITS_ITSELF", False)
    monkeypatch.setattr(template_process, "MOST_MEMORY", 200 * 2**20)
    pool = Processes()
    monkeypatch.setattr(template_process, "processes", lambda: pool)
    assert "of memory" in stopped("{% set x = 'a' * (3 * 10**8) %}{{ 9**(9**9) }}")


def test_a_process_ends_with_its_parent_and_is_in_a_session_of_its_own():
    process = Process()
    assert os.getsid(process._process.pid) != os.getsid(0)  # Ctrl-C in the terminal does not reach it
    process._socket.close()  # as the system does when this process ends, also by SIGKILL
    assert process._process.wait(30) != -signal.SIGKILL


@pytest.mark.skipif(not SWEEP, reason="takes DEADLINE seconds")
def test_a_process_that_lost_its_parent_ends_a_loop():
    process = Process()
    request = {"template": SLOW[0], "special_tokens": {}, "messages": [U], "options": {"tokenize": False}}
    process._receive(60)  # it has started
    process._socket.sendall(json.dumps(request).encode() + b"\n")
    process._socket.close()
    assert process._process.wait(DEADLINE + 30) == -signal.SIGALRM


def test_requests_wait_only_for_a_while_if_all_processes_are_occupied():
    for _ in range(PROCESSES):
        processes()._free.acquire()
    try:
        assert "waited longer than 0.01 seconds" in stopped("{{ 1 }}", 0.01)
    finally:
        processes()._free.release(PROCESSES)
