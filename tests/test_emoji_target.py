"""The shipped emoji checkpoints: they load, fit each other, and vanilla decoding with them is plain decoding in law."""

from pathlib import Path

import pytest
import torch
from scipy.stats import chi2_contingency

import coolsd
from coolsd.checkpoint import CHECKPOINTS
from data.emoji.dataset import items

SAMPLING = coolsd.Sampling(guidance=1.5)
IMAGES, BATCH = 96, 48


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


def marginal_p_value(a: torch.Tensor, b: torch.Tensor) -> float:
    """Two-sample chi-square on token counts; tokens seen fewer than 10 times in both together share one bin."""
    counts = torch.stack([torch.bincount(a, minlength=1024), torch.bincount(b, minlength=1024)])
    common = counts.sum(0) >= 10
    table = torch.cat([counts[:, common], counts[:, ~common].sum(1, keepdim=True)], dim=1)
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


@pytest.mark.slow
def test_vanilla_chain_has_the_law_of_plain_decoding(target):
    """Token marginals at 8 positions over 96 images each; Bonferroni bound 0.001 / 8, and a control that must fail."""
    captions = [item.caption for item in items("combo")[:IMAGES]]
    drafter = coolsd.Chain(coolsd.load_head("emoji/draft", target))
    drawn: dict[str, torch.Tensor] = {}
    for name, options, seed in (("plain", {}, 1), ("vanilla", {"drafter": drafter, "rule": coolsd.Vanilla()}, 2)):
        parts = []
        for start in range(0, IMAGES, BATCH):
            rows = range(start, start + BATCH)
            parts.append(
                coolsd.generate(
                    target, captions[start : start + BATCH], sampling=SAMPLING, seed=seed, rows=rows,
                    decode_images=False, certificates=False, **options,
                ).tokens
            )  # fmt: skip
        drawn[name] = torch.cat(parts)
    positions = range(8, 256, 32)
    values = [marginal_p_value(drawn["plain"][:, n], drawn["vanilla"][:, n]) for n in positions]
    print("p-values at positions", list(positions), [round(value, 3) for value in values])
    assert min(values) > 0.001 / 8
    # the middle of the picture is not its edge: the same test tells two laws apart with this many images
    assert marginal_p_value(drawn["plain"][:, 8], drawn["vanilla"][:, 136]) < 1e-6
