"""Requests and chat templates: what a client may not set, and templates that are stopped."""

import inspect
import threading

import pytest
from command_line import call, one_line_error
from transformers import PreTrainedTokenizerBase

from mlx_mtp.checkpoint.template_limits import TemplateStopped
from mlx_mtp.checkpoint.template_process import Processes

CHAT, SECRET = "/v1/chat/completions", "{{ no_such_name() }}"
ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
REFUSED = sorted({*ARGUMENTS, "messages", "conversations", "self"})
USER = [{"role": "user", "content": "What does len do?"}]
BODIES = {
    CHAT: {"messages": USER, "max_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/api/chat": {"messages": USER, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("value", [SECRET, None, {"a": 1}])
def test_arguments_of_the_renderer_are_no_variables(served, name, value):
    answer = served.post(CHAT, json={**BODIES[CHAT], "chat_template_kwargs": {name: value}})
    assert answer.status_code == 400
    assert f"chat_template_kwargs: {name} is no variable" in answer.json()["error"]["message"]
    assert "no_such_name" not in answer.text


@pytest.mark.parametrize("name", sorted({*REFUSED} - {"tools"}))
def test_they_are_no_variables_of_the_command_line_either(name):
    line = one_line_error(call("generate", "-p", "x", "--chat-template-config", f'{{"{name}": "{SECRET}"}}'), 2)
    assert name in line


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"documents": [{"title": "t", "text": "d"}]}, {}])
def test_variables_of_templates_are_passed_on(served, variables):
    answer = served.post(CHAT, json={**BODIES[CHAT], "chat_template_kwargs": variables})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_stopped_template_refuses_the_request_at_once(served, path, monkeypatch):
    assert served.post(path, json=BODIES[path]).status_code == 200
    calls = []

    def render(self, request, limit):
        if threading.current_thread().name != "mlx-mtp engine":  # it renders the next prompts of earlier requests
            calls.append(request)
        raise TemplateStopped("the chat template was stopped: it took longer than 10 seconds")

    monkeypatch.setattr(Processes, "render", render)
    answer = served.post(path, json=BODIES[path])
    assert answer.status_code == 400
    assert "the chat template was stopped: it took longer than 10 seconds" in answer.text
    assert len(calls) == 1  # no other form of the conversation is tried
