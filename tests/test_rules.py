"""Schedules and accepted masses against the closed forms of the papers, and the laws that hold for every rule.

A block of a chain, and one level of a tree, are enumerated exactly from a rule's accepted mass and resampling, as
THEORY.md sections 1, 2 and 4 say; `verify` must then have that very law and charge that very bias.
"""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from coolsd import tree as trees
from coolsd.interfaces import DraftTree
from coolsd.methods import RULES, describe_rule, make_rule
from coolsd.rules.grouped import Grouped
from coolsd.rules.lantern import Lantern, LanternPP
from coolsd.rules.relaxed import CoolSD, LinearSD, Uniform, Vanilla
from coolsd.sampling import draw, residual
from coolsd.verify import accepted_mass, bias_of_test, own_resampling, verify

CODES = 4
EVERY = [
    Vanilla(), Uniform(1.3), Uniform(0.8), CoolSD(1.1), CoolSD(1.1, floor=1.0), LinearSD(1.2), LinearSD(1.2, floor=1.0),
    Lantern(2, 0.3), Lantern(3, 1.0, "own"), Lantern(2, 0.25, "own"), LanternPP(2, 2.5), LanternPP(2, 2.5, "own"),
    LanternPP(3, 8.0, "own"), Grouped(2, 0.4, 9.0), Grouped(4, 0.9, 9.0, "own"),
]  # fmt: skip
OWN = (Lantern(2, 0.25, "own"), LanternPP(2, 2.5, "own"))  # whose own resampling is far from the optimal one


def test_the_schedule_of_the_paper_at_length_five():
    # THEORY.md section 3, printed to two digits: w_1 = 5.5 (1 - e^-0.7) / (1 - e^-3.5) = 2.85499
    w = CoolSD(delta=1.1, nu=0.7).schedule(5)
    torch.testing.assert_close(w, torch.tensor([2.86, 1.42, 0.70, 0.35, 0.17]), rtol=0, atol=0.0051)
    first = 5.5 * (1 - math.exp(-0.7)) / (1 - math.exp(-3.5))
    torch.testing.assert_close(w, first * torch.exp(-0.7 * torch.arange(5)), rtol=1e-6, atol=0)
    floored = CoolSD(delta=1.1, nu=0.7, floor=1.0).schedule(5)
    assert floored.tolist()[2:] == [1.0, 1.0, 1.0] and torch.equal(floored[:2], w[:2])


@pytest.mark.parametrize("delta", [0.7, 1.0, 1.1, 2.0, 3.0])
@pytest.mark.parametrize("nu", [0.0, 0.3, 0.7, 2.0])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_annealing_keeps_the_mean_relaxation(delta, nu, length):
    w = CoolSD(delta, nu).schedule(length).double()
    assert w.shape == (length,)
    assert math.isclose(float(w.mean()), delta, rel_tol=1e-6)
    ratio = w[1:] / w[:-1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(-nu)), rtol=1e-5, atol=0)
    floored = CoolSD(delta, nu, floor=1.0).schedule(length).double()
    assert torch.equal(floored, w.clamp(min=1.0))


@pytest.mark.parametrize("delta", [0.7, 1.1, 3.0])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_linear_annealing_falls_in_equal_steps_and_keeps_the_mean(delta, length):
    w = LinearSD(delta).schedule(length)
    wanted = [2 * delta * (length + 1 - i) / (length + 1) for i in range(1, length + 1)]
    torch.testing.assert_close(w, torch.tensor(wanted), rtol=1e-6, atol=0)
    assert w.dtype == torch.float32 and math.isclose(float(w.mean()), delta, rel_tol=1e-6)
    assert torch.equal(LinearSD(delta, floor=1.0).schedule(length), w.clamp(min=1.0))


def test_a_jacobi_window_would_start_high_without_a_length():
    assert round(float(CoolSD(1.1).schedule(16)[0]), 2) == 8.86  # THEORY.md section 3
    given = CoolSD(1.1, length=5).schedule(16)
    torch.testing.assert_close(given[:5], CoolSD(1.1).schedule(5))
    assert bool((given.diff() < 0).all())


def test_a_length_beyond_the_depth_is_the_head_of_the_longer_schedule():
    torch.testing.assert_close(CoolSD(1.5, length=8).schedule(3), CoolSD(1.5).schedule(8)[:3])


def test_special_cases_coincide():
    assert torch.equal(Vanilla().schedule(4), torch.ones(4))
    assert torch.equal(Uniform(1.3).schedule(4), torch.full((4,), 1.3))
    torch.testing.assert_close(CoolSD(1.3, nu=0.0).schedule(4), Uniform(1.3).schedule(4))
    torch.testing.assert_close(LinearSD(1.3).schedule(1), Uniform(1.3).schedule(1))
    assert torch.equal(CoolSD(1.0, nu=0.0).schedule(4), Vanilla().schedule(4))
    assert all(rule.schedule(0).shape == (0,) for rule in (Vanilla(), Uniform()))


def test_vanilla_mass_is_the_smaller_of_the_two_exactly(rng, distributions):
    target, draft = distributions(rng, 50, 7), distributions(rng, 50, 7)
    mass = Vanilla().accepted_mass(target, draft, torch.ones(1))
    assert torch.equal(mass, torch.minimum(target, draft))


@pytest.mark.parametrize("rule", [Vanilla(), Uniform(1.7), CoolSD(2.0), CoolSD(1.1, floor=1.0)])
def test_accepted_mass_never_exceeds_draft_nor_relaxed_target(rng, distributions, rule):
    target, draft = distributions(rng, 6, 5, 7), distributions(rng, 6, 5, 7)
    w = rule.schedule(5)[:, None]
    mass = rule.accepted_mass(target, draft, w)
    assert torch.equal(mass, torch.minimum(draft, w * target))
    accept = mass / draft
    torch.testing.assert_close(accept, (w * target / draft).clamp(max=1), rtol=1e-6, atol=0)


def test_only_vanilla_calls_itself_lossless():
    assert Vanilla().lossless
    assert not Uniform(1.0).lossless and not CoolSD(1.0, nu=0.0).lossless


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0), "delta is 0, but must be a number > 0"),
        (lambda: Uniform(-1.0), "delta is -1.0, but must be a number > 0"),
        (lambda: Uniform(math.nan), "delta is nan"),
        (lambda: CoolSD(delta=0.0), "delta is 0.0, but must be a number > 0"),
        (lambda: CoolSD(delta=math.inf), "delta is inf"),
        (lambda: CoolSD(nu=-0.1), "nu is -0.1, but must be a number >= 0"),
        (lambda: CoolSD(nu=math.nan), "nu is nan"),
        (lambda: CoolSD(floor=-1.0), "floor is -1.0, but must be None or a number >= 0"),
        (lambda: CoolSD(floor=math.nan), "floor is nan"),
        (lambda: CoolSD(length=0), "length is 0, but must be None or an integer >= 1"),
        (lambda: CoolSD(length=math.inf), "length is inf, but must be None or an integer >= 1"),
        (lambda: CoolSD(delta=1e39), "delta is 1e+39, but must be a number > 0 and <= 1e+06".replace("+", r"\+")),
        (lambda: LinearSD(delta=-2.0), "LinearSD delta is -2.0, but must be a number > 0"),
        (lambda: LinearSD(delta=math.nan), "LinearSD delta is nan"),
        (lambda: LinearSD(floor=-1.0), "LinearSD floor is -1.0, but must be None or a number >= 0"),
        (lambda: make_rule("lantern", delta=1.1), "rule lantern has no delta; it takes bound, k, resampling"),
        (lambda: make_rule("cool-sd", k=10, bound=2.0), "rule cool-sd has no k, bound; it takes delta, floor, length"),
        (lambda: make_rule("lantern", bound=2.0), "Lantern bound is 2.0, but must be from 0 to 1"),
        (lambda: make_rule(Vanilla(), k=10), "k: a rule given by class_path takes its numbers as its init_args"),
        (lambda: make_rule("lanternpp"), "no rule named 'lanternpp'; choose one of vanilla, uniform, cool-sd"),
    ],
)
def test_bad_parameters_are_refused_with_value_and_limit(make, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        make()


# --------------------------------------------------------------------------------------- every rule


@pytest.fixture
def bind(rng):
    """bind(rule) -> the rule on a target with random codes and embeddings, CODES of each."""
    codebook, embedding = torch.randn(CODES, 2, generator=rng), torch.randn(CODES, 3, generator=rng)
    target = SimpleNamespace(
        codebook=lambda: codebook, device=codebook.device, folder=None, ends=lambda: {"embedding": embedding}
    )
    return lambda rule: rule.bind(target) if hasattr(rule, "bind") else rule


def one_test(rule, p, q, w):
    """One test of a draft of q [V] against p [V], float32 as in decoding, given in float64.

    Returns A [V]; laws [V, V], row x = law after x was rejected; what is charged: N, and behind a rejected x [V].
    """
    mass = accepted_mass(rule, p, q, w, torch.ones(1))
    best = residual(p, mass).expand(CODES, -1)
    laws = best
    if own_resampling(rule):
        laws = rule.resample(p.expand(CODES, -1), q.expand(CODES, -1), w, torch.arange(CODES)[:, None])
    behind = 0.5 * (laws - best).abs().sum(-1)
    return mass.double(), laws.double(), float(bias_of_test(p, mass)), behind.double()


def joint_law(tables):
    joint = torch.ones((), dtype=torch.float64)
    for table in tables:
        joint = joint[..., None] * table.double()
    return joint


def law_of_block(rule, target, draft):
    """Law [V] * (L + 1) of a block of a chain, padded with target tokens; bias charged, with and without what a law
    that depends on the rejected token is charged."""
    length = len(draft)
    w, law, bias = rule.schedule(length), torch.zeros([CODES] * (length + 1), dtype=torch.float64), [0.0, 0.0]

    def walk(prefix, reach):
        depth = len(prefix)
        if depth == length:
            law[prefix] += reach * target[depth][prefix].double()
            return
        p, q = target[depth][prefix], draft[depth][prefix]
        mass, laws, charge, behind = one_test(rule, p, q, w[depth : depth + 1])
        rejected = q.double() - mass
        bias[0] += reach * (charge + float(rejected @ behind))
        bias[1] += reach * charge
        for x, again in enumerate(rejected @ laws):
            law[(*prefix, x)] += reach * again * joint_law([table[(*prefix, x)] for table in target[depth + 1 :]])
            walk((*prefix, x), reach * float(mass[x]))

    walk((), 1.0)
    return law, *bias


def law_of_siblings(rule, p, q, w):
    """Law [V] of the token behind a node with two children drawn without replacement; the bias charged."""
    first, laws, charge, behind = one_test(rule, p, q, w)
    law, bias = first.clone(), charge
    for a in range(CODES):
        reach = float(q[a]) - float(first[a])
        left = q * (torch.arange(CODES) != a)
        left = left / left.sum()
        second, final, again, further = one_test(rule, laws[a].float(), left, w)
        rejected = left.double() - second
        law += reach * (second + rejected @ final)
        bias += reach * (float(behind[a]) + again + float(rejected @ further))
    return law, bias


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_acceptance_is_a_probability_and_no_less_than_nothing(rule, bind, rng, distributions):
    rule = bind(rule)
    target, draft = distributions(rng, 500, 3, CODES, sharpness=2.0), distributions(rng, 500, 3, CODES, sharpness=2.0)
    target[:100] = torch.nn.functional.one_hot(target[:100].argmax(-1), CODES).float()
    draft[50:150] = torch.nn.functional.one_hot(draft[50:150].argmin(-1), CODES).float()
    mass = rule.accepted_mass(target, draft, rule.schedule(3)[:, None])
    assert bool((mass >= 0).all()) and bool((mass <= draft).all())
    law = mass + (draft.sum(-1) - mass.sum(-1))[..., None] * residual(target, mass)
    torch.testing.assert_close(law.sum(-1), torch.ones(500, 3))
    if own_resampling(rule):
        token = draw(draft[:, 0], torch.rand(500, generator=rng))[:, None]
        again = rule.resample(target[:, 0], draft[:, 0], torch.ones(1), token)
        torch.testing.assert_close(again.sum(-1), torch.ones(500))
        assert bool((again >= 0).all()) and bool((again[target[:, 0] == 0] == 0).all())


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_optimal_resampling_beats_a_thousand_others(rule, bind, rng, distributions):
    """Theorem 2: D(G*) <= D(G); Proposition 1: where nothing is tightened, G* is the vanilla residual."""
    rule = bind(rule)
    p, q, others = (distributions(rng, n, CODES, sharpness=2.0) for n in (40, 40, 1000))
    others = torch.cat([others, torch.eye(CODES)])[:, None]
    mass = accepted_mass(rule, p, q, rule.schedule(1), torch.ones(1))
    rejected = q.sum(-1, keepdim=True) - mass.sum(-1, keepdim=True)
    best = 0.5 * (mass + rejected * residual(p, mass) - p).abs().sum(-1)
    torch.testing.assert_close(best, bias_of_test(p, mass), rtol=0, atol=1e-6)
    for some in others.split(100):
        assert bool((0.5 * (mass + rejected * some - p).abs().sum(-1) >= best - 1e-6).all())
    tightened = (mass < torch.minimum(p, q) - 1e-7).any(-1)
    kept = ~tightened & (rejected[:, 0] > 1e-3)
    assert bool(kept.any()) or rule == Uniform(0.8) or float(rejected.max()) < 1e-3  # all tightened, none rejected
    torch.testing.assert_close(residual(p, mass)[kept], residual(p, q)[kept], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_expected_length_and_kl_of_a_block(rule, bind, rng, distributions):
    """E[length] = 1 + sum over depths of the mass that passes; KL certificate >= KL of the block, 0 where lossless."""
    rows, rule = 40_000, bind(rule)
    target, draft = ([distributions(rng, *[CODES] * i, CODES) for i in range(n)] for n in (3, 2))
    first = draw(draft[0].expand(rows, -1), torch.rand(rows, generator=rng))
    second = draw(draft[1][first], torch.rand(rows, generator=rng))
    laws = torch.stack([draft[0].expand(rows, -1), draft[1][first]], 1)
    tree = DraftTree(torch.stack([first, first, second], 1), trees.chain(2), laws)
    p = torch.stack([target[0].expand(rows, -1), target[1][first], target[2][first, second]], 1)
    decision = verify(tree, p, rule, rule.schedule(2), torch.rand(rows, 3, generator=rng))
    w = rule.schedule(2)
    one = accepted_mass(rule, target[0], draft[0], w[:1], torch.ones(1))
    two = accepted_mass(rule, target[1], draft[1], w[1:], torch.full((1,), 2))
    emitted, expected = decision.emitted.double(), 1 + float(one.sum()) + float(one @ two.sum(-1))
    assert abs(float(emitted.mean()) - expected) < 4 * float(emitted.std()) / rows**0.5 + 1e-5
    if own_resampling(rule):
        assert decision.kl is None
        return
    law = law_of_block(rule, target, draft)[0]
    exact = float(torch.special.xlogy(law, law / joint_law(target)).sum())
    charged = decision.kl.double().sum(1)
    assert exact <= float(charged.mean()) + 4 * float(charged.std()) / rows**0.5 + 1e-6
    if rule in (Vanilla(), Uniform(0.8)):
        assert exact < 1e-6 and not decision.kl.any() and not decision.bias.any()
    else:
        assert exact > 1e-4


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_certificate_bounds_the_distance_of_a_block(rule, bind, rng, distributions):
    rule, largest, uncharged = bind(rule), 0.0, 0
    for seed in range(8):
        rng.manual_seed(seed)
        target, draft = ([distributions(rng, *[CODES] * i, CODES) for i in range(n)] for n in (3, 2))
        law, bias, nothing = law_of_block(rule, target, draft)
        assert abs(float(law.sum()) - 1) < 1e-6
        distance = 0.5 * float((law - joint_law(target)).abs().sum())
        assert distance <= bias + 1e-6
        largest, uncharged = max(largest, distance), uncharged + (distance > nothing + 1e-6)
        one, bias, _ = law_of_block(rule, target[:2], draft[:1])
        if not own_resampling(rule):  # tight at one position
            assert abs(0.5 * float((one.sum(1) - target[0].double()).abs().sum()) - bias) < 1e-6
    lossless = rule in (Vanilla(), Uniform(0.8))
    assert largest < 1e-6 if lossless else largest > 0.01
    if rule in OWN:
        assert uncharged  # N alone is no bound there


@pytest.mark.parametrize("rule", EVERY[5:], ids=str)
def test_verify_has_the_law_and_the_bias_of_the_enumeration(rule, bind, rng, distributions, p_value):
    rows, rule = 100_000, bind(rule)
    false = Vanilla()  # negative control: the rule that does not relax, or does not resample in its own way
    if rule in OWN:
        false = copy.copy(rule)
        object.__setattr__(false, "resampling", "optimal")

    def apart(target, draft):
        return float((law_of_block(rule, target, draft)[0] - law_of_block(false, target, draft)[0]).abs().sum())

    pairs = [[[distributions(rng, *[CODES] * i, CODES) for i in range(n)] for n in (2, 1)] for _ in range(12)]
    target, draft = max(pairs, key=lambda pair: apart(*pair))  # where it matters
    law, bias, _ = law_of_block(rule, target, draft)
    drafted = draw(draft[0].expand(rows, -1), torch.rand(rows, generator=rng))[:, None]
    tree = DraftTree(torch.cat([drafted, drafted], 1), trees.chain(1), draft[0].expand(rows, 1, -1))
    p = torch.stack([target[0].expand(rows, -1), target[1][drafted[:, 0]]], 1)
    decision = verify(tree, p, rule, rule.schedule(1), torch.rand(rows, 2, generator=rng))
    counts = decision.tokens[:, 0].bincount(minlength=CODES)
    assert p_value(counts, law.sum(1)) > 1e-3
    assert abs(float(decision.bias.mean()) - bias) <= 4 * float(decision.bias.std()) / rows**0.5 + 1e-6
    assert p_value(counts, law_of_block(false, target, draft)[0].sum(1)) < 1e-6


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_verify_has_the_law_of_siblings_and_bounds_its_distance(rule, bind, rng, distributions, p_value):
    rows, rule = 100_000, bind(rule)
    p, q, numbers = distributions(rng, CODES), distributions(rng, CODES), torch.rand(rows, 5, generator=rng)
    law, bias = law_of_siblings(rule, p, q, rule.schedule(1))
    assert abs(float(law.sum()) - 1) < 1e-6
    assert 0.5 * float((law - p.double()).abs().sum()) <= bias + 1e-6
    first = draw(q.expand(rows, -1), numbers[:, 0])
    second = draw(q * (1 - torch.nn.functional.one_hot(first, CODES)), numbers[:, 1])
    tree = DraftTree(torch.stack([first, first, second], 1), (-1, 0, 0), q.expand(rows, 1, -1))
    decision = verify(tree, p.expand(rows, 3, -1), rule, rule.schedule(1), numbers[:, 2:])
    counts = decision.tokens[:, 0].bincount(minlength=CODES)
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, 0.9 * law + 0.1 * law.roll(1)) < 1e-6  # negative control
    charged = decision.bias.sum(1)
    assert abs(float(charged.mean()) - bias) <= 4 * float(charged.std()) / rows**0.5 + 1e-6


def test_every_name_makes_its_rule_and_describes_it_in_json():
    settings = {
        "uniform": {"delta": 1.4}, "cool-sd": {"delta": 1.4, "nu": 0.3, "floor": 1.0}, "linear-sd": {"delta": 1.4},
        "lantern": {"k": 7, "bound": 0.2, "resampling": "own"}, "lantern++": {"k": 7, "bound": 3.0},
        "grouped": {"resampling": "own"},
    }  # fmt: skip
    for name, kind in RULES.items():
        rule = make_rule(name, nothing=None, **settings.get(name, {}))
        assert type(rule) is kind
        about = json.loads(json.dumps(describe_rule(rule, 2), allow_nan=False))
        assert about["name"] == name and len(about["schedule"]) == 2
        assert settings.get(name, {}).items() <= about.items()


def test_a_bound_rule_is_described_without_its_table(bind):
    for rule in EVERY:
        assert describe_rule(bind(rule), 3) == describe_rule(rule, 3) and bind(rule) == rule
