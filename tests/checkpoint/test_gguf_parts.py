"""Test models of several GGUF files: split ones, and heads in a file of their own."""

import shutil

import gguf_files
import mlx.core as mx
import pytest
from command_line import call, one_line_error
from gguf_metadata import metadata
from gguf_samples import WITH_HEADS, checkpoint, written

import mlx_mtp
from mlx_mtp.checkpoint.gguf.cached import fingerprint
from mlx_mtp.checkpoint.gguf.convert import prepare, transcode
from mlx_mtp.checkpoint.parameters import named

KINDS = gguf_files.KINDS
pytestmark = pytest.mark.usefixtures("cache")


def split(tensors, folder, config, parts):
    """Write tensors to files as llama-gguf-split does."""
    arch, heads = WITH_HEADS["step3p5"]
    names = list(tensors)
    for i in range(parts):
        own = {name: tensors[name] for name in names[i::parts]}
        more = {"split.no": i, "split.count": parts, "split.tensors.count": len(names)}
        values = metadata(arch, config, heads) if i == 0 else {}
        tokenizer = {**(gguf_files.letters() if i == 0 else {}), **more}
        name = f"x-{i + 1:05d}-of-{parts:05d}.gguf"
        gguf_files.write(folder / name, arch, values, own, KINDS.Q8_0, tokenizer=tokenizer)
    return folder / f"x-00001-of-{parts:05d}.gguf"


def test_split_files(step, tmp_path):
    first = split(step[2], tmp_path, step[1], 3)
    transcode(prepare(first), tmp_path / "new")
    transcode(prepare(step[3]), tmp_path / "whole")
    ours, whole = (named(mlx_mtp.load_model(tmp_path / name)) for name in ("new", "whole"))
    assert all(mx.array_equal(ours[path], w) for path, w in whole.items())
    last = tmp_path / "x-00003-of-00003.gguf"
    assert fingerprint(last) == fingerprint(first)
    assert prepare(last).source.meta.layers == 4
    shutil.copy(tmp_path / "x-00002-of-00003.gguf", last)
    with pytest.raises(ValueError, match=r"x-00003-of-00003\.gguf: its metadata lacks split\.no 2 and"):
        prepare(first)
    last.unlink()
    with pytest.raises(ValueError, match=r"x-00003-of-00003\.gguf: not found; x-00001-of-00003\.gguf is one of 3"):
        prepare(first)
    first.rename(tmp_path / "y.gguf")
    with pytest.raises(ValueError, match=r"y\.gguf: one of 3 splits; rename them, in order, to end in -00001-of"):
        prepare(tmp_path / "y.gguf")


@pytest.mark.parametrize("name", ["1-of-0", "0-of-0", "0-of-2", "3-of-2", "1-of-1001", "1-of-99999"])
def test_a_name_of_an_impossible_part_is_that_of_a_whole_file(step, tmp_path, name):
    """Such files share nothing with each other or with the parts that their names count."""
    number, count = map(int, name.split("-of-"))
    for part in (1, 2):
        (tmp_path / f"x-{part:05d}-of-{count:05d}.gguf").write_bytes(b"another file")
    file = tmp_path / f"x-{number:05d}-of-{count:05d}.gguf"
    shutil.copy(step[3], file)
    assert fingerprint(file) == fingerprint(step[3])
    assert prepare(file).source.meta.layers == 4


def test_a_part_that_states_no_parts_is_refused(step, tmp_path):
    """Whole files with such names would share one cached transcoding."""
    for part in (1, 2):
        shutil.copy(step[3], tmp_path / f"x-{part:05d}-of-00002.gguf")
    with pytest.raises(ValueError, match=r"x-00002-of-00002\.gguf: .*split\.count is 1; .*rename"):
        prepare(tmp_path / "x-00002-of-00002.gguf")


def test_split_counts_of_another_type_are_shown(step, tmp_path):
    """Not as the number that stands for them."""
    _, _, tensors, _ = step
    names, file = list(tensors)[:2], "x-{}-of-00002.gguf"

    def write(i, **more):
        keys = {"split.no": i, "split.count": 2, **{f"split.{key}": value for key, value in more.items()}}
        path = tmp_path / file.format(f"{i + 1:05d}")
        return gguf_files.write(path, "step35", {}, {names[i]: tensors[names[i]]}, tokenizer=keys)

    write(1)
    shown = [(2.5, "2.5"), ("two", "'two'"), (True, "True"), ([2] * 300, "an array of 300"), (70000, "70000")]
    for value, text in shown:
        with pytest.raises(ValueError, match=f"00001-of-00002.gguf: split.count is {text}; allowed are integers"):
            prepare(write(0, count=value))
    with pytest.raises(ValueError, match=r"its splits hold 2 tensors; its split.tensors.count is '2'"):
        prepare(write(0, **{"tensors.count": "2"}))


def test_splits_that_name_each_other(step, tmp_path):
    """A link from one part to another must not be read repeatedly."""
    first = split(step[2], tmp_path, step[1], 2)
    second = tmp_path / "x-00002-of-00002.gguf"
    second.unlink()
    second.symlink_to(first)
    with pytest.raises(ValueError, match=r"lacks split\.no 1 and split\.count 2"):
        prepare(first)


def apart(step, folder):
    """(a file without heads, a file of heads alone)."""
    _, config, tensors, _ = step
    arch, heads = WITH_HEADS["step3p5"]
    inside = {name: int(name.split(".")[1]) for name in tensors if name.startswith("blk.")}
    trunk = {name: w for name, w in tensors.items() if inside.get(name, 0) < 4}
    rest = {name: w for name, w in tensors.items() if inside.get(name, 9) >= 4}
    known = {k: v[:4] if isinstance(v, list) else v for k, v in metadata(arch, config, 0).items()}
    target = gguf_files.write(folder / "target.gguf", arch, known, trunk, KINDS.Q4_0)
    return target, gguf_files.write(folder / "mtp.gguf", arch, metadata(arch, config, heads), rest, KINDS.Q8_0)


def test_heads_in_a_file_of_their_own(step, tmp_path, cache):
    target, heads = apart(step, tmp_path)
    with pytest.warns(UserWarning, match="no MTP heads found"):
        assert mlx_mtp.load_model(target, lazy=True).mtp == []
    model = mlx_mtp.load_model(target, mtp_path=heads)
    assert len(model.mtp) == 3
    transcode(prepare(step[3]), tmp_path / "whole")
    for path, w in named(mlx_mtp.load_model(tmp_path / "whole", lazy=True)).items():
        if path.startswith("mtp."):
            assert mx.array_equal(named(model)[path], w), path
    before = len(list(cache.iterdir()))
    assert len(mlx_mtp.load_model(target, mtp_path=heads, lazy=True).mtp) == 3
    assert len(list(cache.iterdir())) == before
    result = call("convert", "--gguf", target, "--mtp-path", heads, "--mlx-path", tmp_path / "new")
    assert result.returncode == 0, result.stderr
    joined = mlx_mtp.load_model(tmp_path / "new", lazy=True)
    assert len(joined.mtp) == 3
    assert all(mx.array_equal(w, named(joined)[path]) for path, w in named(model).items())


def test_heads_of_the_released_checkpoint(step, tmp_path):
    target, _ = apart(step, tmp_path)
    assert mlx_mtp.load_model(target, mtp_path=step[0]).report.heads == 3


def test_heads_of_another_model(step, tmp_path):
    target, _ = apart(step, tmp_path)
    _, config, weights = checkpoint("mimo_v2_flash", tmp_path / "mimo")
    other = written("mimo_v2_flash", tmp_path / "mimo.gguf", config, weights)
    line = one_line_error(call("convert", "--gguf", target, "--mtp-path", other, "--mlx-path", tmp_path / "new"))
    assert "mimo.gguf: general.architecture is 'mimo2'; the target's is 'step35'" in line
    line = one_line_error(call("convert", "--gguf", step[3], "--mtp-path", target, "--mlx-path", tmp_path / "new"))
    assert "target.gguf: no MTP heads in it" in line
