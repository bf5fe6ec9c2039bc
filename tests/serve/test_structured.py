"""Structured output over HTTP: every API, the text of `generate`, reasoning, cuts, errors, and others' answers."""

import functools
import json
import re
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grammars
import pytest
from hostile_schemas import HOSTILE
from sweep import SWEEP

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.serve import output_format, structured

QUESTION = {"role": "user", "content": "What does len do?"}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
GIVEN = {CHAT: {"messages": [QUESTION]}, COMPLETIONS: {"prompt": "Answer:"}, RESPONSES: {"input": "x"}}
GIVEN[MESSAGES] = GIVEN[CHAT]
FLAGS = {
    "type": "object",
    "properties": {"name": {"enum": ["len", "sum"]}, "n": {"enum": [1, None]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def as_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema, **more}}


def body_of(path, schema, **more):
    """Return a request for an answer that fits a schema, in the form of the API's own client."""
    if path == COMPLETIONS:
        return {"prompt": "Answer:", "guided_json": schema, **more}
    if path == RESPONSES:
        flat = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
        return {"input": QUESTION["content"], "text": {"format": flat}, **more}
    if path == MESSAGES:
        own = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        return {"messages": [QUESTION], **own, **more}
    return {"messages": [QUESTION], "response_format": as_format(schema), **more}


def data(response):
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def content_of(path, body):
    """Return the content of a response's body, and the reason of its end."""
    if path == CHAT:
        return body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
    if path == COMPLETIONS:
        return body["choices"][0]["text"], body["choices"][0]["finish_reason"]
    if path == RESPONSES:
        (message,) = [item for item in body["output"] if item["type"] == "message"]
        return message["content"][0]["text"], (body["incomplete_details"] or {"reason": body["status"]})["reason"]
    return "".join(block.get("text", "") for block in body["content"]), body["stop_reason"]


def streamed_of(path, events):
    """Return the same of a stream's events."""
    if path == RESPONSES:
        return content_of(path, events[-1]["response"])
    if path == MESSAGES:
        texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        return "".join(texts), next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
    choices = [event["choices"][0] for event in events]
    texts = [c["delta"].get("content") or "" if path == CHAT else c["text"] for c in choices]
    return "".join(texts), choices[-1]["finish_reason"]


@pytest.fixture(scope="module")
def served(one_layer):
    return one_layer


@pytest.fixture(scope="module")
def truth(load_one_layer):
    """The text of the Python API under a grammar, from a second copy of the model."""
    model, tokenizer = load_one_layer()

    @functools.cache
    def answer(made=None, prompt=None, n=40, **options):
        if prompt is None:
            prompt = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True)
        return mlx_mtp.generate(
            model, tokenizer, prompt, max_tokens=n, grammar=made, kv_group_size=32, num_draft_tokens=0, **options
        )

    return answer


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_is_that_of_generate_streamed_or_not(served, truth, path):
    prompt = "Answer:" if path == COMPLETIONS else None
    want = truth(grammar.json_schema(FLAGS), prompt, temp=0.9, seed=3)
    sampled = body_of(path, FLAGS, max_tokens=40, temperature=0.9, seed=3)
    ends = {CHAT: "stop", COMPLETIONS: "stop", RESPONSES: "completed", MESSAGES: "end_turn"}
    assert content_of(path, served.post(path, json=sampled).json()) == (want, ends[path])
    assert streamed_of(path, data(served.post(path, json={**sampled, "stream": True}))) == (want, ends[path])
    assert set(json.loads(want)) == set(FLAGS["required"])


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_is_cut_reports_it_with_the_partial_text(served, path):
    ends = {CHAT: "length", COMPLETIONS: "length", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
    cut = body_of(path, FLAGS, max_tokens=5)
    text, reason = content_of(path, served.post(path, json=cut).json())
    assert reason == ends[path]
    assert text.startswith("{")
    assert (text, reason) == streamed_of(path, data(served.post(path, json={**cut, "stream": True})))
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(text)


def is_object(text):
    return isinstance(json.loads(text), dict)


def is_free(text):
    return not text.startswith("{")


def begins_json(text):
    return grammars.compiled_bytes(grammar.json()).try_consume_tokens([*text.encode()]) == len(text.encode()) > 0


def has_flags(text):
    return {*json.loads(text)} == {*FLAGS["required"]}


def in_line(text):
    return has_flags(text) and "\n" not in text


def matches(pattern):
    return re.compile(pattern).fullmatch


WITH_OPTIONS = {**FLAGS, "x-guidance": {"whitespace_pattern": "_+", "lenient": True}}
SHORT = {"logit_bias": {"93": 60, "95": 60}}  # of "{" and "}", by which a random model ends an object soon
FORMS = [
    (CHAT, {"response_format": {"type": "json_object"}, **SHORT}, is_object),
    (CHAT, {"response_format": as_format(FLAGS, strict=False)}, has_flags),
    (CHAT, {"response_format": as_format({}), "max_tokens": 12}, begins_json),
    (CHAT, {"response_format": {"type": "text"}, "max_tokens": 8}, is_free),
    (COMPLETIONS, {"response_format": {"type": "json_object"}, **SHORT}, is_object),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}, **SHORT}, is_object),
    (RESPONSES, {"text": {"format": {"type": "text"}}, "max_output_tokens": 8}, is_free),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": FLAGS}}, has_flags),
    (MESSAGES, {"output_config": {"effort": "high"}, "max_tokens": 8}, is_free),
    (CHAT, {"guided_json": json.dumps(FLAGS)}, has_flags),
    (CHAT, {"guided_regex": "[a-c]{3}"}, matches("[a-c]{3}")),
    (CHAT, {"guided_choice": ["yes", 'no "\n']}, matches('yes|no "\n')),
    (CHAT, {"guided_grammar": 'start: "a" b~3\nb: /[0-4]/'}, matches("a[0-4]{3}")),
    (COMPLETIONS, {"structured_outputs": {"regex": "x[yz]"}}, matches("x[yz]")),
    (CHAT, {"structured_outputs": {"choice": ["left"]}}, matches("left")),
    (CHAT, {"structured_outputs": {"json": FLAGS, "disable_any_whitespace": True}}, in_line),
    (CHAT, {"guided_json": FLAGS, "guided_whitespace_pattern": "[ ]?"}, in_line),
    (CHAT, {"guided_json": WITH_OPTIONS}, has_flags),
]


@pytest.mark.parametrize(("path", "fields", "fits"), FORMS)
def test_every_form_of_a_request(served, path, fields, fits):
    response = served.post(path, json={**GIVEN[path], "max_tokens": 40, "temperature": 1.0, "seed": 1, **fields})
    assert response.status_code == 200, response.text
    assert fits(content_of(path, response.json())[0])


INNER = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
FLAT = {"type": "json_schema", "schema": {"not": {}}}
CHATTED = "response_format.json_schema.schema"
SCHEMAS = [  # of `response_format`, and how the error begins
    ({"not": {}}, f"{CHATTED}.not: "),
    (INNER, f"{CHATTED}.properties.a.not: "),
    ({"oneOf": [{}, {}]}, f"{CHATTED}.oneOf: "),
    ({"pattern": "(?=a)"}, f"{CHATTED}.pattern: "),
    ({"propertyNames": {"format": "date"}}, f"{CHATTED}.propertyNames: "),
    ({"$ref": "http://127.0.0.1:1/a"}, f"{CHATTED}.$ref: "),
    ({"$ref": "#"}, f"{CHATTED}: no finite JSON value fits it"),
    (False, f"{CHATTED}: "),
    ([1], f"{CHATTED}: "),
    (None, f"{CHATTED}: missing"),
]
REFUSED = [
    *((CHAT, {"response_format": as_format(schema)}, words) for schema, words in SCHEMAS),
    (CHAT, {"response_format": as_format({"not": {}}, strict=False)}, f"{CHATTED}.not: "),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format: type 'xml'"),
    (CHAT, {"response_format": 5}, "response_format=5"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.schema: missing"),
    (COMPLETIONS, {"response_format": FLAT}, "response_format.schema.not: "),
    (RESPONSES, {"text": {"format": FLAT}}, "text.format.schema.not: "),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format: type 'grammar'"),
    (MESSAGES, {"output_config": {"format": FLAT}}, "output_config.format.schema.not: "),
    (MESSAGES, {"output_config": {"format": {"type": "json"}}}, "output_config.format: type 'json'"),
    (MESSAGES, {"output_format": FLAT, "output_config": {"format": FLAT}}, "output_format.schema: cannot be used"),
    (CHAT, {"guided_json": "{"}, "guided_json: "),
    (CHAT, {"guided_json": {"not": {}}}, "guided_json.not: "),
    (CHAT, {"guided_regex": "("}, "guided_regex: "),
    (CHAT, {"guided_regex": 5}, "guided_regex=5"),
    (CHAT, {"guided_choice": []}, "guided_choice=[]"),
    (CHAT, {"guided_choice": ["a", 1]}, "guided_choice="),
    (CHAT, {"guided_grammar": "start: b"}, "guided_grammar: "),
    (CHAT, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: "),
    (CHAT, {"guided_json": {}, "guided_regex": "a"}, "guided_regex: cannot be used with guided_json"),
    (CHAT, {"ebnf": "root ::= 1"}, "ebnf: "),
]


@pytest.mark.parametrize(("path", "fields", "words"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_key(served, path, fields, words):
    response = served.post(path, json={"max_tokens": 5, "stream": True, **GIVEN[path], **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(words)
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    named = "text.format" if path == RESPONSES else next(iter(fields)) if len(fields) == 1 else words.split(":")[0]
    assert path == MESSAGES or error["param"] == named


def test_a_begun_answer_and_its_continuation_fit_together(served):
    begun = {"role": "assistant", "content": '{"name": "len"'}
    body = {"max_tokens": 40, "response_format": as_format(FLAGS)}
    whole = served.post(CHAT, json={"messages": [QUESTION, begun], **body}).json()
    rest = content_of(CHAT, whole)[0]
    assert json.loads(begun["content"] + rest)["name"] == "len"
    other = {"role": "assistant", "content": '{"other'}
    refused = served.post(CHAT, json={"messages": [QUESTION, other], **body})
    assert (refused.status_code, "begun answer" in refused.text) == (400, True)


def test_choices_and_requests_that_mix_have_the_texts_that_they_have_alone(served, truth):
    made, digits = grammar.json_schema(FLAGS), grammar.regex("[0-9]{20}")
    sampled = {"temperature": 1.0, "max_tokens": 12, "messages": [QUESTION]}
    bodies = [
        {"response_format": as_format(FLAGS), "n": 2, "seed": 7},
        {"guided_regex": "[0-9]{20}", "seed": 8},
        {"seed": 9},
        {"response_format": as_format(FLAGS), "seed": 10, "logit_bias": {"300": 1}, "presence_penalty": 0.1},
    ]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda body: served.post(CHAT, json={**sampled, **body}).json(), bodies)]
    texts = [[c["message"]["content"] for c in each["choices"]] for each in found]
    assert texts[0] == [truth(made, n=12, temp=1.0, seed=seed) for seed in (7, 8)]
    assert texts[1] == [truth(digits, n=12, temp=1.0, seed=8)]
    assert texts[2] == [truth(n=12, temp=1.0, seed=9)]
    assert found[3]["choices"] == served.post(CHAT, json={**sampled, **bodies[3]}).json()["choices"]


def test_other_ranks_compile_the_same_constraint(served):
    info, gate = served.service.info, grammar.Gate(after=("</think>", "b"), instead=("c",), optional=True)
    made = grammar.compiled(grammar.json_schema(FLAGS), info.tokenizer, info.vocab_size).behind(gate)
    sent = json.loads(json.dumps(structured.as_json(made)))
    found = structured.from_json(sent, info.tokenizer, info.vocab_size)
    assert (found.grammar, found.gate, len(found.styles)) == (made.grammar, gate, 2)
    assert structured.from_json(structured.as_json(None), None, 0) is None


def test_statistics_count_forced_tokens_and_masks(served):
    def counted():
        lines = (line.split() for line in served.get("/metrics").text.splitlines() if "mlx_mtp:grammar" in line)
        return {name: float(value) for name, value in (line for line in lines if line[0] != "#")}

    before = counted()
    usage = served.post(CHAT, json=body_of(CHAT, FLAGS, max_tokens=40)).json()["usage"]["mlx_mtp"]
    added = {name.removeprefix("mlx_mtp:grammar_"): value - before[name] for name, value in counted().items()}
    assert usage["grammar_n"] >= usage["grammar_n_accepted"] > 0
    assert added["num_draft_tokens_total"] == usage["grammar_n"]
    assert added["num_accepted_tokens_total"] == usage["grammar_n_accepted"]
    assert added["mask_seconds_total"] == pytest.approx(usage["mask_seconds"], abs=1e-6)
    assert usage["mask_seconds"] > 0


def test_a_grammar_in_error_ends_its_answer_with_an_error_and_no_other(served, monkeypatch):
    """Above the limits of its work the mask would be "end of text", which must not look like an answer."""
    from mlx_mtp.grammar.matcher import Matcher

    def fill(matcher, masks, *more, **named):
        if matcher.size > 3:
            raise grammar.GrammarError("grammar: too many items")
        return whole(matcher, masks, *more, **named)

    whole = Matcher.fill
    monkeypatch.setattr(Matcher, "fill", fill)
    free = {"messages": [QUESTION], "max_tokens": 40}
    with ThreadPoolExecutor(8) as pool:
        other = pool.submit(served.post, CHAT, json=free)
        plain = {path: pool.submit(served.post, path, json=body_of(path, FLAGS, max_tokens=40)) for path in PATHS}
        streams = {
            path: pool.submit(served.post, path, json=body_of(path, FLAGS, max_tokens=40, stream=True))
            for path in PATHS
        }
    for path in PATHS:
        response = plain[path].result()
        assert (response.status_code, response.json()["error"]["message"]) == (400, "grammar: too many items")
        assert "grammar: too many items" in streams[path].result().text
        assert '"stop"' not in streams[path].result().text
        assert '"end_turn"' not in streams[path].result().text
    monkeypatch.undo()
    assert other.result().json()["choices"] == served.post(CHAT, json=free).json()["choices"]


LIMITED = {  # hostile schemas that are refused without being compiled
    "3000 names": f"{CHATTED}.properties: ",
    "3000 required names": f"{CHATTED}: the JSON has ",
    "long value": f"{CHATTED}.enum: ",
    "fixed repetition": f"{CHATTED}.pattern: ",
}


def test_hostile_schemas_are_refused_or_answered_while_others_are_answered(served):
    """Each is a 400 that names the field, or the start of an answer; in bounded memory, without a fetch."""
    free = {"messages": [QUESTION], "max_tokens": 8, "temperature": 1.0, "seed": 5}
    want = content_of(CHAT, served.post(CHAT, json=free).json())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(1) as pool:
        for i, (name, schema) in enumerate(HOSTILE.items()):
            other = pool.submit(served.post, CHAT, json={**free, "stream": True}) if SWEEP or i % 8 == 5 else None
            body = {"messages": [QUESTION], "max_tokens": 1, "response_format": as_format(schema)}
            response = served.post(CHAT, json=body)
            assert other is None or streamed_of(CHAT, data(other.result())) == want, name
            if response.status_code == 200:
                assert content_of(CHAT, response.json())[1] in ("length", "stop"), name
                continue
            assert response.status_code == 400, name
            message = response.json()["error"]["message"]
            words = LIMITED.get(name, "the body is nested" if message.startswith("the body") else CHATTED)
            assert message.startswith(words), (name, message)
    assert len(HOSTILE) == 48
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000 * (1024 if sys.platform == "darwin" else 1)


def test_a_grammar_that_compiles_too_long_is_refused_while_others_are_answered(served, monkeypatch):
    """At most two compile at a time; those that are known need no turn."""

    def waits(value, **how):
        if "slow" in value:
            ended.wait(60)
        return made(value, **how)

    ended, free, made = threading.Event(), {"messages": [QUESTION], "max_tokens": 5}, output_format.MADE["json"]
    monkeypatch.setitem(output_format.MADE, "json", waits)
    known = {**free, "response_format": as_format(FLAGS)}
    assert served.post(CHAT, json=known).status_code == 200
    monkeypatch.setattr(structured, "MAX_SECONDS", 0.3)
    try:
        with ThreadPoolExecutor(2) as pool:
            bodies = ({**free, "response_format": as_format({"slow": i})} for i in (1, 2))
            found = [*pool.map(lambda body: served.post(CHAT, json=body), bodies)]
        assert [(each.status_code, "to compile" in each.text) for each in found] == [(400, True)] * 2
        assert [served.post(CHAT, json=body).status_code for body in (free, known)] == [200, 200]
        assert served.post(CHAT, json={**free, "guided_regex": "unseen"}).status_code == 503
    finally:
        ended.set()
    while not structured.COMPILERS.acquire(timeout=0.1):  # the abandoned threads end
        pass
    structured.COMPILERS.release()


LENGTHS = {"^abc$": 5, "a{1000}": 1000, "a{3,5}b+": 4, "(ab{3}){2}": 8, "((a{100}){100}){100}": 10**6, "a?b*": 0}
LENGTHS |= {"a{7}?": 7, "ab|cde|f": 3, "x(?:ab|cde){4}": 13, r"[a-z\]]{5}\d{4}": 9, "[]a]{6}": 6, "((": 0, ")){5}": 6}


@pytest.mark.parametrize(("pattern", "length"), LENGTHS.items())
def test_the_shortest_match_of_a_pattern_is_estimated(pattern, length):
    assert structured.least_length(pattern) == length
