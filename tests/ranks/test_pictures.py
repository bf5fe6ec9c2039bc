"""Rank 0 alone encodes pictures; the text on two ranks is that of one process, with and without drafts."""

import rank_group
import rank_worker
import seeing


def test_two_ranks_read_the_features_of_rank_0(tmp_path):
    path = str(seeing.build(tmp_path / "model")[0])
    mine, other = rank_group.work(2, tmp_path, "pictured", path=path, k=2)
    assert mine == other
    assert mine["text"] == rank_worker.pictured(path, None, 0)["text"]
    assert "Picture" in mine["error"]
