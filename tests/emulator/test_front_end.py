"""Check that the front end check reports each error that Metal would, at its line, and nothing else."""

import os
import re
import shutil

import pytest
from metal_cases import linux_only
from planted import CLEAN, MORE, REQUIRED, Plant
from sweep import sampled

from mlx_mtp.emulator import opencl
from mlx_mtp.emulator.front_end import check
from mlx_mtp.emulator.opencl import preamble_text

pytestmark = linux_only


def reported(plant: Plant) -> list[str]:
    launch = plant.text
    return [str(found) for found in check(launch.text, launch.kernel)]


@pytest.mark.parametrize("name", [*REQUIRED, *sampled([*MORE][::16], MORE)])
def test_planted_errors_are_reported(name):
    plant = {**REQUIRED, **MORE}[name]
    found = reported(plant)
    assert any(re.search(plant.message, each) for each in found), found
    assert all(re.match(r"probe:\d+: ", each) for each in found)


@pytest.mark.parametrize("name", sampled(list(CLEAN)[::2], CLEAN))
def test_valid_texts_are_accepted(name):
    assert not reported(CLEAN[name])


MLX = {
    "softmax": ["softmax_single_row<bfloat16_t, float>", "softmax_looped<half>"],
    "logsumexp": ["logsumexp<bfloat16_t>"],
    "sort": ["block_sort<bfloat16_t, uint32_t, true, 128, 4>"],
    "copy": ["copy_s<bfloat16_t, float>", "copy_v<half, bool>"],
    "arange": ["arange<bfloat16_t>"],
}


@pytest.mark.parametrize("header", sampled(["softmax", "sort"], MLX))
def test_kernels_of_mlx_are_accepted(header):
    """Apple's compiler accepts them."""
    preamble_text(seen=(seen := set()))
    text = preamble_text(f"mlx/backend/metal/kernels/{header}.h", seen)
    for i, kernel in enumerate(MLX[header]):
        text += f'template [[host_name("{i}")]] [[kernel]] decltype({kernel}) {kernel};\n'
    assert not check(text)


def test_vectors_need_their_namespace():
    """MLX's preamble opens the namespace; a text without the preamble does not."""
    text = "#include <metal_stdlib>\n[[kernel]] void k(device float* o) {\n  {}vec<float, 4> v; o[0] = v.x;\n}\n"
    bare, named = (check(text.replace("{}", space), "k", preamble=False) for space in ("", "metal::"))
    assert [(each.file, each.line) for each in bare] == [("k", 3)]
    assert "no template named 'vec'" in bare[0].message
    assert not named


@pytest.mark.parametrize("version", ["", "clang version 21.1.0"])
def test_an_older_clang_is_refused(version, monkeypatch):
    monkeypatch.setattr(opencl, "find_zig", lambda: version and "zig")
    monkeypatch.setattr(opencl, "version_of", lambda *_: version)
    opencl.zig.cache_clear()
    with pytest.raises(ValueError, match=r"ziglang>=0\.17"):
        check("", "probe")


def test_lines_are_those_of_directives():
    header = (
        '#line 40 "kernels/helper.h"\nMETAL_FUNC float first(device float* x) { return x[0]; }\n\nfloat* nothing;'
    )
    body = (
        'threadgroup float z[8];\n#line 12 "kernels/probe.metal"\nout[i] = T(first(z));\nauto f = [&] { return 1; };'
    )
    found = [(each.file, each.line) for each in check(Plant(f"{header}\n", body).text.text, "probe")]
    places = {("kernels/helper.h", 42), ("kernels/probe.metal", 12), ("kernels/probe.metal", 13)}
    assert set(found) == places


def test_a_cached_header_is_valid_after_its_sources_are_installed_again(tmp_path, monkeypatch):
    """They have the same path and contents, and other times."""
    monkeypatch.setenv("MLX_MTP_EMULATOR_CACHE", str(tmp_path / "cache"))
    headers = tmp_path / "strict"
    shutil.copytree(opencl.STRICT, headers)
    command = [word.replace(str(opencl.STRICT), str(headers)) for word in opencl._command("named")]
    text = opencl.to_opencl(opencl.preamble_text())
    file = opencl.precompiled("again", command, opencl.LIBRARY, text)
    for header in headers.rglob("*"):
        os.utime(header, (1e9, 1e9))
    assert opencl.precompiled("again", command, opencl.LIBRARY, text) == file
    use = ["-Xclang", "-include-pch", "-Xclang", str(file), *opencl.TOLERANT, "-fsyntax-only"]
    assert opencl.run([*command, *use], "", "again") == ("", [])
