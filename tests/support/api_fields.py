"""Write `fixtures/api_fields.json`: the request fields that the packages openai and anthropic declare.

Run it in an environment that has both; the tests need neither:

    python -m venv /tmp/apis && /tmp/apis/bin/pip install openai anthropic
    /tmp/apis/bin/python tests/support/api_fields.py
"""

import importlib
import json
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).parent / "fixtures" / "api_fields.json"
# The classes that declare each API's requests; those in `beta` are for the same path.
DECLARED = {
    "chat": [("openai.types.chat.completion_create_params", "CompletionCreateParams")],
    "completions": [("openai.types.completion_create_params", "CompletionCreateParams")],
    "responses": [("openai.types.responses.response_create_params", "ResponseCreateParams")],
    "messages": [
        ("anthropic.types.message_create_params", "MessageCreateParams"),
        ("anthropic.types.message_count_tokens_params", "MessageCountTokensParams"),
        ("anthropic.types.beta.message_create_params", "MessageCreateParams"),
        ("anthropic.types.beta.message_create_params", "ParseMessageCreateParams"),
        ("anthropic.types.beta.message_count_tokens_params", "MessageCountTokensParams"),
    ],
}
# Objects whose fields are listed as well.
OBJECTS = {
    "chat": {"stream_options": [("openai.types.chat", "ChatCompletionStreamOptionsParam")]},
    "completions": {"stream_options": [("openai.types.chat", "ChatCompletionStreamOptionsParam")]},
    "responses": {
        "stream_options": [("openai.types.responses.response_create_params", "StreamOptions")],
        "reasoning": [("openai.types.shared_params.reasoning", "Reasoning")],
        "text": [("openai.types.responses", "ResponseTextConfigParam")],
    },
    "messages": {
        "output_config": [
            ("anthropic.types", "OutputConfigParam"),
            ("anthropic.types.beta", "BetaOutputConfigParam"),
        ],
        "thinking": [
            ("anthropic.types", f"ThinkingConfig{kind}Param") for kind in ("Enabled", "Disabled", "Adaptive")
        ],
        "tool_choice": [("anthropic.types", f"ToolChoice{kind}Param") for kind in ("Auto", "Any", "Tool", "None")],
    },
}


def names(module, start):
    """Return the fields of all classes in a module whose names begin with `start`."""
    found = vars(importlib.import_module(module))
    declared = [each for name, each in found.items() if name.startswith(start) and hasattr(each, "__required_keys__")]
    assert declared or hasattr(importlib.import_module(module), start), f"{module}.{start}"
    declared = declared or [getattr(importlib.import_module(module), start)]
    return {field for each in declared for field in each.__annotations__}


def main():
    fields = {}
    for api, declared in DECLARED.items():
        found = set().union(*(names(*each) for each in declared))
        for parent, objects in OBJECTS[api].items():
            found |= {f"{parent}.{field}" for field in set().union(*(names(*each) for each in objects))}
        fields[api] = sorted(found)
    made = {name: version(name) for name in ("openai", "anthropic")}
    OUT.write_text(json.dumps({"made from": made, "fields": fields}, indent=1) + "\n")


if __name__ == "__main__":
    main()
