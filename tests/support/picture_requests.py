"""Requests with pictures in the forms of the three APIs."""

import base64
import io
import random

from PIL import Image

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def noise(seed, width=40, height=24):
    """A PNG file of random pixels."""
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height)).save(file, "PNG")
    return file.getvalue()


def png(width=16, height=24, colour=0):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def base64_of(data):
    return base64.b64encode(data).decode()


def url_of(data, kind="image/png"):
    return f"data:{kind};base64,{base64_of(data)}"


def part_of(api, data, **more):
    """A picture's part in the form of an API."""
    if api == "messages":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(data)}}
    if api == "responses":
        return {"type": "input_image", "image_url": url_of(data), "detail": "auto", **more}
    return {"type": "image_url", "image_url": {"url": url_of(data), **more}}


def text_of(api, text):
    return {"type": "input_text" if api == "responses" else "text", "text": text}


def body_of(api, *parts, result=()):
    """A question of texts and pictures, after a tool's result of such parts if there are any."""
    parts, result = (
        [text_of(api, p) if isinstance(p, str) else part_of(api, p) for p in each] for each in (parts, result)
    )
    question = {"role": "user", "content": parts}
    name, most = ("input", "max_output_tokens") if api == "responses" else ("messages", "max_tokens")
    if not result:
        return {name: [question], most: 8}
    return {name: [{"role": "user", "content": "Read."}, *results_of(api, result), question], most: 8}


def results_of(api, content):
    if api == "messages":
        use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
        results = [{"type": "tool_result", "tool_use_id": "c", "content": content}]
        return [{"role": "assistant", "content": [use]}, {"role": "user", "content": results}]
    if api == "responses":
        call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
        return [call, {"type": "function_call_output", "call_id": "c", "output": content}]
    call = {"type": "function", "id": "c", "function": {"name": "read", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [calling, {"role": "tool", "tool_call_id": "c", "content": content}]
