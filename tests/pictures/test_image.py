"""Every kind of picture becomes the RGB values that a viewer shows; damaged and hostile files become one line."""

import base64
import io
import struct
import sys
import zlib
from urllib.parse import quote

import numpy as np
import pytest
from fuzzing import profile
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.pictures import library
from mlx_mtp.pictures.header import read_head, stated_head
from mlx_mtp.pictures.image import TURNS, PictureLimits, from_base64, from_data_url, open_image

pytest.importorskip("PIL", reason="needs Pillow: the extra vision, or test")
from PIL import Image, ImageFile, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
RNG = np.random.default_rng(0)
NOISE = Image.fromarray(RNG.integers(0, 256, (24, 40, 3), np.uint8))


def saved(image, form, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, bits, kind, raw: bytes, *chunks: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *chunks, chunk(b"IDAT", zlib.compress(raw)), chunk(b"IEND", b"")])


def row(mode, *values):
    image = Image.new(mode, (len(values), 1))
    image.putdata(values)
    return image


def palette(transparency):
    image = row("P", 0, 1, 2)
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    return saved(image, "PNG", transparency=transparency)


ANIMATION = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
MOVING = {"save_all": True, "append_images": ANIMATION[1:], "duration": 50}
RED, WHITE = [255, 0, 0], [255, 255, 255]
# File, and the colours of its first pixels.
COLOURS = {
    "hidden colours under alpha": (saved(row("RGBA", (9, 8, 7, 255), (255, 0, 0, 0)), "PNG"), [[9, 8, 7], WHITE]),
    "half covered": (saved(row("RGBA", (0, 0, 0, 51)), "PNG"), [[204, 204, 204]]),
    "grey and alpha": (saved(row("LA", (5, 255), (5, 0)), "PNG"), [[5, 5, 5], WHITE]),
    "lossless WEBP with alpha": (saved(row("RGBA", (9, 8, 7, 255), (1, 2, 3, 0)), "WEBP", lossless=True, exact=True),
                                 [[9, 8, 7], WHITE]),
    "palette": (palette(None), [[10, 20, 30], [40, 50, 60], [70, 80, 90]]),
    "palette, one transparent": (palette(1), [[10, 20, 30], WHITE, [70, 80, 90]]),
    "palette, alphas": (palette(b"\xff\x00\xff"), [[10, 20, 30], WHITE, [70, 80, 90]]),
    "transparent colour": (saved(row("RGB", (1, 2, 3), (4, 5, 6)), "PNG", transparency=(1, 2, 3)),
                           [WHITE, [4, 5, 6]]),
    "transparent grey": (saved(row("L", 7, 8), "PNG", transparency=7), [WHITE, [8, 8, 8]]),
    "16-bit grey": (png(4, 1, 16, 0, b"\0" + struct.pack(">4H", 0, 257, 32896, 65535)),
                    [[0] * 3, [1] * 3, [128] * 3, WHITE]),
    "16-bit grey, one transparent": (png(2, 1, 16, 0, b"\0" + struct.pack(">2H", 257, 514), chunk(b"tRNS", b"\1\1")),
                                     [WHITE, [2] * 3]),
    "16-bit colours": (png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0, 257 * 9, 65535)), [[0, 9, 255]]),
    "16-bit grey and alpha": (png(2, 1, 16, 4, b"\0" + struct.pack(">4H", 2570, 65535, 0, 0)), [[10] * 3, WHITE]),
    "2 colours": (saved(row("1", 0, 255), "PNG"), [[0, 0, 0], WHITE]),
    "CMYK": (saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), [RED]),
    "first of a GIF": (saved(ANIMATION[0], "GIF", **MOVING), [RED]),
    "first of a WEBP": (saved(ANIMATION[0], "WEBP", lossless=True, **MOVING), [RED]),
    "first of a PNG": (saved(ANIMATION[0], "PNG", **MOVING), [RED]),
    "transparent GIF": (saved(row("RGBA", (0, 0, 255, 255), (255, 0, 0, 0)), "GIF"), [[0, 0, 255], WHITE]),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLOURS)
def test_colours(kind):
    data, colours = COLOURS[kind]
    found = open_image(data).pixels
    near = 2 if kind == "CMYK" else 0
    assert found.dtype == np.uint8
    assert np.abs(found[0, : len(colours)].astype(int) - colours).max() <= near


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_as_its_exif_data_request(form):
    for turn in (1, *TURNS, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        data = saved(NOISE, form, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(open_image(data).pixels, np.asarray(expected.convert("RGB"))), turn
        assert open_image(data).size == ((40, 24) if 5 <= turn <= 8 else (24, 40))


def test_damaged_exif_data_are_ignored():
    data = saved(NOISE, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert np.array_equal(open_image(data).pixels, np.asarray(Image.open(io.BytesIO(data))))


def test_all_sources_of_one_picture_have_its_digest(tmp_path):
    data = saved(NOISE, "PNG")
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [data, tmp_path / "a.png", str(tmp_path / "a.png"), url, NOISE, saved(NOISE, "WEBP", lossless=True)]
    assert len({open_image(source).digest for source in sources}) == 1
    # The same bytes of other widths, and one other value, are other pictures.
    values = np.asarray(NOISE)
    changed = values.copy()
    changed[0, 0, 0] ^= 1
    others = [Image.fromarray(array) for array in (values.reshape(40, 24, 3), changed)]
    assert len({open_image(image).digest for image in [NOISE, *others]}) == 3


REFUSED = {
    "no picture": (b"%PDF-1.7 " * 9, "the data are not a PNG, JPEG, WEBP or GIF picture"),
    "no bytes": (b"", "the data are not a PNG"),
    "another format": (saved(NOISE, "BMP"), "the data are not a PNG"),
    "TIFF": (saved(NOISE, "TIFF"), "the data are not a PNG"),
    "a URL": ("https://example.org/a.png", "a URL; download the picture"),
    "a file URL": ("file:///etc/passwd", "a URL; download the picture"),
    "no file": ("nowhere.png", "nowhere.png: no such file"),
    "a directory": ("/", "/: no such file"),
    "an unknown user": ("~no-such-user/a.png", "~no-such-user/a.png: no such file"),
    "a device": ("/dev/zero", "/dev/zero: no such file"),
    "a number": (7, "a value of type int; expected a path"),
    "not base64": ("data:image/png;base64,%%%%", "the data are not valid base64"),
    "a letter too many in base64": ("data:image/png;base64,iVBOR", "the data are not valid base64"),
    "a data: URL of text": ("data:image/png,abc", "the data: URL is not in base64"),
    "a data: URL without data": ("data:image/png;base64", "the data: URL is not in base64"),
    "floating-point numbers": (Image.new("F", (2, 2)), "it cannot be decoded"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_picture_is_refused_in_one_line(kind):
    source, reason = REFUSED[kind]
    with pytest.raises(ValueError, match=r"^picture 4: ") as e:
        open_image(source, number=4)
    assert reason in str(e.value)
    assert "\n" not in str(e.value)


def test_requests_can_only_name_data():
    for url in ("https://example.org/a.png", "file:///etc/passwd", "/etc/passwd", "a.png", "", "blob:x;base64,AAAA"):
        with pytest.raises(ValueError, match="no data: URL"):
            from_data_url(url)


def spellings(text):
    """Base64 as clients write it: padded or not, in lines, with spaces, in the alphabet of URLs, percent-encoded."""
    urls, lines = (
        text.replace("+", "-").replace("/", "_"),
        "\r\n".join(text[i : i + 5] for i in range(0, len(text), 5)),
    )
    return [text, text.rstrip("="), urls, urls.rstrip("="), lines, lines + "\n", " " + " ".join(text) + "\t"]


HEADS = ("data:image/png;base64", "DATA:;BASE64", "data:;base64", "data:image/png;charset=utf-8;base64")
HEADS += ("data:image/svg+xml;name=a.png; Base64 ", " data:text/plain;base64")


@given(data=st.binary(max_size=9) | st.sampled_from([b"\xfb\xef\xbe\xff" * n for n in range(4)]))
@settings(max_examples=60, deadline=None)
def test_base64_is_read_in_its_common_spellings(data):
    for text in spellings(base64.b64encode(data).decode()):
        assert from_base64(text) == data
        for head in HEADS:
            assert from_data_url(f"{head},{text}") == data
            assert from_data_url(f"{head},{quote(text, safe='')}") == data


TOO_MANY_OR_FEW = ["A", "AAAAA", "A=", "AA===", "AAA==", "AAAA=", "=", "AA=A", "AA==AA=="]


@pytest.mark.parametrize(
    "text", [*TOO_MANY_OR_FEW, "A.AA", "+A-A", "/A_A", "AÄAA", "QUJD\0", "QU\u2028JD", "QU%4AD", "data:;base64,QUJD"]
)
def test_other_texts_are_no_base64(text):
    with pytest.raises(ValueError, match="not valid base64"):
        from_base64(text)


def gif(width, height, frame=(1, 1)):
    """A GIF whose screen and only frame have these sizes; one pixel is compressed."""
    screen = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00;"


def webp(width, height):
    return b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"".join(
        (side - 1).to_bytes(3, "little") for side in (width, height)
    )  # fmt: skip


def jpeg(width, height):
    data = bytearray(saved(Image.new("L", (8, 8)), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


STATED = {
    "PNG": lambda width, height: png(width, height, 8, 2, b"\0\0\0\0"),
    "JPEG": jpeg,
    "WEBP": webp,
    "GIF": gif,
    "GIF, by its frame": lambda width, height: gif(1, 1, (width, height)),
}
SIZES = {
    (30000, 30000): "30000 x 30000 pixels; allowed are 50,000,000 in all: make it smaller",
    (8000, 6251): "8000 x 6251 pixels; allowed are 50,000,000 in all",
    (2001, 10): "2001 x 10 pixels; the longer side is limited to 200 times the other",
    (10, 2001): "10 x 2001 pixels; the longer side is limited to 200 times the other",
    (0, 5): "0 x 5 pixels; allowed is 1 x 1 or more",
}


@pytest.mark.parametrize("form", STATED)
def test_a_size_beyond_the_limits_is_refused_before_a_pixel_is_decoded(form, monkeypatch):
    def decode(_):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    for (width, height), reason in SIZES.items():
        if width or form in ("PNG", "JPEG"):
            with pytest.raises(ValueError, match=r"^picture 1: ") as e:
                open_image(STATED[form](width, height))
            assert reason in str(e.value)


def test_pillow_s_own_limit_is_one_line_too(recwarn):
    for frame in ((15000, 15000), (9000, 12000)):  # Pillow raises an error for one, and warns of the other
        with pytest.raises(ValueError, match=r"^picture 1: .*(damaged|in all)"):
            open_image(gif(1, 1, frame))


@pytest.mark.parametrize(
    ("form", "options", "refused"),
    [
        ("JPEG", {}, ""),
        ("JPEG", {"progressive": True}, "a multi-scan JPEG file"),
        ("WEBP", {}, "a WEBP file"),
        ("PNG", {}, ""),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_files_whose_decoders_need_more_memory_have_a_limit_of_their_own(form, options, refused, mode):
    data, limits = saved(NOISE.convert(mode), form, **options), PictureLimits(pixels=24 * 40, costly=24 * 40 - 1)
    if not refused:
        assert open_image(data, limits).size == (24, 40)
        return
    with pytest.raises(ValueError, match=f"^picture 1: 40 x 24 pixels; allowed are 959 in all of {refused}: make"):
        open_image(data, limits)


def test_limits_of_bytes(tmp_path):
    data, limits = saved(NOISE, "PNG"), PictureLimits(nbytes=100)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    for source in (data, tmp_path / "a.png", f"data:image/png;base64,{text}"):
        with pytest.raises(ValueError, match=r"picture 1: [\d,]+ bytes; allowed are 100: make it smaller"):
            open_image(source, limits)
    for count in range(95, 106):
        text = base64.b64encode(bytes(count)).decode()
        if count <= 100:
            assert from_base64(text, limits) == bytes(count)
        else:
            with pytest.raises(ValueError, match=f"^{count} bytes; allowed are 100"):
                from_base64(text, limits)


@pytest.mark.parametrize("form", FORMATS)
def test_the_stated_size_is_the_size(form):
    for size in ((1, 1), (40, 24), (300, 2)):
        for options in ({}, {"lossless": True} if form == "WEBP" else {"progressive": True}):
            data = saved(NOISE.resize(size), form, **options)
            assert read_head(data) == (form, size[1], size[0])
            assert stated_head(data)[1:] == size[::-1]
    with pytest.raises(ValueError, match="not a PNG, JPEG, WEBP or GIF picture"):
        stated_head(b"")


def opened_or_error(data):
    try:
        return open_image(data, number=3), ""
    except ValueError as e:
        return None, str(e)


WHOLE = {form: saved(NOISE, form) for form in FORMATS}


@pytest.mark.parametrize("form", FORMATS)
@profile(60)
@given(st.integers(0, 5000), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=4))
def test_damaged_files(form, end, changes):
    """A truncated file is refused unless it has all of its pixels; other damage is one line or gives a picture."""
    whole = WHOLE[form]
    data = bytearray(whole[: end % (len(whole) + 1)] if not changes else whole)
    for at, value in changes:
        data[at % len(data)] = value
    found, error = opened_or_error(bytes(data))
    if found is None:
        assert error.startswith("picture 3: ")
        assert "\n" not in error
    else:
        assert min(found.size) >= 1
        assert np.prod(found.size) <= 50_000_000
        assert changes or np.array_equal(found.pixels, open_image(whole).pixels)


def test_without_pillow_the_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    library.pillow.cache_clear()
    try:
        for source in (WHOLE["PNG"], 7):
            with pytest.raises(ValueError, match=r"pictures need Pillow: pip install -e '\.\[vision\]'"):
                open_image(source)
        with pytest.raises(ValueError, match="30000 x 30000"):  # the header is checked without it
            open_image(STATED["PNG"](30000, 30000))
    finally:
        library.pillow.cache_clear()
