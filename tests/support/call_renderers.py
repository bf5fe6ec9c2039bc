"""Tool calls as the chat templates of each format render them."""

import json


def compact(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def python_literals(value):
    """A value as jinja writes it: scalars with its `string` filter, containers with `tojson`."""
    return compact(value) if isinstance(value, str | dict | list) else str(value)


def hermes(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def qwen_coder(name, arguments):
    inside = "".join(f"<parameter={k}>\n{python_literals(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name, arguments):
    inside = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{compact(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{inside}</tool_call>"


def glm_47(name, arguments):
    inside = "".join(f"<arg_key>{k}</arg_key><arg_value>{compact(v)}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{inside}</tool_call>"


def longcat(name, arguments):
    inside = "".join(
        f"<longcat_arg_key>{k}</longcat_arg_key>\n<longcat_arg_value>{compact(v)}</longcat_arg_value>\n"
        for k, v in arguments.items()
    )
    return f"<longcat_tool_call>{name}\n{inside}</longcat_tool_call>"


def minimax(name, arguments):
    inside = "".join(f'<parameter name="{k}">{compact(v)}</parameter>\n' for k, v in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inside}</invoke>\n</minimax:tool_call>'


def minimax_m3(name, arguments):
    inside = _nested({k: v for k, v in arguments.items() if v is not None})
    return f'{M3}<tool_call>\n{M3}<invoke name="{name}">{inside}{M3}</invoke>\n{M3}</tool_call>'


M3 = "]<]minimax[>["


def _nested(value):
    if isinstance(value, dict):
        return "".join(f"{M3}<{k}>{_nested(v)}{M3}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{M3}<item>{_nested(v)}{M3}</item>" for v in value)
    return json.dumps(value) if isinstance(value, bool) else str(value)


def minicpm(name, arguments):
    inside = "".join(f'<param name="{k}">{_cdata(compact(v))}</param>' for k, v in arguments.items())
    return f'<function name="{name}">{inside}</function>'


def _cdata(text):
    return f"<![CDATA[{text}]]>" if set(text) & set("<&\n") else text


def muse(name, arguments):
    inside = "".join(f'<atem:parameter name="{k}">{compact(v)}</atem:parameter>\n' for k, v in arguments.items())
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inside}</atem:invoke>\n</atem:function_calls>'


def kimi_k3(name, arguments):
    inside = "".join(
        f'<|open|>argument key="{k}" type="{"string" if isinstance(v, str) else "json"}"<|sep|>{compact(v)}'
        "<|close|>argument<|sep|>"
        for k, v in arguments.items()
    )
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


def dsml(name, arguments):
    inside = "".join(
        f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{compact(v)}</｜DSML｜parameter>\n'
        for k, v in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'
    return f"<｜DSML｜function_calls>\n{call}</｜DSML｜function_calls>"


def llama(name, arguments):
    return f"<|python_tag|>{json.dumps({'name': name, 'parameters': arguments}, ensure_ascii=False)}<|eom_id|>"


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{compact(arguments)}"


def mistral_list(name, arguments):
    return (
        f"[TOOL_CALLS]{json.dumps([{'name': name, 'arguments': arguments, 'id': '123456789'}], ensure_ascii=False)}"
    )


def kimi_k2(name, arguments):
    call = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{compact(arguments)}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def harmony(name, arguments):
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{compact(arguments)}<|call|>"


def harmony_rendered(name, arguments):
    call = f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{compact(arguments)}"
    return f"{call}<|call|>"


def deepseek_v3(name, arguments):
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(arguments)}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v31(name, arguments):
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def gemma_4(name, arguments):
    return f"<|tool_call>call:{name}{_gemma(arguments, '<|' + chr(34) + '|>')}<tool_call|>"


def function_gemma(name, arguments):
    return f"<start_function_call>call:{name}{_gemma(arguments, '<escape>')}<end_function_call>"


def _gemma(value, quote):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(v, quote) for v in value) + "]"
    return json.dumps(value)


def pythonic(name, arguments):
    inside = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    return f"<|tool_call_start|>[{name}({inside})]<|tool_call_end|>"


# (renderer, the format's name in `BY_PARSER`, or a mark of its chat template)
RENDERERS = {
    hermes: "json_tools", qwen_coder: "qwen3_coder", glm: "glm47", glm_47: "glm47", longcat: "longcat",
    minimax: "minimax_m2", minimax_m3: M3, minicpm: "minicpm5", muse: "muse_spark", kimi_k3: "kimi_k3",
    dsml: "<｜DSML｜", llama: "<|python_tag|>", mistral: "mistral", mistral_list: "mistral", kimi_k2: "kimi_k2",
    deepseek_v3: "<｜tool▁calls▁begin｜>", deepseek_v31: "<｜tool▁calls▁begin｜>", gemma_4: "gemma4",
    function_gemma: "function_gemma", pythonic: "pythonic", harmony: "<|channel|>commentary",
    harmony_rendered: "<|channel|>commentary",
}  # fmt: skip
