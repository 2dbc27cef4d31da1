"""The loop: plain decoding equals the slow reference, drafting changes speed alone, relaxation costs what it says.

Laws of whole images are exact: a toy of 2 x 2 tokens over 3 codes has 81 images, and `forced` gives each probability.
"""

import dataclasses
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from coolsd.decode import autoregressive, generate
from coolsd.drafters.chain import Chain
from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla
from coolsd.sampling import Sampling
from coolsd.transformer import freeze

CAPTIONS = ["a b", "c", "a b c a", "b", "a a"]
SAMPLINGS = [
    Sampling(),
    Sampling(guidance=2.0),
    Sampling(temperature=0.8, top_k=3, guidance=2.0),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0),
]
RULES = [Vanilla(), Uniform(1.3), CoolSD(1.1), CoolSD(1.1, floor=1.0), CoolSD(2.0)]
TINY = {"codes": 3, "grid": (2, 2), "size": 16, "layers": 1, "sharpness": 1.5}


def decode(target, captions, *arguments, **options):
    return generate(target, captions, *arguments, decode_images=False, **options)


# -------------------------------------------------------------------------------------- plain decoding


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_plain_decoding_is_autoregressive(toy, sampling):
    target, _ = toy(grid=(5, 8))  # 39 rounds: more than one block of uniforms
    result = decode(target, CAPTIONS, sampling=sampling, seed=5)
    assert torch.equal(result.tokens, autoregressive(target, CAPTIONS, sampling, seed=5))
    assert torch.equal(result.accepted_length, torch.ones(5))
    assert torch.equal(result.target_calls, torch.full((5,), 39))
    assert torch.equal(result.emitted, torch.ones(5, 39).long())
    assert not result.bias_per_token.any() and not result.kl_per_token.any()


def test_guidance_is_two_separate_runs_combined(toy):
    # decode with guidance, then explain every token by a conditional and an unconditional run that never met
    target, _ = toy()
    sampling, scale = Sampling(guidance=2.5), 2.5
    result = decode(target, CAPTIONS, sampling=sampling, seed=1)
    rounds = []
    decode(target, CAPTIONS, sampling=sampling, seed=1, observer=lambda seen: rounds.append(seen.target_probs[:, 0]))
    both = target.encode(CAPTIONS, guidance=True)
    alone = []
    for branch in (0, 1):
        inputs = {name: tensor[:, branch : branch + 1] for name, tensor in both.inputs.items()}
        prompt = dataclasses.replace(both, mask=both.mask[:, branch : branch + 1], inputs=inputs)
        alone.append(target.forced(prompt, result.tokens).logits[:, 0])
    wanted = (alone[1] + scale * (alone[0] - alone[1])).softmax(-1)
    torch.testing.assert_close(torch.stack(rounds, 1), wanted[:, 1:], rtol=0, atol=1e-5)
    unguided = decode(target, CAPTIONS, seed=1)
    assert not torch.equal(unguided.tokens, result.tokens)


# ------------------------------------------------------------------------ laws of drafting, row by row


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
@pytest.mark.parametrize("rule", [None, Vanilla(), CoolSD(1.6)], ids=str)
def test_a_batch_of_five_is_five_calls_of_one(toy, sampling, rule):
    target, head = toy(grid=(4, 4))
    drafter = None if rule is None else Chain(head, 4)
    rows = [3, 0, 17, 4, 2**33]
    batch = decode(target, CAPTIONS, drafter, rule, sampling, seed=9, rows=rows)
    for index, row in enumerate(rows):
        alone = decode(target, CAPTIONS[index : index + 1], drafter, rule, sampling, seed=9, rows=[row])
        assert torch.equal(alone.tokens[0], batch.tokens[index])
        calls = int(alone.target_calls[0])
        assert calls == int(batch.target_calls[index])
        assert torch.equal(alone.emitted[0], batch.emitted[index, :calls])
        assert not batch.emitted[index, calls:].any()
        for name in ("bias_per_token", "kl_per_token", "nll_per_token", "accepted_length"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(batch, name)[index], rtol=1e-4, atol=1e-5)


def test_tokens_are_a_function_of_the_seed(toy):
    target, head = toy()
    for arguments in ((), (Chain(head, 3), Vanilla())):
        one, two, three = (decode(target, CAPTIONS, *arguments, seed=seed).tokens for seed in (4, 4, 5))
        assert torch.equal(one, two) and not torch.equal(one, three)
    same = decode(target, ["a"] * 4, Chain(head, 3), Vanilla()).tokens
    assert len(same.unique(dim=0)) > 1  # rows of one caption differ


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_counts_are_consistent(toy, rule, sampling):
    target, head = toy()
    seen, ticks = [], []
    result = decode(
        target, CAPTIONS, Chain(head, 4), rule, sampling, seed=2,
        observer=seen.append, progress=lambda done, total: ticks.append((done, total)),
    )  # fmt: skip
    total = target.image_tokens
    assert result.tokens.shape == (5, total) and bool(((result.tokens >= 0) & (result.tokens < 5)).all())
    assert torch.equal(result.emitted.sum(1), torch.full((5,), total - 1))
    assert torch.equal((result.emitted > 0).sum(1), result.target_calls)
    torch.testing.assert_close(result.accepted_length, (total - 1) / result.target_calls.float())
    assert bool((result.emitted <= 5).all())
    # observer and progress: once a round, in order, up to the end
    assert len(seen) == len(ticks) == result.emitted.shape[1] == int(result.target_calls.max())
    committed = 1 + result.emitted.cumsum(1)
    assert ticks == [(int(done), total) for done in committed.min(0).values]
    assert ticks[-1] == (total, total)
    for turn, look in enumerate(seen):
        assert torch.equal(look.active, result.emitted[:, turn] > 0)
        assert torch.equal(look.verification.emitted, result.emitted[:, turn])
    assert set(result.seconds) == {"prefill", "draft", "target", "verify", "decode_images"}


@pytest.mark.parametrize(("grid", "length"), [((2, 2), 9), ((1, 2), 5), ((1, 2), 1), ((3, 3), 8)])
@pytest.mark.parametrize("rule", [Vanilla(), CoolSD(3.0)], ids=str)
def test_a_draft_longer_than_the_image_is_cut_at_its_end(toy, grid, length, rule):
    target, head = toy(grid=grid)
    total = target.image_tokens
    result = decode(target, CAPTIONS, Chain(head, length), rule, Sampling(guidance=1.5))
    assert result.tokens.shape == (5, total)
    assert torch.equal(result.emitted.sum(1), torch.full((5,), total - 1))  # what is cut is not counted
    assert float(result.accepted_length.max()) <= total - 1
    if total == 2:  # one token left after the prefill: one call each
        assert torch.equal(result.target_calls, torch.ones(5).long())
    assert bool(result.nll_per_token.isfinite().all()) and bool(result.bias_per_token.isfinite().all())


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_vanilla_at_temperature_zero_is_the_plain_argmax(toy, guidance, length):
    target, head = toy(grid=(4, 4))
    sampling = Sampling(temperature=0, guidance=guidance)
    plain = decode(target, CAPTIONS, sampling=sampling)
    for rule in (Vanilla(), Uniform(2.0)):  # a certain target leaves nothing to relax
        drafted = decode(target, CAPTIONS, Chain(head, length), rule, sampling, seed=77)
        assert torch.equal(drafted.tokens, plain.tokens)
        assert not drafted.bias_per_token.any()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafted", [False, True])
def test_nll_is_that_of_the_teacher_forced_pass(toy, sampling, drafted):
    target, head = toy()
    arguments = (Chain(head, 4), CoolSD(1.8)) if drafted else ()
    result = decode(target, CAPTIONS, *arguments, sampling=sampling)
    guided = sampling.guided(target.forced(target.encode(CAPTIONS, sampling.branches == 2), result.tokens).logits)
    each = -guided.log_softmax(-1).gather(-1, result.tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(result.nll_per_token, each.mean(1), rtol=0, atol=1e-4)


def test_certificates_per_token_are_the_sums_of_the_rounds(toy):
    target, head = toy()
    rounds = []
    result = decode(target, CAPTIONS, Chain(head, 4), CoolSD(1.8), observer=rounds.append)
    for name in ("bias", "kl"):
        total = torch.zeros(5)
        for look in rounds:
            each = getattr(look.verification, name)
            total += torch.where(torch.arange(4) < look.verification.emitted[:, None], each, 0.0).sum(1)
        torch.testing.assert_close(getattr(result, f"{name}_per_token"), total / 9)
        assert float(total.min()) > 0
    without = decode(target, CAPTIONS, Chain(head, 4), CoolSD(1.8), certificates=False)
    assert without.bias_per_token is None and without.kl_per_token is None
    assert torch.equal(without.tokens, result.tokens)


def test_images_are_decoded_from_the_tokens(toy_copy):
    target, head = toy_copy()

    class Painter:
        def decode_images(self, tokens):
            return tokens[:, None, None].expand(-1, 3, 2, -1).to(torch.uint8)

    object.__setattr__(target, "image_tokenizer", Painter())
    result = generate(target, CAPTIONS, Chain(head, 2), Vanilla())
    assert result.images.shape == (5, 3, 2, 9) and torch.equal(result.images[:, 0, 0].long(), result.tokens)
    assert decode(target, CAPTIONS).images is None


def test_misuse_is_refused_in_a_sentence(toy):
    target, head = toy()
    for captions, arguments, options, message in (
        (CAPTIONS, (None, Vanilla()), {}, "needs a drafter"),
        (CAPTIONS, (Chain(head, 2),), {}, "a drafter needs a rule"),
        ([], (), {}, "captions is"),
        ("a b", (), {}, "captions is 'a b', but must be a list"),
        (CAPTIONS, (), {"rows": [0, 1]}, "2 rows for 5 captions"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(target, captions, *arguments, **options)


# ---------------------------------------------------------------------------- laws of whole toy images


def law_of_images(target, caption, sampling):
    """Probability of each of the V^T images, float64 [V^T], by teacher forcing; images in counting order."""
    codes, total = target.codebook_size, target.image_tokens
    images = torch.cartesian_prod(*[torch.arange(codes)] * total)
    prompt = target.encode([caption] * len(images), sampling.branches == 2)
    probs = sampling.probs(target.forced(prompt, images).logits)
    return probs.double().gather(-1, images[..., None]).squeeze(-1).prod(-1)


def sample_images(target, caption, images, *arguments, batch=10_000):
    """Real batched `generate`: counts [V^T] of the images and the results of all calls."""
    codes, total = target.codebook_size, target.image_tokens
    counts, results = torch.zeros(codes**total, dtype=torch.long), []
    for first in range(0, images, batch):
        rows = range(first, first + batch)
        result = decode(target, [caption] * batch, *arguments, seed=8, rows=rows)
        index = torch.zeros(batch, dtype=torch.long)
        for column in result.tokens.unbind(1):
            index = index * codes + column
        counts += index.bincount(minlength=codes**total)
        results.append(result)
    return counts, results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "images"), [(Sampling(), 100_000), (Sampling(guidance=2.0, temperature=1.2), 30_000)], ids=str
)
def test_vanilla_is_lossless(toy, liar, p_value, sampling, images):
    target, head = toy(**TINY)
    law = law_of_images(target, "b a", sampling)
    assert abs(float(law.sum()) - 1) < 1e-5 and float(law.max()) < 0.5
    counts, results = sample_images(target, "b a", images, Chain(head, 2), Vanilla(), sampling)
    assert p_value(counts, law) > 1e-3
    assert 1.3 < float(torch.cat([r.accepted_length for r in results]).mean()) < 2.9  # accepts and rejects
    assert not any(r.bias_per_token.any() or r.kl_per_token.any() for r in results)
    counts, _ = sample_images(target, "b a", 20_000, liar(Chain(head, 2), 0.2), Vanilla(), sampling)
    assert p_value(counts, law) < 1e-6  # negative control: a wrong q


@pytest.mark.slow
def test_plain_decoding_follows_the_exact_law(toy, p_value):
    target, _ = toy(**TINY)
    counts, _ = sample_images(target, "b a", 30_000, None, None, Sampling(guidance=2.0))
    assert p_value(counts, law_of_images(target, "b a", Sampling(guidance=2.0))) > 1e-3
    assert p_value(counts, law_of_images(target, "b a", Sampling(guidance=1.8))) < 1e-6  # negative control


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Uniform(1.6), CoolSD(1.3), CoolSD(1.3, floor=1.0)], ids=str)
def test_bias_bounds_the_distance_of_whole_images(toy, rule):
    target, head = toy(**TINY)
    images, sampling = 20_000, Sampling()
    law = law_of_images(target, "b a", sampling)
    counts, results = sample_images(target, "b a", images, Chain(head, 3), rule, sampling)
    share = counts.double() / images
    distance = 0.5 * float((share - law).abs().sum())
    noise = 0.5 * float((law * (1 - law) / images).sqrt().sum())  # at most what chance adds to the empirical distance
    bias = torch.cat([r.bias_per_token for r in results]).double() * target.image_tokens
    kl = torch.cat([r.kl_per_token for r in results]).double() * target.image_tokens
    assert distance - 2 * noise <= float(bias.mean()) + 4 * float(bias.std()) / images**0.5
    assert distance > 4 * noise  # the rule does something, so the bound says something
    divergence = float(torch.special.xlogy(share, share / law).sum())
    bias_of_estimate = len(law) / (2 * images)  # of a plug-in KL
    assert divergence - 2 * bias_of_estimate <= float(kl.mean()) + 4 * float(kl.std()) / images**0.5
    vanilla = decode(target, ["b a"] * 2000, Chain(head, 3), Vanilla())
    relaxed = torch.cat([r.accepted_length for r in results]).mean()
    if max(rule.schedule(3)) == min(rule.schedule(3)) or rule.floor:  # never below vanilla: longer at every depth
        assert relaxed > vanilla.accepted_length.mean()


# -------------------------------------------------------------------------------- compile and bfloat16


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_compiled_decodes_the_same_tokens(toy_copy):
    target, head = toy_copy(layers=1)  # small: each shape of input is a graph, and a graph costs seconds
    sampling = Sampling(guidance=2.0)
    runs = [(None, None), (Chain(head, 3), Vanilla()), (Chain(head, 3), CoolSD(1.5)), (Chain(head, 2), Vanilla())]
    torch._dynamo.reset()
    counters.clear()
    eager = [decode(target, CAPTIONS, *run, sampling) for run in runs]
    freeze(target)
    target.transformer.compile_shapes()  # what load_target(compile=True) does
    head.prepare().transformer.compile_shapes()  # what load_head(compile=True) does
    for run, before in zip(runs, eager, strict=True):
        after = decode(target, CAPTIONS, *run, sampling)
        assert torch.equal(after.tokens, before.tokens) and torch.equal(after.emitted, before.emitted)
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 8  # none fell back to eager


def test_bfloat16_decodes_and_stays_near(toy_copy):
    # the law is the same up to rounding of the logits; tokens may differ once a draw falls on a boundary
    target, head = toy_copy(grid=(4, 4), sharpness=1.5)
    sampling, captions = Sampling(guidance=1.5), CAPTIONS * 4
    for arguments in ((), (Chain(head, 3), Vanilla()), (Chain(head, 3), CoolSD(1.5))):
        single = decode(target.float(), captions, *arguments, sampling=sampling).tokens
        head.bfloat16()
        half = decode(target.bfloat16(), captions, *arguments, sampling=sampling)
        head.float()
        share = float((half.tokens == single).float().mean())
        print(f"share of equal tokens in bfloat16: {share:.3f} ({'plain' if not arguments else arguments[1]})")
        assert bool(half.nll_per_token.isfinite().all()) and share > 0.5
