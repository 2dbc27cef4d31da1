"""Grouped speculative decoding against the public code's numbers (tests/parity) and an obvious loop."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.interfaces import DraftTree
from coolsd.rules.grouped import Grouped, close_pairs
from coolsd.rules.relaxed import Vanilla
from coolsd.sampling import residual
from coolsd.tree import chain
from coolsd.verify import verify

GOLDEN = load_file(Path(__file__).parent / "parity" / "sjd_gsd_a.safetensors")
ONES = torch.ones(1)


def grouped_on(embedding, *settings):
    return Grouped(*settings).bind(SimpleNamespace(ends=lambda: {"embedding": embedding}))


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("kind", ["sjd", "gsd"])
def test_acceptance_and_residual_are_those_of_the_public_code(case, kind):
    def given(name):
        return GOLDEN[f"{case}.{name}"]

    rule = Vanilla()
    if kind == "gsd":
        rule = Grouped(resampling="own")
        object.__setattr__(rule, "close", GOLDEN["sims"] < rule.max_distance)
    p, q, draft, u = given("in.p"), given("in.q"), given("in.draft"), given("in.u")
    uniforms = torch.cat([u[1:], u[:1]])[None]
    tree = DraftTree(draft, chain(5), q[:, 1:])
    matched, wanted = int(given(f"{kind}.matched")), given(f"{kind}.tokens")[0]
    for certificates in (True, False):
        decision = verify(tree, p, rule, torch.ones(5), uniforms, certificates)
        assert int(decision.emitted) == matched
        assert torch.equal(decision.tokens[0, : matched - 1], wanted[: matched - 1])
    if matched < 6:  # a draft was rejected
        law = residual(p[:, matched - 1], torch.minimum(p, q.roll(-1, 1))[:, matched - 1])
        if kind == "gsd":
            law = rule.resample(p[:, matched - 1], q[:, matched], ONES, draft[:, matched, None])
        torch.testing.assert_close(law, given(f"{kind}.residual"), rtol=1e-5, atol=1e-6)


def test_the_golden_cases_tell_the_rules_apart():
    accepted = {kind: [int(GOLDEN[f"{case}.{kind}.matched"]) for case in range(8)] for kind in ("sjd", "gsd")}
    assert accepted["sjd"] != accepted["gsd"]


def slow_mass(rule, embedding, p, q):
    """A of one position by the definition, token by token."""
    order, half, mass = p.argsort(stable=True).tolist(), rule.window // 2, torch.zeros_like(p)
    for rank, x in enumerate(order):
        cluster = [
            y
            for y in order[max(0, rank - half) : rank + half]
            if abs(p[y] - p[x]) < rule.max_prob_gap and (embedding[y] - embedding[x]).square().sum() < rule.max_distance
        ]
        if rank < half:
            cluster = [x]
        mass[x] = q[x] * min(1, p[cluster].sum() / q[cluster].sum()) if q[x] > 0 else 0
    return mass


@pytest.mark.parametrize("settings", [(2, 0.1, 3.0), (4, 0.3, 9.0), (6, 0.05, 1e9), (14, 0.15, 2.0), (8, 9.0, 9.0)])
@pytest.mark.parametrize("codes", [3, 5, 16])
def test_clusters_are_those_of_the_loop(settings, codes, rng, distributions):
    embedding = torch.randn(codes, 3, generator=rng)
    rule = grouped_on(embedding, *settings)
    target, draft = distributions(rng, 7, 3, codes).double(), distributions(rng, 7, 3, codes).double()
    draft[0] *= draft[0] > 0.05  # as after top-k
    target[:2] *= target[:2] > 0.03
    draft, target = draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    mass = rule.accepted_mass(target, draft, ONES)
    for p, q, row in zip(target.flatten(0, 1), draft.flatten(0, 1), mass.flatten(0, 1), strict=True):
        torch.testing.assert_close(row, slow_mass(rule, embedding, p, q), rtol=0, atol=1e-12)
    assert bool((mass >= 0).all()) and bool((mass <= draft).all())


def test_tokens_that_nothing_resembles_make_it_vanilla(rng, distributions):
    target, draft = distributions(rng, 40, 20), distributions(rng, 40, 20)
    mass = grouped_on(10 * torch.eye(20)).accepted_mass(target, draft, ONES)
    torch.testing.assert_close(mass, torch.minimum(target, draft))


def test_distance_is_squared(rng):
    embedding = torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.0, 0.8]])
    assert close_pairs(embedding, 0.5).tolist() == [[True, True, False], [True, True, False], [False, False, True]]


def test_generate_decodes_with_groups(toy):
    target, head = toy()
    runs = [
        generate(target, ["a", "b c"] * 8, Chain(head, 3), rule, seed=3, decode_images=False)
        for rule in (Vanilla(), Grouped(2, 0.5, 1e9), Grouped(4, 0.5, 1e9, "own"), Grouped())
    ]
    assert all(bool((run.tokens < 5).all()) and bool(run.bias_per_token.isfinite().all()) for run in runs)
    assert torch.equal(runs[0].tokens, runs[3].tokens)  # five codes are fewer than half of the paper's window
    assert float(runs[3].bias_per_token.max()) == 0 < runs[1].bias_per_token.mean()
    assert not torch.equal(runs[0].tokens, runs[1].tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grouped(window=0), "Grouped window is 0, but must be an even integer >= 2"),
        (lambda: Grouped(window=7), "Grouped window is 7, but must be an even integer >= 2"),
        (lambda: Grouped(window=math.nan), "Grouped window is nan"),
        (lambda: Grouped(max_prob_gap=0), "Grouped max_prob_gap is 0, but must be a number > 0"),
        (lambda: Grouped(max_distance=-1.0), "Grouped max_distance is -1.0, but must be a number > 0"),
        (lambda: Grouped(max_distance=math.nan), "Grouped max_distance is nan"),
        (lambda: Grouped(resampling=None), "Grouped resampling is None, but must be 'optimal' or 'own'"),
    ],
)
def test_bad_parameters_are_refused_with_value_and_limit(make, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert message in str(error.value)
