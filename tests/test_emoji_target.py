"""The shipped emoji checkpoints: they are whole, small, and fit each other."""

from pathlib import Path

import pytest
import torch
from scipy import stats

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


def test_the_shipped_pair_decodes_any_caption(target):
    head = coolsd.load_head("emoji/draft", target)
    captions = [
        "twemoji emoji of a sun",
        "zebra at sea on a plaid background, again and again, and again, and on and on",
    ]
    for rule in (coolsd.Vanilla(), coolsd.CoolSD(2.0, floor=1.0)):
        result = coolsd.generate(target, captions, coolsd.Chain(head, 5), rule, coolsd.Sampling(guidance=1.25))
        assert result.images.shape == (2, 3, 64, 64) and (result.accepted_length >= 1).all()


def two_sample_p_values(one, other, positions):
    """p-values of the chi-square two-sample test on the token marginals; tokens seen under 10 times are pooled."""
    found = []
    for position in positions:
        table = torch.stack([tokens[:, position].bincount(minlength=1024) for tokens in (one, other)])
        rare = table.sum(0) < 10
        pooled = torch.cat([table[:, ~rare], table[:, rare].sum(1, keepdim=True)], dim=1)
        found.append(stats.chi2_contingency(pooled[:, pooled.sum(0) > 0].numpy()).pvalue)
    return found


@pytest.mark.slow
def test_vanilla_chain_and_plain_decoding_have_the_same_token_marginals(liar, say):
    # the first 3 rows of 16 tokens of 512 images; a token depends on no later one, so the rest need not be decoded
    target = coolsd.load_target("emoji/target", device="cpu", dtype="float32")
    target.image_tokens = 48
    positions = (5, 17, 22, 27, 33, 37, 42, 46)
    captions = [f"{style} emoji of a red apple" for style in ("noto", "twemoji")] * 64
    sampling = coolsd.Sampling(guidance=1.25)

    def tokens(drafter, rule, seed, images=512):
        runs = [
            coolsd.generate(
                target, captions, drafter, rule, sampling, seed, range(start, start + 128), decode_images=False,
                certificates=False,
            ).tokens
            for start in range(0, images, 128)
        ]  # fmt: skip
        return torch.cat(runs)

    chain = coolsd.Chain(coolsd.load_head("emoji/draft", target), 5)
    plain = tokens(None, None, seed=1)
    same = two_sample_p_values(plain, tokens(chain, coolsd.Vanilla(), seed=2), positions)
    control = two_sample_p_values(plain, tokens(liar(chain, 1.0), coolsd.Vanilla(), seed=3, images=256), positions)
    say(f"p-values, plain against vanilla chain: {' '.join(f'{p:.3f}' for p in same)}")
    say(f"p-values, plain against a chain that lies about its draft: {' '.join(f'{p:.1e}' for p in control)}")
    assert min(same) > 1e-3 / len(positions)  # Bonferroni
    assert min(control) < 1e-6
