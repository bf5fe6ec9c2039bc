"""Rank 0 alone opens and encodes pictures; texts on two ranks are those of one process, with and without drafts."""

import rank_group
import rank_worker
import seeing
from picture_requests import noise


def test_two_ranks_read_the_features_of_rank_0(tmp_path):
    """Given to the decoder, to Python's functions and in requests to the server."""
    path, files = str(seeing.build(tmp_path / "model")[0]), [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        file.write_bytes(noise(seed))
    names = [str(file) for file in files]
    mine, other = rank_group.work(2, tmp_path, "pictured", path=path, k=2, files=names)
    alone = rank_worker.pictured(path, None, 0, names)
    assert mine["text"] == other["text"] == alone["text"]
    assert "Picture" in mine["error"]
    assert mine["error"] == other["error"]
    assert mine["answers"] == alone["answers"]
    assert other["answers"] == alone["answers"][:1]
    assert len(set(alone["answers"])) == 3
