"""Hostile pictures in requests to a model that reads pictures."""

import io
import struct
import zlib
from typing import Any

from hostile_bodies import MB, Make
from hostile_wire import PATHS, Attack, Dice, asked, post
from picture_requests import base64_of, noise, png, text_of, url_of
from PIL import Image

APIS = ("chat", "messages", "responses")
URLS = (
    "file:///etc/passwd",
    "/etc/passwd",
    "http://127.0.0.1:1/a.png",
    "http://localhost:8080/health",
    "http://169.254.169.254/latest/meta-data",
    "http://[64:ff9b::7f00:1]/a.png",
    "http://[::ffff:127.0.0.1]:1/",
    "http://0x7f000001/",
    "ftp://127.0.0.1/a",
    "data:image/png;base64,",
    "data:,a",
    "data:text/html,<b>",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "javascript:1",
    "",
    "a" * 100_000,
    "http://" + "a" * 100_000,
)


def part(api: str, url: str) -> dict[str, Any]:
    if api == "messages":
        return {"type": "image", "source": {"type": "url", "url": url}}
    return (
        {"type": "input_image", "image_url": url}
        if api == "responses"
        else {"type": "image_url", "image_url": {"url": url}}
    )


def sent(d: Dice, *urls: str) -> Attack:
    """Return a question with pictures in the form of any API."""
    api = d.choice(APIS)
    parts = [text_of(api, "What is this?"), *[part(api, url) for url in urls]]
    name, most = ("input", "max_output_tokens") if api == "responses" else ("messages", "max_tokens")
    return post(PATHS[api], {name: [{"role": "user", "content": parts}], most: 4})


def file(d: Dice, data: bytes, kind: str = "image/png") -> Attack:
    """Return a question with one picture, as a `data:` URL or, in Anthropic's or Ollama's form, as base64."""
    if d.random() < 0.5:
        return sent(d, f"data:{kind};base64,{base64_of(data)}")
    source = {"type": "base64", "media_type": kind, "data": base64_of(data)}
    if d.random() < 0.5:
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
        return post(PATHS["messages"], {"messages": [{"role": "user", "content": content}], "max_tokens": 4})
    asked = {"role": "user", "content": "What is this?", "images": [source["data"]]}
    return post(PATHS["ollama"], {"messages": [asked], "stream": False, "options": {"num_predict": 4}})


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def block_of(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_blocks(*blocks: tuple[bytes, bytes], each: int = 1) -> bytes:
    """Return a small PNG with further chunks behind its header, each repeated."""
    data = png()
    return data[:33] + b"".join(block_of(*each_block) * each for each_block in blocks) + data[33:]


def png_of(width: int, height: int, depth: int = 8, colour: int = 0) -> bytes:
    """Return a PNG of any stated size whose data are zeros, at most 100 MB of them before compression."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packer = zlib.compressobj(9)
    rows = min((width * depth // 8 + 1) * height, 100 * MB)
    data = b"".join(packer.compress(bytes(MB)) for _ in range(rows // MB + 1)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + block_of(b"IHDR", header) + block_of(b"IDAT", data) + block_of(b"IEND", b"")


def scans(d: Dice, side: int, most: int) -> bytes:
    """Return a progressive JPEG whose second scan is repeated."""
    data = saved(Image.new("L", (side, side), 128), "JPEG", progressive=True, quality=50)
    marks = [i for i in range(len(data) - 1) if data[i] == 0xFF and data[i + 1] in (0xDA, 0xC4, 0xD9)]
    begin = [i for i in marks if data[i + 1] == 0xDA][1]
    end = next(i for i in marks if i > begin)
    return data[:end] + data[begin:end] * d.size(most) + data[end:]


def moving(d: Dice, kind: str, most: int) -> bytes:
    """Return a picture of many frames."""
    frames = [Image.new("L", (8, 8), i % 256) for i in range(d.size(most) + 1)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)


def damaged(d: Dice) -> bytes:
    """Return a picture of any kind that is cut or has wrong bytes."""
    kind = d.choice(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
    data = bytearray(saved(Image.frombytes("L", (64, 64), d.randbytes(64 * 64)), kind))
    for _ in range(d.choice([0, 1, 10, 100])):
        data[d.randrange(len(data))] = d.randrange(256)
    return bytes(data[: d.choice([len(data), d.randrange(len(data)), len(data) // 2])])


def text_bomb(name: bytes, before: bytes) -> bytes:
    return with_blocks((name, before + zlib.compress(bytes(60 * MB), 9)), each=30)


JPEG = saved(Image.new("L", (9, 9)), "JPEG")
OTHERS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n",
    b"<svg/>",
    b"8BPS\0\1",
    b"\0\0\1\0" * 99,
    b"II*\0" * 99,
    b"BM" * 99,
    b"P6 9 9 9 ",
)
PICTURES: dict[str, Make] = {
    "PNG bomb": lambda d: file(d, png_of(*d.choice([(30_000, 30_000), (10_000, 10_000), (7000, 7000)]))),
    "PNG of two colours": lambda d: file(d, png_of(d.choice([60_000, 20_000, 7071]), 7000, 1)),
    "PNG of 16 bits": lambda d: file(d, png_of(7000, 7000, 16, d.choice([2, 6]))),
    "long PNG": lambda d: file(d, png_of(*d.choice([(1, 60_000), (60_000, 1), (200_000, 200), (1, 1), (0, 0)]))),
    "PNG with texts": lambda d: file(d, text_bomb(b"zTXt", b"a\0\0")),
    "PNG with a profile": lambda d: file(d, text_bomb(b"iCCP", b"a\0\0")),
    "PNG of many chunks": lambda d: file(d, with_blocks((b"abCd", b""), each=d.size(MB))),
    "APNG": lambda d: file(d, moving(d, "PNG", 3000)),
    "GIF": lambda d: file(d, moving(d, "GIF", 5000), "image/gif"),
    "WebP": lambda d: file(d, moving(d, "WEBP", 2000), "image/webp"),
    "large GIF": lambda d: file(d, saved(Image.new("L", (7000, 7000)), "GIF"), "image/gif"),
    "large WebP": lambda d: file(d, saved(Image.new("L", (7000, 7000)), "WEBP", method=0), "image/webp"),
    "large JPEG": lambda d: file(d, saved(Image.new("RGB", (7000, 7000)), "JPEG"), "image/jpeg"),
    "large progressive JPEG": lambda d: file(d, saved(Image.new("RGB", (7000, 7000)), "JPEG", progressive=True)),
    "JPEG of many scans": lambda d: file(d, scans(d, d.choice([7000, 3000]), 3000), "image/jpeg"),
    "JPEG with comments": lambda d: file(d, JPEG[:2] + b"\xff\xfe\0\x02" * d.size(MB) + JPEG[2:], "image/jpeg"),
    "JPEG with fill bytes": lambda d: file(d, JPEG[:2] + b"\xff" * d.size(10 * MB) + JPEG[2:], "image/jpeg"),
    "other kinds": lambda d: file(d, d.choice(OTHERS)),
    "damaged": lambda d: file(d, damaged(d)),
    "more damage": lambda d: file(d, damaged(d)),
    "damaged base64": lambda d: sent(d, url_of(png())[: d.randrange(20, 60)] + d.choice("=é\n%")),
    "spaces in base64": lambda d: sent(d, url_of(png()) + " " * d.size(20 * MB)),
    "no picture": lambda d: sent(d, "data:image/png;base64," + "A" * d.size(20 * MB)),
    "URL": lambda d: sent(d, d.choice(URLS)),
    "URLs": lambda d: sent(d, *d.sample(URLS, 6)),
    "thousand": lambda d: sent(d, *[url_of(png())] * d.size(1000)),
    "thousand different": lambda d: sent(
        d, *["data:image/png;base64," + base64_of(png(8, 8, i % 256)) for i in range(d.size(1000))]
    ),
    "twenty large": lambda d: sent(
        d, *["data:image/png;base64," + base64_of(saved(Image.new("L", (3000 + i, 3000)), "PNG")) for i in range(20)]
    ),
    "noise": lambda d: file(d, noise(d.randrange(1 << 30), d.size(2000), d.size(1500))),
    "strange part": lambda d: post(
        PATHS["chat"],
        asked("chat", [{"type": "image_url", "image_url": d.choice([{}, [], 1, {"url": 1}])}]),
    ),
}  # fmt: skip
