"""The Jacobi window: lossless with every init and coupling, faster when coupled, each row on its own.

Laws of whole images are exact on a target that is a table: 2 x 3 tokens over 3 codes, each prefix with a distribution.
"""

import dataclasses
import itertools
import types

import pytest
import torch

from coolsd import decode as loop
from coolsd.decode import generate
from coolsd.drafters.jacobi import Jacobi, gumbel_draw, maximal_draw, noise_keys
from coolsd.interfaces import Prompt, TargetOutput
from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla
from coolsd.sampling import Sampling, draw, residual
from coolsd.verify import verify

CAPTIONS = ["a b", "c", "a b c a", "b", "a a"]
INITS, COUPLINGS = ["random", "repeat", "sample"], [None, "gumbel", "maximal"]
EVERY = [(init, coupling) for init in INITS for coupling in COUPLINGS]


class Table:
    """A target whose logits are looked up: one row for each prefix (prefix i is continued by V i + 1 .. V i + V)."""

    device = torch.device("cpu")

    def __init__(self, rng, codes=3, grid=(2, 3)):
        self.codebook_size, self.image_tokens = codes, grid[0] * grid[1]
        self.config = types.SimpleNamespace(grid=grid)
        prefixes = codes ** torch.arange(self.image_tokens)  # of each length
        of_place = torch.randn(2, self.image_tokens, codes, generator=rng).repeat_interleave(prefixes, 1)
        self.table = of_place + torch.randn(2, int(prefixes.sum()), codes, generator=rng)

    def encode(self, captions, guidance):
        return Prompt(tuple(captions), torch.ones(len(captions), 1 + guidance, 1, dtype=torch.bool), {})

    def output(self, prefix, branches):
        logits = self.table[:branches, prefix.clamp(max=self.table.shape[1] - 1)].transpose(0, 1)  # [B, G, N, V]
        return TargetOutput(logits, logits)

    def prefill(self, prompt, tree_slots):
        cache = Prefixes(torch.zeros(len(prompt.captions), dtype=torch.long), prompt.branches)
        return self.output(cache.prefix[:, None], prompt.branches), cache

    def score(self, tree, prompt, cache):
        prefix, nodes = cache.prefix, []
        for token in tree.tokens.unbind(1):  # a chain
            prefix = self.codebook_size * prefix + token + 1
            nodes.append(prefix)
        cache.nodes = torch.stack(nodes, 1)
        return self.output(cache.nodes, prompt.branches)

    def law(self, sampling):
        """Probability of each image in counting order, float64 [V ** T]."""
        law, first = torch.ones(1, 1, dtype=torch.float64), 0
        for length in range(self.image_tokens):
            prefix = torch.arange(first, first + self.codebook_size**length)[None]
            probs = sampling.probs(self.output(prefix, sampling.branches).logits)[0]
            law, first = law.reshape(-1, 1) * probs.double(), first + self.codebook_size**length
        return law.flatten()


class Prefixes:
    def __init__(self, prefix, branches):
        self.prefix, self.branches = prefix, branches

    def keep(self, path, count, longest):
        count = count[:: self.branches]
        last = self.nodes.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.prefix = torch.where(count > 0, last, self.prefix)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(loop, "BLOCK", 6)  # rounds of uniforms made at once; the numbers are the same


def decode(target, captions, *arguments, **options):
    return generate(target, captions, *arguments, decode_images=False, **options)


def sample(target, images, drafter, rule=Vanilla(), sampling=Sampling(), **options):  # noqa: B008
    """Counts of all images [V ** T], and the results of the real batched `generate`."""
    codes, results, batch = target.codebook_size, [], 25_000
    counts = torch.zeros(codes**target.image_tokens, dtype=torch.long)
    for first in range(0, images, batch):
        rows = range(first, first + batch)
        results.append(decode(target, [""] * batch, drafter, rule, sampling, seed=8, rows=rows, **options))
        index = torch.zeros(batch, dtype=torch.long)
        for column in results[-1].tokens.unbind(1):
            index = index * codes + column
        counts += index.bincount(minlength=len(counts))
    return counts, results


# --------------------------------------------------------------------------------------------- lossless


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "init", "coupling"),
    [(3, *each) for each in EVERY] + [(window, "random", each) for window in (2, 4) for each in COUPLINGS],
)
def test_vanilla_is_lossless(rng, p_value, window, init, coupling):
    target = Table(rng)
    counts, results = sample(target, 100_000, Jacobi(window, init, coupling))
    assert p_value(counts, target.law(Sampling())) > 1e-3
    accepted = float(torch.cat([result.accepted_length for result in results]).mean())
    assert 1.2 < accepted < window - 0.3  # accepts and rejects
    for result in results:
        assert not result.bias_per_token.any() and not result.kl_per_token.any()


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_vanilla_is_lossless_with_guidance_and_truncation(rng, p_value, coupling):
    target, sampling = Table(rng), Sampling(temperature=1.2, top_k=2, guidance=2.0)
    law = target.law(sampling)
    assert int((law > 0).sum()) == 2**6
    counts, _ = sample(target, 100_000, Jacobi(3, "random", coupling), sampling=sampling)
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, target.law(dataclasses.replace(sampling, guidance=1.8))) < 1e-6  # negative control


class Careless:
    """A verification that takes its chance from the coupling noise of the places it decides."""

    def __init__(self, drafter, share):
        self.drafter, self.share = drafter, share

    def __call__(self, tree, target_probs, rule, relaxation, uniforms, certificates):
        if self.share == "accept":  # tests with the numbers the drafts were made with
            uniforms = torch.cat([self.drafter.uniforms, uniforms[:, -1:]], 1)
        decision = verify(tree, target_probs, rule, relaxation, uniforms, certificates)
        if self.share == "residual":  # argmax(log residual + g) with the g of the rejected draft
            place, rows = decision.emitted - 1, torch.arange(len(uniforms))
            last = place.clamp(max=tree.depth - 1)
            owed = residual(target_probs[rows, last], torch.minimum(target_probs, padded(tree))[rows, last])
            again = gumbel_draw(owed, self.drafter.keys[rows, last])
            again = torch.where(place < tree.depth, again, decision.tokens[rows, place])
            decision = dataclasses.replace(decision, tokens=decision.tokens.scatter(1, place[:, None], again[:, None]))
        return decision


def padded(tree):
    return torch.nn.functional.pad(tree.draft_probs, (0, 0, 0, 1))


class Remembering(Jacobi):
    def propose(self, uniforms):
        self.uniforms = uniforms[:, : self.depth]
        return super().propose(uniforms)


@pytest.mark.parametrize(("coupling", "share"), [("gumbel", "residual"), ("maximal", "accept"), (None, "accept")])
def test_noise_shared_with_verification_is_not_lossless(rng, p_value, monkeypatch, coupling, share):
    target, drafter = Table(rng, codes=5, grid=(2, 2)), Remembering(3, "random", coupling)  # negative control
    monkeypatch.setattr(loop, "verify", Careless(drafter, share))
    counts, _ = sample(target, 100_000, drafter)
    assert p_value(counts, target.law(Sampling())) < 1e-6
    monkeypatch.setattr(loop, "verify", Careless(drafter, None))
    counts, _ = sample(target, 25_000, drafter)
    assert p_value(counts, target.law(Sampling())) > 1e-3


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_tested_draft_is_a_sample_of_its_distribution(rng, coupling):
    # not just at the end: in each round, at each node that a test reaches, also where a coupling carried the draft on.
    # E [one-hot(draft) - q] = 0 over the rows tested there, with variance at most sum q (1 - q)
    target, rounds, misreported = Table(rng), [], []
    sample(target, 100_000, Jacobi(4, "random", coupling), observer=rounds.append)
    seen = 0
    for look in rounds:
        q, drafted = look.tree.draft_probs, look.tree.tokens[:, 1:]
        tested = look.active[:, None] & (torch.arange(3) < look.verification.emitted[:, None])
        tested &= q.amax(-1) < 1  # fresh drafts are certain
        for node in range(3):
            rows = tested[:, node]
            if int(rows.sum()) > 1000:
                mine, hits = q[rows, node].double(), torch.nn.functional.one_hot(drafted[rows, node], 3)
                deviation = (mine * (1 - mine)).sum(0).sqrt()
                assert float(((hits - mine).sum(0) / deviation).abs().max()) < 5
                misreported.append(float(((hits - mine.roll(1, -1)).sum(0) / deviation).abs().max()))
                seen += 1
    assert seen >= 12 and min(misreported) > 10  # 4 batches; and a wrong distribution would show


def test_a_draft_is_drawn_from_what_the_previous_call_said_of_its_place(toy):
    target, _ = toy(grid=(4, 4))
    for coupling in COUPLINGS:
        rounds = []
        decode(target, CAPTIONS[:3], Jacobi(6, "random", coupling), Vanilla(), observer=rounds.append)
        for before, now in itertools.pairwise(rounds):
            for row in range(3):
                emitted = int(before.verification.emitted[row])
                for draft in range(5):  # node draft + 1
                    q, source = now.tree.draft_probs[row, draft], emitted + draft
                    if source < 6:
                        torch.testing.assert_close(q, before.target_probs[row, source], rtol=0, atol=1e-6)
                    else:
                        assert float(q.max()) == 1
                    assert float(q[now.tree.tokens[row, draft + 1]]) > 0


# ----------------------------------------------------------------------------------------------- draws


def test_gumbel_draw_follows_the_distribution(rng, distributions, p_value):
    # the exact law, rare and impossible tokens included
    p = distributions(rng, 20, sharpness=2.5)
    p[:2] = 0
    p = p / p.sum()
    assert float(p[p > 0].min()) < 1e-3
    keys = noise_keys(torch.rand(100_000, generator=rng), torch.rand(100_000, generator=rng))
    tokens = gumbel_draw(p.expand(len(keys), -1), keys)
    assert p_value(tokens.bincount(minlength=20), p) > 1e-3
    assert p_value(tokens.bincount(minlength=20), p**0.95 / (p**0.95).sum()) < 1e-6  # negative control
    # the noise of two tokens is independent: the winner of a second, disjoint race says nothing of the first
    half = p.clone()
    half[10:] = 0
    low, high = gumbel_draw(half.expand(len(keys), -1), keys), gumbel_draw((p - half).expand(len(keys), -1), keys)
    joint = torch.outer(half / half.sum(), (p - half) / (p - half).sum())
    assert p_value((low * 20 + high).bincount(minlength=400), joint) > 1e-3
    # negative control: the low race's noise
    again = gumbel_draw((p - half).roll(-10).expand(len(keys), -1), keys) + 10
    assert p_value((low * 20 + again).bincount(minlength=400), joint) < 1e-6


def test_gumbel_draw_is_the_argmax_of_log_probabilities_and_fixed_noise(rng, distributions):
    # one key, every distribution: argmax of log p + g, so the pairwise order of p(x) / p(y) alone decides
    p, key = distributions(rng, 5000, 4), torch.tensor(12345).expand(5000)
    first = gumbel_draw(p, key)
    assert torch.equal(first, gumbel_draw(p * 7, key)) and len(first.unique()) == 4
    # g is found from where pairs of tokens change hands, then predicts every draw
    grid = torch.linspace(-12, 12, 4001)
    noise = torch.zeros(4)
    for token in range(1, 4):
        pair = torch.full((len(grid), 4), 0.0)
        pair[:, 0], pair[:, token] = 1.0, grid.exp()
        noise[token] = -grid[(gumbel_draw(pair, key[:4001]) == token).nonzero()[0, 0]]
    scores = p.log() + noise
    clear = scores.topk(2).values.diff().abs().squeeze(1) > 0.05  # the grid's step is 0.006
    assert torch.equal(first[clear], scores.argmax(-1)[clear]) and float(clear.float().mean()) > 0.9


def test_maximal_draw_enumerated_exactly():
    # all probabilities, thresholds and residuals are multiples of 1/8: midpoints of eighths integrate exactly
    q = torch.tensor([4.0, 2, 1, 1]) / 8
    for eighths, kept in (([1.0, 1, 3, 3], 4), ([2.0, 2, 2, 2], 6), ([4.0, 2, 1, 1], 8)):
        p = torch.tensor(eighths) / 8
        middle = (torch.arange(8) + 0.5) / 8
        place, keep, chance = torch.cartesian_prod(middle, middle, middle).unbind(1)
        previous = draw(q.expand(512, -1), place)
        token = maximal_draw(p.expand(512, -1), q.expand(512, -1), previous, keep, chance)
        torch.testing.assert_close(token.bincount(minlength=4) / 512, p, rtol=0, atol=1e-6)
        assert int((token == previous).sum()) == kept * 64  # 1 - TV of them
    nothing = maximal_draw(p.expand(512, -1), torch.zeros(512, 4), previous, keep, chance)
    assert torch.equal(nothing, draw(p.expand(512, -1), chance))


class Smooth:
    """A target that remembers long and faintly: logits = place-free + sum over earlier tokens of 0.9^age 0.3 noise."""

    device, image_tokens, codebook_size = torch.device("cpu"), 64, 64

    def __init__(self, rng):
        self.base = torch.randn(self.codebook_size, generator=rng)
        self.trace = 0.3 * torch.randn(self.codebook_size, self.codebook_size, generator=rng)

    def encode(self, captions, guidance):
        return Prompt(tuple(captions), torch.ones(len(captions), 1, 1, dtype=torch.bool), {})

    def output(self, memory):
        logits = (self.base + memory)[:, None]
        return TargetOutput(logits, logits)

    def prefill(self, prompt, tree_slots):
        self.memory = self.base.new_zeros(len(prompt.captions), self.codebook_size)
        return self.output(self.memory[:, None]), self  # its own cache

    def score(self, tree, prompt, cache):
        nodes, memory = [], self.memory
        for token in tree.tokens.unbind(1):
            memory = 0.9 * memory + self.trace[token]
            nodes.append(memory)
        self.nodes = torch.stack(nodes, 1)
        return self.output(self.nodes)

    def keep(self, path, count, longest):
        last = self.nodes[torch.arange(len(count)), (count - 1).clamp(min=0)]
        self.memory = torch.where(count[:, None] > 0, last, self.memory)


def test_coupled_drafts_change_less_and_are_accepted_more(rng):
    target, stay, length = Smooth(rng), {}, {}
    for coupling in COUPLINGS:
        rounds, same, held = [], 0, 0
        drafter = Jacobi(16, "random", coupling)
        length[coupling] = decode(target, ["a"] * 200, drafter, Vanilla(), observer=rounds.append).accepted_length
        for before, now in itertools.pairwise(rounds):  # the same place, two calls in a row
            place = torch.arange(1, 16) + before.verification.emitted[:, None]
            there = (place < 16) & now.active[:, None]
            old = before.tree.tokens.gather(1, place.clamp(max=15))
            same, held = same + int((there & (old == now.tree.tokens[:, 1:])).sum()), held + int(there.sum())
        stay[coupling] = same / held
    for coupling in COUPLINGS[1:]:
        gain = length[coupling] - length[None]  # paired: the same seed and rows
        t = float(gain.mean() / (gain.std() / len(gain) ** 0.5))
        print(f"{coupling}: {stay[None]:.2f} -> {stay[coupling]:.2f} stay, {length[None].mean():.2f} -> "
              f"{length[coupling].mean():.2f} accepted, t = {t:.1f}")  # fmt: skip
        assert stay[coupling] > 2 * stay[None]
        assert t > 4  # standard errors of the mean gain


# ------------------------------------------------------------------------------------- rules and inits


@pytest.mark.parametrize(
    ("rule", "coupling"),
    [
        (Uniform(1.5), None),
        (Uniform(1.5), "gumbel"),
        (CoolSD(1.3), "maximal"),
        (CoolSD(1.3, floor=1.0), "gumbel"),
        (CoolSD(1.1, length=5), None),
    ],
    ids=str,
)
def test_bias_bounds_the_distance_of_relaxed_windows(rng, rule, coupling):
    target, images = Table(rng), 25_000
    law = target.law(Sampling())
    counts, (result,) = sample(target, images, Jacobi(4, "random", coupling), rule)
    distance = 0.5 * float((counts / images - law).abs().sum())
    noise = 0.5 * float((law * (1 - law) / images).sqrt().sum())  # at most what chance adds to the empirical distance
    bias = result.bias_per_token.double() * target.image_tokens
    assert distance - 2 * noise <= float(bias.mean()) + 4 * float(bias.std()) / images**0.5
    assert float(bias.mean()) > 0 and bool(result.kl_per_token.isfinite().all())
    vanilla = decode(target, [""] * images, Jacobi(4, "random", coupling), Vanilla(), seed=8)
    if min(rule.schedule(3)) >= 1:
        assert result.accepted_length.mean() > vanilla.accepted_length.mean()


@pytest.mark.parametrize(("init", "coupling"), EVERY)
def test_fresh_drafts_follow_their_init(toy, init, coupling):
    target, _ = toy(grid=(4, 4))
    rounds = []
    decode(target, CAPTIONS * 4, Jacobi(7, init, coupling), Vanilla(), observer=rounds.append)
    count = torch.ones(20).long()
    checked = set()
    for turn, look in enumerate(rounds):
        q, tokens = look.tree.draft_probs, look.tree.tokens
        for row in range(20):
            best = None  # of the left neighbour's distribution
            if turn:
                before = rounds[turn - 1]
                best = int(before.target_probs[row, int(before.verification.emitted[row]) - 1].argmax())
            emitted = int(rounds[turn - 1].verification.emitted[row]) if turn else 7
            for node in range(1, 7):
                token, column = int(tokens[row, node]), (int(count[row]) - 1 + node) % 4
                fresh = node + emitted > 7
                if fresh:
                    assert float(q[row, node - 1, token]) == 1
                    if column and init == "repeat":
                        assert token == int(tokens[row, node - 1])
                    elif column and init == "sample" and best is not None:
                        assert token == best
                    checked.add((column > 0, token))
                    best = token if best is not None or not column else None  # certain
                else:
                    best = int(q[row, node - 1].argmax())
        count = count + look.verification.emitted
    if init != "random":
        assert {token for inside, token in checked if not inside} == set(range(5))  # first column: random
    else:
        assert {token for inside, token in checked if inside} == set(range(5))


# ------------------------------------------------------------------------------------------ row by row


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=3, guidance=2.0)], ids=str)
@pytest.mark.parametrize(("init", "coupling"), EVERY)
def test_a_batch_of_five_is_five_calls_of_one(toy, init, coupling, sampling):
    target, _ = toy(grid=(4, 4))
    drafter, rows = Jacobi(5, init, coupling), [3, 0, 17, 4, 2**33]
    batch = decode(target, CAPTIONS, drafter, Vanilla(), sampling, seed=9, rows=rows)
    assert len(batch.emitted.unique(dim=0)) > 1
    for index, row in enumerate(rows):
        alone = decode(target, CAPTIONS[index : index + 1], drafter, Vanilla(), sampling, seed=9, rows=[row])
        assert torch.equal(alone.tokens[0], batch.tokens[index])
        calls = int(alone.target_calls[0])
        assert calls == int(batch.target_calls[index])
        assert torch.equal(alone.emitted[0], batch.emitted[index, :calls])


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_tokens_are_a_function_of_the_seed(toy, coupling):
    target, _ = toy()
    drafter = Jacobi(4, "random", coupling)
    one, two, three = (decode(target, CAPTIONS, drafter, Vanilla(), seed=seed).tokens for seed in (4, 4, 5))
    assert torch.equal(one, two) and not torch.equal(one, three)
    assert len(decode(target, ["a"] * 4, drafter, Vanilla()).tokens.unique(dim=0)) > 1  # rows of one caption differ


@pytest.mark.parametrize("window", [2, 5, 16])
@pytest.mark.parametrize(("init", "coupling"), [("random", None), ("repeat", "gumbel"), ("sample", "maximal")])
def test_vanilla_at_temperature_zero_is_the_plain_argmax(toy, window, init, coupling):
    # 3 x 3 tokens: a window of 16 reaches behind the end of the image from its first call on
    target, _ = toy()
    for guidance in (1.0, 2.0):
        sampling = Sampling(temperature=0, guidance=guidance)
        plain = decode(target, CAPTIONS, sampling=sampling)
        drafted = decode(target, CAPTIONS, Jacobi(window, init, coupling), Vanilla(), sampling, seed=77)
        assert torch.equal(drafted.tokens, plain.tokens)
        assert torch.equal(drafted.emitted.sum(1), torch.full((5,), 8))


def test_misuse_is_refused_in_a_sentence(toy):
    target, _ = toy()
    for arguments, message in (
        ((1,), "window is 1, but must be an integer >= 2"),
        ((2.5,), "window is 2.5"),
        ((4, "zeros"), "init is 'zeros', but must be one of random, repeat, sample"),
        ((4, "random", "shared"), "coupling is 'shared', but must be None, 'gumbel' or 'maximal'"),
    ):
        with pytest.raises(ValueError, match=message):
            Jacobi(*arguments)
    without = types.SimpleNamespace(**{name: getattr(target, name) for name in ("device", "image_tokens", "encode")})
    without.prefill = target.prefill
    with pytest.raises(ValueError, match="needs a target with a grid"):
        decode(without, CAPTIONS, Jacobi(4, "repeat"), Vanilla())
