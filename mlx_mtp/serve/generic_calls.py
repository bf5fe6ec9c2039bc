"""Describe tools, and a generic format of calls, in the system prompt of a model whose own format is unknown."""

from typing import Any

from .fields import ModelInfo
from .forms import Message, joined_contents
from .template_probes import renders_tools
from .tool_calls.schema import dumps
from .tool_calls.table import GENERIC

CALL = """\
To call a tool, answer with its name and its arguments in this form:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>"""


def with_tools(
    info: ModelInfo, messages: list[Message], tools: list[Any] | None, template: dict[str, Any]
) -> tuple[list[Message], list[Any] | None]:
    """Return (the messages to render, the given tools).

    If there are tools and the model's own format of calls is unknown (`info.tool_format` is GENERIC), the system
    prompt, a new one if there is none, also describes the generic format, and lists the tools if the chat template
    does not print them. Otherwise the messages are unchanged.
    """
    if not tools or info.tool_format is not GENERIC:
        return messages, tools
    listed = "" if renders_tools(info.tokenizer, template) else "\n".join(["Tools:", *map(dumps, tools), "", ""])
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    before = [first["content"]] if first and first["content"] else []
    system = {"role": "system", "content": joined_contents([*before, listed + CALL], "\n\n")}
    return [system, *messages[1 if first else 0 :]], tools
