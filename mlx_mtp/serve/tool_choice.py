"""Read which tools a request offers, and how the answer may call them: `tool_choice`, `strict`, parallel calls."""

import json
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ..grammar import Gate, Grammar
from ..grammar.forms import either
from .fields import MAX_TOOL_NAME, TOOL, ModelInfo, Refused, check_size, shown, text
from .forms import Message, joined_contents
from .structured import RequiredOutput, check_schema, compiled_within
from .template_traits import renders_tools
from .thinking import switch_of
from .tool_calls.call_format import CallFormat
from .tool_calls.grammars import OfferedTools, call_grammar, call_mark
from .tool_calls.schema import Tools, dumps
from .tool_calls.table import GENERIC

CALL = """\
To call a tool, answer with its name and its arguments in this form:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>"""


class ToolChoice(NamedTuple):
    """The tools of a request and how the answer may call them.

    offered: those in the prompt, in OpenAI's form; None if there are none, or tool_choice is none. names: of those
    that may be called; None: all. forced: the answer must be one call or more. one: it has at most one. strict: names
    of tools whose arguments must fit their schemas; if a call is forced, those of every tool must.
    """

    offered: list[Any] | None = None
    names: tuple[Any, ...] | None = None
    forced: bool = False
    one: bool = False
    strict: tuple[str, ...] = ()

    @property
    def allowed(self) -> list[Any] | None:
        """The offered tools that may be called, in OpenAI's form; None if there are none."""
        return [each for each in self.offered or () if self.names is None or _name(each) in self.names] or None


def openai_choice(body: dict[str, Any], tools: list[dict[str, Any]], strict: Iterable[str]) -> ToolChoice:
    """Return the choice in a body of OpenAI's APIs. tools: the offered functions, in the form of chat completions.

    strict: names of strict tools. Raises Refused for a function without a name, an unknown tool_choice, a tool in it
    that is not offered, a forced call without tools, and parallel_tool_calls that is neither true nor false.
    """
    _check_tools(tools)
    given, one = body.get("tool_choice"), switch_of(body, "parallel_tool_calls") is False
    kind = given.get("type") if isinstance(given, dict) else given or "auto"
    choice = ToolChoice(tools or None, one=one, strict=tuple(strict))
    if kind == "none" and isinstance(given, str):
        return ToolChoice(one=one)
    if kind in ("auto", "required") and not isinstance(given, dict):
        return _checked(choice._replace(forced=kind == "required"), given)
    if kind == "function" and isinstance(given, dict):
        inner = given.get("function")
        name = inner.get("name") if isinstance(inner, dict) else given.get("name")
        if given.get("name") not in (None, name):
            raise Refused("tool_choice: name and function.name are different; send one", param="tool_choice")
        return _checked(choice._replace(names=(name,), forced=True, one=True), given)
    if kind == "allowed_tools" and isinstance(given, dict):
        inner = given["allowed_tools"] if isinstance(given.get("allowed_tools"), dict) else given
        if inner.get("mode", "auto") in ("auto", "required") and isinstance(inner.get("tools"), list):
            names = tuple(_name(each) for each in inner["tools"])
            return _checked(choice._replace(names=names, forced=inner.get("mode") == "required"), given)
    allowed = "the texts auto, none and required, and objects of type function or allowed_tools"
    raise Refused(f"tool_choice={shown(given)}: allowed are {allowed}", param="tool_choice")


def anthropic_choice(body: dict[str, Any], tools: list[dict[str, Any]], strict: Iterable[str]) -> ToolChoice:
    """Return the choice in a body of Anthropic's API. tools: in the form of OpenAI's chat completions.

    strict: names of strict tools. Raises Refused for an unknown tool_choice, a tool in it that is not offered, a
    forced call without tools, and disable_parallel_tool_use that is neither true nor false.
    """
    _check_tools(tools)
    given = body.get("tool_choice") or {"type": "auto"}
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or kind not in ("auto", "any", "tool", "none"):
        allowed = "an object of type auto, any, tool or none"
        raise Refused(f"tool_choice={shown(given)}: allowed is {allowed}", param="tool_choice")
    one = switch_of(given, "disable_parallel_tool_use") is True
    if kind == "none":
        return ToolChoice(one=one)
    names = (given.get("name"),) if kind == "tool" else None
    choice = ToolChoice(tools or None, names, kind in ("any", "tool"), one or kind == "tool", tuple(strict))
    return _checked(choice, given)


def _check_tools(tools: list[dict[str, Any]]) -> None:
    """Raise Refused for a function without a name, or larger than a limit. tools: in the form of chat completions."""
    for tool in tools:
        if not isinstance(function := tool.get("function"), dict) or not text(function, "name"):
            raise Refused("tools: a function needs a name", param="tools")
        if len(name := function["name"]) > MAX_TOOL_NAME:
            what = f"a name of {len(name)} characters; allowed are at most {MAX_TOOL_NAME}"
            raise Refused(f"tools: {what}", param="tools")
        check_size(f"tools: function {name!r}", tool, TOOL, "tools")


def _checked(choice: ToolChoice, given: Any) -> ToolChoice:
    """Return the choice. Raises Refused if it names a tool that is not offered, or forces a call without tools.

    given: the request's tool_choice, for the message.
    """
    offered = [_name(each) for each in choice.offered or ()]
    if choice.forced and not offered:
        raise Refused(f"tool_choice={shown(given)}: the request offers no tools", param="tool_choice")
    for name in choice.names or ():
        if name not in offered:
            raise Refused(f"tool_choice: {shown(name)} is not among the tools", param="tool_choice")
    return choice


def _name(tool: Any) -> Any:
    inner = tool.get("function") if isinstance(tool, dict) else None
    return inner.get("name") if isinstance(inner, dict) else tool.get("name") if isinstance(tool, dict) else None


def call_output(
    info: ModelInfo, choice: ToolChoice, output: RequiredOutput | None, warnings: list[str]
) -> RequiredOutput | None:
    """Return the grammar of an answer with tools; None if it is free. output: the grammar of the content, or None.

    A forced call: the grammar of calls alone. Else, with `output`: that of content or, instead, calls; calls are free
    if no tool is strict and they begin with a fixed mark, and also in a model's frames (`_free_calls`). Else, with
    strict tools: the grammar of calls, from where the answer begins one. Without tools that may be called, or if the
    format of calls is unknown: `output`. warnings: appended to. Raises Refused if a grammar of calls cannot be made.
    """
    allowed, format = choice.allowed, info.tool_format
    if not allowed or format is None:
        return output
    names, content = Tools(allowed).names, None if choice.forced else output
    strict = sorted({*names} & {*(names if choice.forced else choice.strict)})
    if not content and not choice.forced and not strict:
        return None
    # A model that was not trained to call tools may repeat its call without end.
    one = choice.one or format is GENERIC
    try:
        mark, literal = call_mark(info.tokenizer, format)
        if content and (info.frames or (literal and not strict)):
            return _free_calls(info, content, mark if literal else None, strict, warnings)
        whole = choice.forced or content is not None
        how = json.dumps(allowed), whole, one, tuple(strict), content and content.grammar
        grammar = compiled_within(partial(_grammar, info.tokenizer, format, *how), "tools", "tools")
    except Refused:
        raise
    except ValueError as e:
        raise Refused(f"tools: {e}", param="tools") from e
    if content:
        return content._replace(grammar=grammar)
    gate = Gate() if whole else Gate(after=(mark,), patterns=not literal, optional=True, repeats=not one)
    return RequiredOutput(grammar, "tools", "tools", gate, calls=True)


def _free_calls(
    info: ModelInfo, content: RequiredOutput, mark: str | None, strict: list[str], warnings: list[str]
) -> RequiredOutput:
    """Return `content` with a gate: its grammar, or instead tool calls, whose text is free.

    mark: the text with which calls begin; None: none is fixed. If the model writes frames, a call is not in the frame
    of content, so the answer may end without content. strict: names of strict tools, which get one warning.
    """
    if strict:
        what = f"strict has no effect on tools with {content.field}"
        warnings.append(f"{what}: the model's calls are in frames of their own")
    return content._replace(gate=Gate(instead=(mark,) if mark else (), optional=info.frames is not None))


@lru_cache(maxsize=32)
def _grammar(
    tokenizer: Any,
    format: CallFormat,
    tools: str,
    whole: bool,
    one: bool,
    strict: tuple[str, ...],
    content: Grammar | None,
) -> Grammar:
    """Return `call_grammar` of these tools; cached, since clients send the same tools again.

    tools: a list in OpenAI's form, as JSON text. whole: calls are the whole answer. strict: as in `OfferedTools`.
    content: what the answer may be instead. Raises ValueError as `call_grammar`, and if the schemas of strict tools
    together exceed a limit of `check_schema`.
    """
    offer = OfferedTools(Tools(json.loads(tools)), whole, one, strict)
    check_schema({"$defs": {name: offer.tools.parameters(name) for name in strict}})
    calls = call_grammar(tokenizer, format, offer)
    return either(content, calls) if content else calls


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
