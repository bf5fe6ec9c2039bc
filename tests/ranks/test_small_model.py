"""Draft with a small model, whole on each rank, for a target that is split."""

import families
import rank_cases
import rank_group
from sweep import sweep


@sweep
def test_all_ranks_draft_alike_and_the_text_is_plain(tmp_path):
    path, drafter = rank_cases.write(tmp_path, "step3p5"), families.build("qwen3_5", tmp_path / "small", 1)[0]
    mine, other = rank_group.work(2, tmp_path, "drafted", path=path, drafter=str(drafter))
    assert mine == other
    assert mine["drafted"][0] > 0
    for kind, text in mine["texts"].items():
        assert text == mine["texts"][kind.partition(" ")[0]], kind
