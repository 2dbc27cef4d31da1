"""Laws of chance: probabilities as LlamaGen makes them, draws that follow them, uniforms that depend on no batch."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from coolsd.sampling import Sampling, counter_uniforms, draw

PARITY = Path(__file__).parent / "parity"
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1, and the largest number counter_uniforms gives


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("t1_k20", Sampling(top_k=20)),
        ("t07_k30_p095", Sampling(temperature=0.7, top_k=30, top_p=0.95)),
        ("t09_k0_p08", Sampling(temperature=0.9, top_p=0.8)),
    ],
)
def test_probabilities_are_those_of_the_official_sampler(name, sampling):
    golden = load_file(PARITY / "llamagen_gpt_a_io.safetensors")
    logits = golden["cache.cfg_logits"][:, None, :4]
    probs = sampling.probs(logits)
    wanted = golden[f"sampler.{name}"]
    assert torch.equal(probs > 0, wanted > 0)
    torch.testing.assert_close(probs, wanted, rtol=0, atol=1e-6)


def test_guidance_combines_two_separate_runs(rng):
    conditional, unconditional = torch.randn(2, 3, 4, 7, generator=rng).unbind(0)
    for scale, temperature in ((1.5, 1.0), (7.5, 0.7)):
        sampling = Sampling(temperature=temperature, guidance=scale)
        both = sampling.guided(torch.stack([conditional, unconditional], dim=1))
        wanted = (unconditional.double() + scale * (conditional.double() - unconditional.double())) / temperature
        # float32 rounding of logits of size ~5 * scale, amplified by the scale: 2^-24 * 40 * 10 < 3e-5
        torch.testing.assert_close(both.double(), wanted, rtol=0, atol=3e-5)
    alone = Sampling(temperature=0.7)
    torch.testing.assert_close(alone.guided(conditional[:, None]), conditional / 0.7, rtol=1e-6, atol=0)


def test_equal_branches_make_guidance_a_no_op(rng):
    logits = torch.randn(2, 1, 3, 6, generator=rng)
    guided = Sampling(guidance=5.0).probs(logits.expand(-1, 2, -1, -1))
    torch.testing.assert_close(guided, Sampling().probs(logits), rtol=0, atol=1e-6)


def test_wrong_number_of_branches_is_refused():
    with pytest.raises(ValueError, match=r"guidance 2\.0 needs 2 branches, the logits have 1"):
        Sampling(guidance=2.0).guided(torch.zeros(1, 1, 1, 3))
    with pytest.raises(ValueError, match="needs 1 branches, the logits have 2"):
        Sampling().guided(torch.zeros(1, 2, 1, 3))


@pytest.mark.parametrize("temperature", [0, 1e-9])
def test_temperature_zero_is_argmax(rng, temperature):
    logits = torch.randn(3, 2, 4, 9, generator=rng)
    sampling = Sampling(temperature=temperature, guidance=3.0)
    probs = sampling.probs(logits)
    best = (logits[:, 1] + 3 * (logits[:, 0] - logits[:, 1])).argmax(-1)
    assert torch.equal(probs, torch.nn.functional.one_hot(best, 9).float())
    for uniform in (0.0, 0.5, BELOW_ONE):
        assert torch.equal(draw(probs, torch.full(best.shape, uniform)), best)


def test_ties_with_the_kth_logit_stay():
    probs = Sampling(top_k=2).probs(torch.tensor([3.0, 1.0, 1.0, 0.0, 1.0]).view(1, 1, 1, 5))
    assert (probs > 0).flatten().tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("top_k", [6, 7, 1000])
def test_top_k_of_at_least_the_vocabulary_is_no_filter(rng, top_k):
    logits = torch.randn(2, 1, 3, 6, generator=rng)
    assert torch.equal(Sampling(top_k=top_k).probs(logits), Sampling().probs(logits))


def test_top_k_one_is_argmax(rng):
    logits = torch.randn(2, 1, 3, 6, generator=rng)
    assert torch.equal(Sampling(top_k=1).probs(logits), Sampling(temperature=0).probs(logits))


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (1.0, 4)])
def test_the_first_token_over_the_top_p_threshold_stays(top_p, kept):
    law = torch.tensor([0.1, 0.4, 0.2, 0.3])  # descending: 0.4, 0.3, 0.2, 0.1
    probs = Sampling(top_p=top_p).probs(law.log().view(1, 1, 1, 4)).flatten()
    keep = law >= law.sort(descending=True).values[kept - 1]
    torch.testing.assert_close(probs, law * keep / (law * keep).sum(), rtol=0, atol=1e-6)


def test_probabilities_are_float32_whatever_the_logits(rng):
    logits = torch.randn(2, 2, 3, 5, generator=rng).bfloat16()
    probs = Sampling(guidance=2.0, top_k=3).probs(logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "law",
    [
        [0, 0, 0.25, 0, 0.75, 0, 0],
        [1, 0, 0],
        [0, 0, 1],
        [0, 1, 0],
        [0, 1e-30, 0],
        [0, 3.0, 0, 4.0, 0],  # need not be normalised
        [0, 1 / 3, 1 / 3, 1 / 3, 0],
        [0.0] + [0.1] * 10 + [0.0],
    ],
)
def test_a_token_without_mass_is_never_drawn(law):
    law = torch.tensor(law)
    ends = torch.tensor([0.0, 2.0**-24, BELOW_ONE - 2.0**-24, BELOW_ONE])
    uniforms = torch.cat([ends, torch.linspace(0, BELOW_ONE, 4097)])
    tokens = draw(law.expand(len(uniforms), -1), uniforms)
    assert bool((law[tokens] > 0).all())
    first, last = law.nonzero().flatten()[[0, -1]].tolist()
    assert tokens[0] == first and tokens[3] == last


def test_a_token_without_mass_is_never_drawn_from_a_large_codebook(rng):
    law = torch.randn(64, 16384, generator=rng).mul(4).softmax(-1)
    law[:, torch.rand(16384, generator=rng) < 0.5] = 0
    law[:, -100:] = 0
    for uniform in (0.0, 0.3, BELOW_ONE):
        assert bool((law.gather(1, draw(law, torch.full((64,), uniform))[:, None]) > 0).all())


def test_draw_is_the_inverse_cdf(rng):
    # midpoints of 2^14 equal cells: each token gets its share up to one cell at either end
    law = torch.randn(5, generator=rng).softmax(-1)
    cells = 1 << 14
    uniforms = (torch.arange(cells) + 0.5) / cells
    counts = draw(law.expand(cells, -1), uniforms).bincount(minlength=5)
    assert float((counts - law * cells).abs().max()) <= 1
    assert bool((draw(law.expand(cells, -1), uniforms).diff() >= 0).all())


def test_draws_follow_the_law(rng, p_value):
    law = torch.randn(12, generator=rng).softmax(-1)
    uniforms = counter_uniforms(3, torch.arange(400), 0, 50, 10).flatten()  # 200,000
    counts = draw(law.expand(len(uniforms), -1), uniforms).bincount(minlength=12)
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, law.roll(1)) < 1e-6  # negative control


def test_draw_takes_any_leading_shape(rng):
    law, uniforms = torch.rand(2, 3, 4, 6, generator=rng), torch.rand(2, 3, 4, generator=rng)
    tokens = draw(law, uniforms)
    flat = torch.stack([draw(p, u) for p, u in zip(law.view(-1, 6), uniforms.view(-1), strict=True)])
    assert torch.equal(tokens.view(-1), flat)


def test_uniforms_depend_on_seed_row_round_and_slot_alone():
    rows = torch.tensor([0, 5, 2, 1_000_003, 7])
    whole = counter_uniforms(42, rows, 0, 64, 9)
    assert whole.shape == (64, 5, 9) and whole.dtype == torch.float32
    for index, row in enumerate(rows.tolist()):  # not on the batch
        assert torch.equal(counter_uniforms(42, torch.tensor([row]), 0, 64, 9)[:, 0], whole[:, index])
    order = torch.tensor([3, 0, 4, 1, 2])  # not on the order
    assert torch.equal(counter_uniforms(42, rows[order], 0, 64, 9), whole[:, order])
    blocks = [counter_uniforms(42, rows, first, 16, 9) for first in range(0, 64, 16)]  # not on the block
    assert torch.equal(torch.cat(blocks), whole)
    assert torch.equal(counter_uniforms(42, rows, 0, 64, 4), whole[..., :4])  # nor on how many slots are asked for
    assert not torch.equal(counter_uniforms(43, rows, 0, 64, 9), whole)


def test_uniforms_are_exact_24_bit_fractions_below_one():
    uniforms = counter_uniforms(0, torch.arange(100), 0, 100, 10)
    assert float(uniforms.min()) >= 0 and float(uniforms.max()) <= BELOW_ONE
    scaled = uniforms.double() * 2**24
    assert torch.equal(scaled, scaled.round())
    assert len(uniforms.unique()) > 0.99 * uniforms.numel()  # 1e5 of 2^24 values: about 300 birthdays


def _many(axis: str, count: int, length: int) -> torch.Tensor:
    """[count, length] uniforms that differ along one axis between rows."""
    if axis == "seed":
        return torch.stack([counter_uniforms(seed, torch.arange(length), 0, 1, 1).flatten() for seed in range(count)])
    if axis == "row":
        return counter_uniforms(11, torch.arange(count), 0, length, 1)[..., 0].T
    if axis == "round":
        return counter_uniforms(12, torch.arange(length), 0, count, 1)[..., 0]
    return counter_uniforms(13, torch.arange(length), 5, 1, count)[0].T


@pytest.mark.parametrize("axis", ["seed", "row", "round", "slot"])
def test_uniforms_are_uniform_and_uncorrelated_along_every_axis(axis):
    count, length = 24, 8192
    numbers = _many(axis, count, length).double()
    whole = numbers.flatten()
    assert stats.kstest(whole.numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest((whole**1.02).numpy(), "uniform").pvalue < 1e-6  # negative control: a slightly bent law
    columns = numbers.T.flatten()  # neighbours are now the same place of neighbouring streams
    bound = torch.where(columns[:-1] < 0.02, columns[:-1], columns[1:])  # negative control: some repeat the one before
    for second, independent in ((columns[1:], True), (bound, False)):
        pairs = (columns[:-1] * 16).long() * 16 + (second * 16).long()
        value = stats.chisquare(pairs.bincount(minlength=256).numpy()).pvalue
        assert value > 1e-3 if independent else value < 1e-6
    correlation = torch.corrcoef(numbers) - torch.eye(count)
    assert float(correlation.abs().max()) < 5 / math.sqrt(length)  # 276 pairs, five standard errors
    lagged = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))[0, 1]
    assert abs(float(lagged)) < 5 / math.sqrt(count * length)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, ">= 0"),
        ("temperature", math.inf, ">= 0"),
        ("top_k", -1, "integer >= 0"),
        ("top_k", 2.5, "integer >= 0"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.1, r"\(0, 1\]"),
        ("top_p", math.nan, r"\(0, 1\]"),
        ("guidance", 0.5, ">= 1"),
        ("guidance", math.nan, ">= 1"),
        ("guidance", math.inf, ">= 1"),
    ],
)
def test_bad_values_are_refused_with_value_and_limit(field, value, limit):
    with pytest.raises(ValueError, match=rf"{field} is {value}, but must be .*{limit}"):
        Sampling(**{field: value})
