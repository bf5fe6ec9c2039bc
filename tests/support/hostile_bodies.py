"""Hostile requests by what they send: connections, structures of bodies, long texts, token ids, unread streams."""

import base64
import gzip
import json
import zlib
from collections.abc import Callable

from hostile_wire import CHATS, PATHS, Attack, Dice, ask, asked, post

MB = 1_000_000
Make = Callable[[Dice], Attack]
MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "</s>",
    "[INST]",
    "<think>",
    "<tool_call>",
    "<image>",
    "<pad>",
)


def raw(*pieces: bytes, wait: float = 0.0, leave: float = 3.0) -> Attack:
    """Return an attack of bytes, each piece after `wait` seconds; the client stays for `leave` seconds."""
    return Attack(tuple((wait if i else 0.0, data) for i, data in enumerate(pieces)), leave=leave)


def head(*lines: str, first: str = "POST /v1/chat/completions HTTP/1.1") -> bytes:
    return "\r\n".join((first, "Host: localhost", "Content-Type: application/json", *lines, "", "")).encode("latin-1")


ONE = json.dumps(asked("chat")).encode()
LENGTH = f"Content-Length: {len(ONE)}"
CHUNKED = "Transfer-Encoding: chunked"


def chunk(data: bytes, size: str = "") -> bytes:
    return (size or f"{len(data):x}").encode() + b"\r\n" + data + b"\r\n"


def get(path: str, *lines: str, method: str = "GET") -> Attack:
    return raw(head("Connection: close", *lines, first=f"{method} {path} HTTP/1.1"))


SOCKETS: dict[str, Make] = {
    "slow headers": lambda d: raw(*[b"GET / HTTP/1.1\r\n", *[b"X-A: b\r\n"] * 12], wait=d.uniform(0.05, 0.3)),
    "headers without an end": lambda d: raw(head()[:-2], leave=d.uniform(0.5, 3)),
    "slow body": lambda d: raw(head(LENGTH), *[ONE[i : i + 9] for i in range(0, 90, 9)], wait=d.uniform(0.05, 0.3)),
    "body without an end": lambda d: raw(head("Content-Length: 30000000"), ONE, leave=d.uniform(0.5, 3)),
    "slow chunks": lambda d: raw(head(CHUNKED), *[chunk(b" ")] * 12, wait=d.uniform(0.05, 0.3)),
    "length and chunks": lambda d: raw(head(LENGTH, CHUNKED) + chunk(ONE) + b"0\r\n\r\n")._replace(answers=(400,)),
    "chunks and length": lambda d: raw(head(CHUNKED, "Content-Length: 3") + chunk(ONE) + b"0\r\n\r\n" + head()),
    "two lengths": lambda d: raw(head(LENGTH, "Content-Length: 2") + ONE),
    "strange length": lambda d: raw(
        head(f"Content-Length: {d.choice(['-1', '1e3', '+5', '0x10', '9' * 40, ''])}") + ONE
    ),
    "strange chunks": lambda d: raw(
        head(CHUNKED) + chunk(ONE, d.choice(["zz", "-1", "f" * 30, "1;" + "x" * 99_999])) + b"0\r\n\r\n"
    ),
    "chunks of one byte": lambda d: raw(head(CHUNKED) + chunk(b" ") * d.size(MB) + b"0\r\n\r\n", leave=20),
    "strange coding": lambda d: raw(head(f"Transfer-Encoding: {d.choice(['gzip', 'chunked, gzip', 'x', ''])}") + ONE),
    "pipelined": lambda d: raw(head(LENGTH).join([b"", *[ONE] * d.size(60)]), leave=5),
    "pipelined gets": lambda d: raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * d.size(20_000), leave=5),
    "long header": lambda d: raw(head("X-A: " + "a" * d.size(MB))),
    "many headers": lambda d: raw(head(*[f"X-{i}: {i}" for i in range(d.size(100_000))])),
    "long path": lambda d: get("/" + "a/" * d.size(100_000)),
    "path of another place": lambda d: get(
        d.choice(
            ["/page/../../../../etc/passwd", "/page/%2e%2e/%2e%2e/app.py", "/v1/models/../../x", "//", "/%00", "*"]
        )
    ),
    "method": lambda d: get(
        "/v1/chat/completions", method=d.choice(["PUT", "TRACE", "CONNECT", "get", "A" * 999, ""])
    ),
    "strange host": lambda d: raw(
        head(first="GET / HTTP/1.1").replace(
            b"localhost", d.choice([b"\xff", b"[::", b"a" * 9999, b"", b"[fe80::1%x]"])
        )
    ),
    "bytes": lambda d: raw(d.randbytes(d.size(100_000))),
    "version": lambda d: raw(head(first=f"GET / HTTP/{d.choice(['0.9', '2.0', '1.9', 'x', ''])}")),
    "upgrade": lambda d: raw(head("Upgrade: websocket", "Connection: Upgrade", first="GET / HTTP/1.1")),
    "expects to continue": lambda d: raw(head(LENGTH, "Expect: 100-continue"), ONE, wait=0.2),
    "idle connections": lambda d: raw(b"G", leave=d.uniform(0.5, 2))._replace(copies=d.size(150)),
    "idle bodies": lambda d: raw(head("Content-Length: 9999"), leave=d.uniform(0.5, 2))._replace(copies=d.size(150)),
}


def body(d: Dice, data: bytes, **headers: str) -> Attack:
    return post(PATHS[d.choice(["chat", "responses", "messages", "ollama", "completions", "count"])], data, **headers)


def around(value: bytes, field: str = "messages") -> bytes:
    return b'{"max_tokens": 2, "' + field.encode() + b'": ' + value + b"}"


def listed(d: Dice, each: bytes, most: int) -> Attack:
    """Return a body whose messages, input, metadata, tools or stop repeat a value."""
    field = d.choice(["messages", "input", "metadata", "tools", "stop", "logit_bias", "x"])
    return body(d, around(b"[" + (each + b",") * (d.size(most) - 1) + each + b"]", field))


def squeezed(d: Dice, coding: str, megabytes: int) -> Attack:
    """Return a body of spaces around a request, compressed. megabytes: its size afterwards."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31 if coding.endswith("gzip") else 15)
    begin = packer.compress(b" ") + packer.flush(zlib.Z_FULL_FLUSH)
    spaces = packer.compress(b" " * MB) + packer.flush(zlib.Z_FULL_FLUSH)  # needs nothing of what precedes it
    data = (
        begin + spaces * d.size(megabytes) + packer.compress(ONE) + packer.flush()
    )  # only a bomb's checksum is wrong
    if coding == "gzip, gzip":
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        data = packer.compress(data) + packer.flush()
    return body(d, data, Content_Encoding=coding)


BODIES: dict[str, Make] = {
    "empty lists": lambda d: listed(d, b"[]", 8 * MB),
    "empty objects": lambda d: listed(d, b"{}", 8 * MB),
    "nulls": lambda d: listed(d, b"null", 5 * MB),
    "numbers": lambda d: listed(d, b"1", 12 * MB),
    "floats": lambda d: listed(d, b"1.5e3", 4 * MB),
    "short texts": lambda d: listed(d, b'"a"', 6 * MB),
    "lists of lists": lambda d: listed(d, b"[[[[[]]]]]", 2 * MB),
    "deep": lambda d: body(d, around(b"[" * (n := d.size(10 * MB)) + b"]" * n)),
    "deep objects": lambda d: body(d, around(b'{"a":' * (n := d.size(4 * MB)) + b"1" + b"}" * n)),
    "unfinished": lambda d: body(d, around(b"[" * d.size(20 * MB))[:-1]),
    "doubled keys": lambda d: body(d, b"{" + b'"messages": [1],' * d.size(MB) + b'"a": 1}'),
    "many keys": lambda d: body(d, json.dumps(dict.fromkeys(range(d.size(MB)))).encode()),
    "many inner keys": lambda d: ask(d.choice(CHATS), metadata=dict.fromkeys(range(d.size(MB)))),
    "long key": lambda d: body(d, around(b"1", "k" * d.size(25 * MB))),
    "long number": lambda d: body(d, around(b"1" * d.size(25 * MB))),
    "long fraction": lambda d: body(d, around(b"0." + b"1" * d.size(25 * MB))),
    "long exponent": lambda d: body(d, around(b"1e" + b"9" * d.size(MB))),
    "lone surrogate": lambda d: ask(d.choice(CHATS), d.choice(["\ud800", "\udfff a", "a\ud83d"])),
    "UTF-16": lambda d: body(d, ONE.decode().encode(d.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig"]))),
    "no UTF-8": lambda d: body(d, ONE.replace(b"len", b"\xff\xfe\x00" * d.size(1000))),
    "no JSON": lambda d: body(
        d, d.choice([b"", b"{", b"NaN", b"'a'", b"{}" * d.size(MB), b"\0" * d.size(MB), b"[1"])
    ),
    "no object": lambda d: body(d, d.choice([b"1", b"null", b"true", b'"a"', b"[" + ONE + b"]"])),
    "spaces around": lambda d: body(d, b" " * d.size(15 * MB) + ONE + b"\n" * d.size(15 * MB)),
    "gzip": lambda d: body(d, gzip.compress(ONE), Content_Encoding="gzip")._replace(answers=(200, 400, 415)),
    "gzip bomb": lambda d: squeezed(d, "gzip", 2000),
    "deflate bomb": lambda d: squeezed(d, "deflate", 1000),
    "gzip in gzip": lambda d: squeezed(d, "gzip, gzip", 2000),
    "other coding": lambda d: body(d, ONE, Content_Encoding=d.choice(["br", "zstd", "identity", "x", "gzip"])),
    "other type": lambda d: body(
        d, ONE, Content_Type=d.choice(["text/plain", "application/json; charset=utf-7", "x"])
    ),
    "too large": lambda d: body(d, around(b'"' + b"a" * d.size(80 * MB) + b'"')),
    "messages": lambda d: many_messages(d),
    "at the limits": lambda d: at_the_limits(d),
}


def many_messages(d: Dice) -> Attack:
    """Return a conversation of up to 100,000 short messages."""
    api = d.choice(CHATS)
    roles = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    given = roles * d.size(50_000) + roles[:1]
    return post(PATHS[api], {"input" if api == "responses" else "messages": given, "max_tokens": 2})


SORTS: dict[str, Callable[[Dice, int], str]] = {
    "one letter": lambda d, n: "a" * n,
    "spaces": lambda d, n: " " * n,
    "line ends": lambda d, n: "\n" * n,
    "white space": lambda d, n: "".join(d.choices(" \t\n\r\u00a0\u3000", k=1000)) * (n // 1000 + 1),
    "words": lambda d, n: "the quick brown fox " * (n // 20 + 1),
    "unicode": lambda d, n: "".join(chr(d.randrange(0x100, 0xD800)) for _ in range(1000)) * (n // 2500 + 1),
    "random letters": lambda d, n: "".join(d.choices("abcdefghijklmnopqrstuvwxyz", k=10_000)) * (n // 10_000 + 1),
    "emoji": lambda d, n: "👩‍👩‍👧‍👦" * (n // 25 + 1),
    "combining": lambda d, n: "a" + "\u0301" * (n // 2),
    "special tokens": lambda d, n: d.choice(MARKS) * (n // 10 + 1),
    "begun special tokens": lambda d, n: d.choice(("<|", "<|im_", "<", "[INS")) * (n // 5 + 1),
    "zeros": lambda d, n: "\0" * (n // 6 + 1),
    "digits": lambda d, n: "1234567890" * (n // 10 + 1),
    "base64": lambda d, n: base64.b64encode(d.randbytes(min(n, MB) * 3 // 4)).decode() * (n // MB + 1),
    "data URLs": lambda d, n: "![a](data:image/png;base64,AAAA) " * (n // 33 + 1),
    "JSON": lambda d, n: '{"a": [' * (n // 8 + 1),
}  # fmt: skip


def long_text(d: Dice, sort: str) -> Attack:
    """Return a request with up to 25 MB of text in a field of any API."""
    text, api = (
        SORTS[sort](d, d.size(d.choice([25 * MB, 6 * MB, MB]))),
        d.choice([*CHATS, "completions", "generate", "count"]),
    )
    where = d.choice(["content", "content", "parts", "system", "past", "name", "role", "result", "model", "user"])
    if where == "content" or api in ("completions", "generate"):
        return ask(api, text)
    if where == "parts":
        return ask(api, [{"type": "input_text" if api == "responses" else "text", "text": text}])
    if where in ("model", "user"):
        return ask(api, **{where: text})
    if where == "system":
        return ask(api, **{"instructions" if api == "responses" else "system": text})
    changed = {"past": {"content": text}, "name": {"name": text}, "role": {"role": text}}
    result = {"role": "tool", "tool_call_id": text[:99], "content": text}
    past = {"role": "user", "content": "a", **changed[where]} if where in changed else result
    given = asked(api)
    given["input" if api == "responses" else "messages"].insert(0, past)
    return post(PATHS[api], given)


TEXTS: dict[str, Make] = {sort: lambda d, sort=sort: long_text(d, sort) for sort in SORTS}


def at_the_limits(d: Dice) -> Attack:
    """Return a body of nearly as many values, strings or digits as are parsed."""
    each, most = d.choice(
        [
            (b"1", 999_000),
            (b"1.5", 999_000),
            (b"1234567", 950_000),
            (b"[]", 49_000),
            (b'"a"', 49_000),
            (b"1" * 4200, 1800),
        ]
    )
    return body(d, around(b"[" + b",".join([each] * most) + b"]"))


def prompt(d: Dice, value: bytes) -> Attack:
    return post(PATHS["completions"], b'{"max_tokens": 2, "prompt": ' + value + b"}")


def repeated(d: Dice, each: str, most: int) -> Attack:
    return prompt(d, f"[{f'{each},' * (d.size(most) - 1)}{each}]".encode())


TOKENS: dict[str, Make] = {
    "millions": lambda d: repeated(d, "1", 12 * MB),
    "within the context": lambda d: repeated(d, str(d.randrange(100)), 2000),
    "prompts": lambda d: repeated(d, "[1]", MB),
    "texts": lambda d: repeated(d, '"a"', MB),
    "long texts": lambda d: repeated(d, f'"{"a " * 5000}"', 1000),
    "empty": lambda d: prompt(d, d.choice([b"[]", b"[[]]", b'""', b'[""]', b"[[], [1]]", b"null", b"{}"])),
    "no tokens": lambda d: repeated(
        d, d.choice(["-1", "999999", "1e3", "1.5", "true", "null", "{}", str(2**64)]), 100
    ),
    "huge ids": lambda d: repeated(d, str(2 ** d.choice([31, 32, 63, 64, 1000])), 10_000),
    "mixed": lambda d: prompt(d, json.dumps(d.choices([1, "a", [1], [[1]], None, 1.0, True, {}], k=20)).encode()),
    "choices": lambda d: ask(
        "completions", n=d.choice([64, 128, 10**6, 10**30]), best_of=d.choice([None, 64, 10**6])
    ),
}


def unread(d: Dice, api: str) -> Attack:
    """Return a long stream whose client reads nothing, or leaves while it is written."""
    fields = {"max_output_tokens": 1500} if api == "responses" else {"max_tokens": 1500}
    if api in ("chat", "completions"):
        fields |= {"n": d.choice([1, 4]), "logprobs": d.choice([True, None]) if api == "chat" else 5}
    given = {**asked(api, **fields), "stream": True, "ignore_eos": True}
    return post(PATHS[api], given)._replace(reads=d.random() < 0.3, leave=d.uniform(0.5, 3))


STREAMS: dict[str, Make] = {
    api: lambda d, api=api: unread(d, api) for api in ("chat", "completions", "responses", "messages", "ollama")
}
