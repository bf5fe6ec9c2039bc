"""A picture's decoder receives only what determines its pixels, in small pieces, and can be ended between them."""

import io
import struct
import zlib

import numpy as np
import pytest
from fuzzing import profile
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.pictures import image as opening
from mlx_mtp.pictures.image import BLOCK, STRIP, DecodingInterrupted, open_image
from mlx_mtp.pictures.parts import MOST_PARTS, MOST_SCANS, essential, turn_of

pytest.importorskip("PIL", reason="needs Pillow: the extra vision, or test")
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8))


def saved(image, form, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


WHOLE = {form: saved(NOISE, form) for form in FORMATS}
AFTER_PALETTE = 13 + 3 * 256
PLACES = {
    "JPEG": WHOLE["JPEG"].index(b"\xff\xdb"),
    "PNG": 33,
    "GIF": AFTER_PALETTE,
}  # in front of which metadata are inserted
# A directory of 5,400 entries that name the same 60 kB: Pillow copies them for each entry.
ENTRIES = b"".join(struct.pack("<HHII", 0x9000 + i, 7, 60_000, 8) for i in range(5400))
BOMB = b"II*\0\x08\0\0\0" + struct.pack("<H", 5400) + ENTRIES
ZIPPED = zlib.compress(bytes(1 << 20))
METADATA = {  # of each kind: the format, a part, and the number of parts
    "EXIF": ("JPEG", segment(0xE1, b"Exif\0\0" + BOMB), 30),
    "ICC": ("JPEG", segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000)), 30),
    "several pictures in a JPEG": ("JPEG", segment(0xE2, b"MPF\0" + BOMB), 1),
    "XMP": ("JPEG", segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"<" * 60_000), 30),
    "resources": ("JPEG", segment(0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5000), 30),
    "comments": ("JPEG", segment(0xFE, bytes(60_000)), 30),
    "fill bytes": ("JPEG", b"\xff", 10**6),
    "escaped bytes": ("JPEG", b"\xff\0", 10**6),
    "bytes between segments": ("JPEG", b"a", 10**6),
    "compressed texts": ("PNG", chunk(b"zTXt", b"a\0\0" + ZIPPED), 60),
    "international texts": ("PNG", chunk(b"iTXt", b"a\0\1\0\0\0" + ZIPPED), 60),
    "texts": ("PNG", chunk(b"tEXt", b"a\0" + bytes(10_000)), 60),
    "profiles": ("PNG", chunk(b"iCCP", b"a\0\0" + ZIPPED), 60),
    "EXIF of a PNG": ("PNG", chunk(b"eXIf", BOMB), 2),
    "frames of an animation": ("PNG", chunk(b"acTL", struct.pack(">II", 9, 0)) + chunk(b"fdAT", bytes(9000)), 60),
    "comments of a GIF": ("GIF", b"!\xfe" + b"\xff" + b"a" * 255 + b"\0", 8000),
    "one long comment of a GIF": ("GIF", b"!\xfe" + (b"\xff" + b"a" * 255) * 30_000 + b"\0", 1),
    "applications": ("GIF", b"!\xff\x0bNETSCAPE2.0" + b"\xff" + b"a" * 255 + b"\0", 8000),
    "stray bytes": ("GIF", b"\0", 30_000),
}  # fmt: skip


def with_parts(form: str, part: bytes, count: int) -> bytes:
    at = PLACES[form]
    return WHOLE[form][:at] + count * part + WHOLE[form][at:]


@pytest.mark.parametrize("kind", METADATA)
def test_no_decoder_receives_metadata(kind):
    form, part, count = METADATA[kind]
    data = with_parts(form, part, count)
    assert len(data) > 1.5 * len(WHOLE[form])
    assert len(essential(data, form)[0]) <= len(WHOLE[form])
    assert np.array_equal(open_image(data).pixels, open_image(WHOLE[form]).pixels)


PARTS = {
    "markers": ("JPEG", b"\xff\xd0"),
    "tables": ("JPEG", b"\xff\xc4\0\2"),
    "empty segments": ("JPEG", b"\xff\xfe\0\2"),
    "chunks": ("PNG", chunk(b"abCd", b"")),
    "pixels in empty chunks": ("PNG", chunk(b"IDAT", b"")),
    "extensions": ("GIF", b"!\xfe\0"),
    "sub-blocks": ("GIF", b"!\xfe" + b"\1a" * MOST_PARTS + b"\0"),
    "stray bytes": ("GIF", b"\0"),
}


@pytest.mark.parametrize("kind", [*PARTS, "frames"])
def test_files_of_very_many_parts_are_refused_before_pillow_reads_them(kind, monkeypatch):
    monkeypatch.setattr(opening, "pillow", lambda: pytest.fail("Pillow was called"))
    form, part = PARTS.get(kind, ("WEBP", b"ANMF\0\0\0\0"))
    count = 1 if len(part) > MOST_PARTS else MOST_PARTS
    data = WHOLE["WEBP"] + part * count if kind == "frames" else with_parts(form, part, count)
    with pytest.raises(ValueError, match=rf"^picture 1: the {form} file has more than 32,768 parts|not a PNG"):
        open_image(data)


def scans_of(data: bytes) -> list[int]:
    return [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1, "progressive": True}, {}])
@pytest.mark.parametrize("junk", [b"", b"\xff\xff", b"\xff\xfe\0\4\xff\xda"], ids=["as it is", "fill", "comment"])
def test_each_scan_of_a_jpeg_counts_and_nothing_else(options, junk):
    """A repeated scan is a pass over all pixels that needs a few bytes, whatever stands in front of it."""
    data = saved(NOISE, "JPEG", quality=30, **options)
    first, last = scans_of(data)[0], scans_of(data)[-1]
    count = len(scans_of(data))
    scan, tail = data[first if count == 1 else scans_of(data)[-2] : last if count > 1 else -2], data[last:]
    more = lambda n: data[:last] + (junk + scan) * n + tail  # noqa: E731
    assert len(scans_of(more(MOST_SCANS - count).replace(b"\4\xff\xda", b""))) == MOST_SCANS
    assert essential(more(MOST_SCANS - count), "JPEG")
    with pytest.raises(ValueError, match="the JPEG file has more than 100 scans; save it with another program"):
        open_image(more(MOST_SCANS - count + 1))


TAGS = st.dictionaries(st.sampled_from([0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x8298]), st.text("ab", max_size=9))


@profile(40)
@given(TAGS, st.none() | st.integers(0, 9), st.sampled_from("<>"), st.binary(max_size=9))
def test_the_turn_is_the_one_that_pillow_reads(tags, turn, order, after):
    exif = Image.Exif()
    exif.endian = order
    for tag, text in tags.items():
        exif[tag] = text
    if turn is not None:
        exif[0x0112] = turn
    data = exif.tobytes() + after
    again = Image.Exif()
    again.load(data)
    expected = again.get(0x0112)
    assert turn_of(data) == turn_of(data.removeprefix(b"Exif\0\0")) == (expected if expected in range(1, 9) else 1)


@profile(40)
@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda data: b"II*\0\x08\0\0\0" + data))
def test_damaged_exif_data_have_no_turn_beyond_the_eight(data):
    assert turn_of(data) in (None, *range(1, 9))


LARGE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (300, 500, 3), np.uint8))


def checks_of(data, **more) -> int:
    found = []
    open_image(data, check=lambda: found.append(0), **more)
    return len(found)


@pytest.mark.parametrize("form", [*FORMATS, "progressive"])
def test_decoding_can_be_ended_between_small_pieces(form):
    data = saved(LARGE, "JPEG", progressive=True) if form == "progressive" else saved(LARGE, form)
    reads = 1 if form == "WEBP" else len(data) // (BLOCK + 12)  # libwebp decodes a file in one call
    count = checks_of(data)
    assert count >= reads
    for end in (0, count // 2, count - 1):
        left = [end]

        def check(left=left):
            left[0] -= 1
            if left[0] < 0:
                raise DecodingInterrupted("gone")

        with pytest.raises(ValueError, match=r"^picture 1: gone$"):
            open_image(data, check=check)
        assert left[0] == -1


def test_a_slow_file_is_ended_by_its_cpu_time(monkeypatch):
    monkeypatch.setattr(opening, "SECONDS", -1.0)
    for form in FORMATS:
        with pytest.raises(ValueError, match=r"^picture 1: decoding takes more than -1 seconds"):
            open_image(WHOLE[form])


def test_pixels_are_converted_in_strips(monkeypatch):
    sizes, convert = [], opening._rgb_values
    monkeypatch.setattr(opening, "STRIP", 1700)
    monkeypatch.setattr(opening, "_rgb_values", lambda strip: sizes.append(strip.size) or convert(strip))
    assert STRIP * 16 <= 1 << 22  # bytes of a strip's few copies
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        sizes.clear()
        found = open_image(saved(LARGE, "PNG", exif=exif)).pixels
        assert sizes == [(500, 3)] * 100
        _, quarters = opening.TURNS.get(turn, (False, 0))
        assert found.shape == ((500, 300, 3) if quarters % 2 else (300, 500, 3))
        assert found.flags.c_contiguous
