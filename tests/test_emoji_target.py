"""The shipped emoji checkpoints: they are whole, small, and fit each other."""

from pathlib import Path

import pytest
import torch

import coolsd
from coolsd.checkpoint import CHECKPOINTS


@pytest.fixture(scope="module")
def target():
    return coolsd.load_target("emoji/target", device="cpu", dtype="float32")


def test_shipped_checkpoints_are_whole_and_small(target):
    files = [path for path in (CHECKPOINTS / "emoji").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 80e6
    coolsd.load_target("emoji/target", device="cpu", verify=True)
    coolsd.load_head("emoji/draft", target, verify=True)
    for name in ("tokenizer", "target", "draft"):
        assert (CHECKPOINTS / "emoji" / name / "README.md").is_file()


def test_head_of_another_target_is_refused(target, tmp_path: Path):
    other = coolsd.load_target("emoji/target", device="cpu", dtype="float32")
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    other.save(tmp_path / "target")
    with pytest.raises(ValueError, match=r"was trained on target@.*but the target is target@"):
        coolsd.load_head("emoji/draft", coolsd.load_target(tmp_path / "target", device="cpu"))
