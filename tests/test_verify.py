"""The law of verification: exact enumeration on vocabularies of 3 to 5, chi-square on many uniforms, a slow walk.

A toy language model is a table: tables[i][x1, ..., xi] is the distribution of the next token behind x1 .. xi.
"""

import pytest
import torch

from coolsd import tree as trees
from coolsd.interfaces import DraftTree
from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla
from coolsd.sampling import draw, residual
from coolsd.verify import _verify_chain, _verify_tree, bias_of_test, kl_of_test, verify

RULES = [Vanilla(), Uniform(1.3), CoolSD(1.1), CoolSD(1.1, floor=1.0), CoolSD(2.0), Uniform(0.8)]


@pytest.fixture
def tables(rng, distributions):
    """tables(codes, depth) -> a random model of `depth` tokens, float32."""
    return lambda codes, depth, sharpness=1.0: [
        distributions(rng, *[codes] * i, codes, sharpness=sharpness) for i in range(depth)
    ]


def law_of(tables) -> torch.Tensor:
    """Joint law of all tokens, float64 [V, ..., V]."""
    joint = torch.ones((), dtype=torch.float64)
    for table in tables:
        joint = joint[..., None] * table.double()
    return joint


def slow_law(target, draft, w):
    """Enumerate one block of a chain in float64: every draft, accepted or not, padded with target tokens.

    Returns the law of the padded block [V] * (L + 1), and the expected emitted tokens, summed bias and KL. Written
    from THEORY.md sections 1 and 2: f = min(1, w p / q), G* = normalise(relu(p - q f)).
    """
    codes, length = target[0].shape[-1], len(draft)
    law = torch.zeros([codes] * (length + 1), dtype=torch.float64)
    expected = {"emitted": 0.0, "bias": 0.0, "kl": 0.0}

    def rest(prefix):
        joint = torch.ones((), dtype=torch.float64)
        for table in target[len(prefix) :]:
            joint = joint[..., None] * table[prefix].double()
        return joint

    def walk(prefix, reach):
        depth = len(prefix)
        expected["emitted"] += reach
        p = target[depth][prefix].double()
        if depth == length:
            for x in range(codes):
                law[(*prefix, x)] += reach * p[x]
            return
        q = draft[depth][prefix].double()
        mass = q * (w[depth] * p / q).clamp(max=1)
        owed = (p - mass).clamp(min=0)
        again = owed / owed.sum() if owed.sum() > 0 else p
        emitted = mass + (1 - mass.sum()) * again
        expected["bias"] += reach * float((mass - p).clamp(min=0).sum())
        expected["kl"] += reach * float((emitted * (emitted / p).log()).sum())
        for x in range(codes):
            law[(*prefix, x)] += reach * (1 - mass.sum()) * again[x] * rest((*prefix, x))
            walk((*prefix, x), reach * float(mass[x]))

    walk((), 1.0)
    return law, expected


def slow_verify(tokens, target_probs, draft_probs, w, uniforms):
    """One row of a chain, token by token: the obvious loop. Returns emitted tokens and the bias of executed tests."""
    emitted, bias = [], []
    for i, token in enumerate(tokens):
        p, q = target_probs[i], draft_probs[i]
        mass = torch.minimum(q, w[i] * p)
        bias.append(float((mass - p).clamp(min=0).sum()))
        if uniforms[i] * q[token] < mass[token]:
            emitted.append(token)
            continue
        owed = (p - mass).clamp(min=0)
        return [*emitted, int(draw(owed / owed.sum() if owed.sum() > 0 else p, uniforms[-1]))], bias
    return [*emitted, int(draw(target_probs[-1], uniforms[-1]))], bias


def chain_rows(target, draft, drafted):
    """Drafted tokens [B, L] -> tree, target_probs [B, L + 1, V], with the tables read at the drafted prefixes."""
    length = drafted.shape[1]
    prefixes = [tuple(drafted[:, :i].unbind(1)) for i in range(length + 1)]
    batch = len(drafted)
    p = torch.stack([t[x] if x else t.expand(batch, -1) for t, x in zip(target, prefixes, strict=True)], dim=1)
    q = torch.stack([t[x] if x else t.expand(batch, -1) for t, x in zip(draft, prefixes[:-1], strict=True)], dim=1)
    root = torch.zeros(batch, 1, dtype=torch.long)
    return DraftTree(torch.cat([root, drafted], 1), trees.chain(length), q), p


def sample_chain(draft, uniforms):
    drafted = torch.empty(len(uniforms), 0, dtype=torch.long)
    for i, table in enumerate(draft):
        probs = table[tuple(drafted.unbind(1))] if i else table.expand(len(uniforms), -1)
        drafted = torch.cat([drafted, draw(probs, uniforms[:, i])[:, None]], dim=1)
    return drafted


def padded(decision, target, uniforms):
    """Emitted tokens [B, L + 1], continued by target samples from uniforms [B, L + 1] behind `emitted`."""
    tokens = decision.tokens.clone()
    for i in range(1, tokens.shape[1]):
        more = draw(target[i][tuple(tokens[:, :i].unbind(1))], uniforms[:, i])
        tokens[:, i] = torch.where(decision.emitted > i, tokens[:, i], more)
    return tokens


def counts_of(tokens, codes):
    index = torch.zeros(len(tokens), dtype=torch.long)
    for column in tokens.unbind(1):
        index = index * codes + column
    return index.bincount(minlength=codes ** tokens.shape[1])


# ----------------------------------------------------------------------------------- exact enumeration


@pytest.mark.parametrize("codes", [3, 4, 5])
def test_the_slow_law_of_vanilla_is_the_target(tables, codes):
    target, draft = tables(codes, 3), tables(codes, 2)
    law, expected = slow_law(target, draft, [1.0, 1.0])
    torch.testing.assert_close(law, law_of(target), rtol=0, atol=1e-7)
    assert abs(expected["bias"]) < 1e-12


# All probabilities, acceptance thresholds and residuals below are multiples of 1/8, so the midpoints of a grid of
# eighths integrate over every uniform exactly: (q, p, w) -> accept, residual, e.g.
#   q = 4 2 1 1   p = 1 1 3 3   w = 1   accept = 2/8 4/8 1 1     residual = 0 0 1/2 1/2
#   q = 4 2 1 1   p = 3 4 1 0   w = 1/2 accept = 3/8 1 4/8 0     residual = 3/8 4/8 1/8 0
DRAFT = torch.tensor([4.0, 2, 1, 1]) / 8
FIRST = torch.tensor([1.0, 1, 3, 3]) / 8
SECOND = torch.tensor([[3.0, 4, 1, 0], [4, 2, 1, 1], [3, 4, 1, 0], [4, 2, 1, 1]]) / 8
THIRD = torch.tensor([[2.0, 3, 2, 1], [0, 0, 0, 8], [1, 5, 0, 2], [2, 2, 2, 2]]) / 8


@pytest.mark.parametrize("w", [(1.0, 1.0), (2.0, 0.5), (2.0, 2.0), (1.0, 0.5)])
@pytest.mark.parametrize("walk", [_verify_chain, _verify_tree])
def test_verify_integrated_over_all_uniforms_has_the_enumerated_law(w, walk):
    target, draft = [FIRST, SECOND, THIRD.roll(1, 0)[:, None].expand(-1, 4, -1)], [DRAFT, DRAFT.expand(4, -1)]
    grid = (torch.arange(8) + 0.5) / 8
    drafted, uniforms = torch.cartesian_prod(*[torch.arange(4)] * 2), torch.cartesian_prod(grid, grid, grid)
    tree, p = chain_rows(target, draft, drafted.repeat_interleave(len(uniforms), 0))
    rule = Vanilla() if w == (1.0, 1.0) else Uniform(1.5)  # w is given below; the rule only says min(q, w p)
    decision = walk(tree, p, rule, torch.tensor(w), uniforms.repeat(len(drafted), 1), True)
    weight = (DRAFT[drafted].prod(1).double() / len(uniforms)).repeat_interleave(len(uniforms))
    law = torch.zeros(4, 4, 4, dtype=torch.float64)
    for emitted in (1, 2, 3):
        these = decision.emitted == emitted
        mass = torch.zeros([4] * emitted, dtype=torch.float64)
        mass.index_put_(tuple(decision.tokens[these, :emitted].unbind(1)), weight[these], accumulate=True)
        for table in target[emitted:]:
            mass = mass[..., None] * table.double()
        law += mass
    wanted, expected = slow_law(target, draft, w)
    torch.testing.assert_close(law, wanted, rtol=0, atol=1e-12)  # everything is exact in binary
    assert abs(float((weight * decision.emitted).sum()) - expected["emitted"]) < 1e-12
    assert abs(float((weight * decision.bias.sum(1)).sum()) - expected["bias"]) < 1e-12
    if max(w) == 1:
        torch.testing.assert_close(law, law_of(target), rtol=0, atol=1e-12)  # lossless
        assert abs(expected["bias"]) < 1e-12
    else:
        distance = 0.5 * float((law - law_of(target)).abs().sum())
        assert 0.01 < distance <= expected["bias"]


@pytest.mark.parametrize("rule", RULES[1:], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_certificates_bound_the_exact_distance(rule, seed, tables, rng):
    rng.manual_seed(seed)
    target, draft = tables(3, 4), tables(3, 3)
    law, expected = slow_law(target, draft, rule.schedule(3).tolist())
    wanted = law_of(target)
    assert abs(float(law.sum()) - 1) < 1e-6
    distance = 0.5 * float((law - wanted).abs().sum())
    divergence = float((law * (law / wanted).log()).sum())
    assert distance <= expected["bias"] + 1e-7
    assert divergence <= expected["kl"] + 1e-7
    if max(rule.schedule(3)) > 1.2:
        assert distance > 1e-3  # the rule does something here


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_expected_length_is_one_plus_the_products_of_acceptance(rule, tables):
    target, draft = tables(4, 4), tables(4, 3)
    w = rule.schedule(3).tolist()
    accept = torch.ones((), dtype=torch.float64)
    formula, joint = 1.0, torch.ones((), dtype=torch.float64)
    for p, q, weight in zip(target, draft, w, strict=False):
        joint = joint[..., None] * q.double()
        accept = accept[..., None] * (weight * p.double() / q.double()).clamp(max=1)
        formula += float((joint * accept).sum())
    assert abs(slow_law(target, draft, w)[1]["emitted"] - formula) < 1e-6


def test_a_floor_costs_no_bias_and_lengthens(tables):
    """Depths with w <= 1 have no bias either way, and behind the relaxed ones they do not change what is reached."""
    target, draft = tables(4, 4), tables(4, 3)
    tightened, floored = (
        slow_law(target, draft, CoolSD(1.1, floor=floor).schedule(3).tolist())[1] for floor in (None, 1.0)
    )
    assert min(CoolSD(1.1).schedule(3)) < 1 < max(CoolSD(1.1).schedule(3))
    assert abs(floored["bias"] - tightened["bias"]) < 1e-9 and tightened["bias"] > 0.01
    assert floored["emitted"] > tightened["emitted"] + 0.05


@pytest.mark.parametrize("seed", range(8))
def test_at_equal_length_relaxing_early_has_the_smaller_bound(seed, rng, distributions):
    """Proposition 2: the decreasing schedule against its reverse, scaled until both emit the same. Here the draft is
    equally good at every depth: where it is worst at the first one, the reverse can have the smaller bound."""
    rng.manual_seed(seed)
    p, q = distributions(rng, 2, 3)
    target, draft = ([law.expand(*[3] * i, 3) for i in range(depth)] for law, depth in ((p, 4), (q, 3)))
    early = CoolSD(1.3).schedule(3)
    wanted = slow_law(target, draft, early.tolist())[1]
    low, high = 0.0, 64.0
    for _ in range(40):
        scale = (low + high) / 2
        late = slow_law(target, draft, (early.flip(0) * scale).tolist())[1]
        low, high = (low, scale) if late["emitted"] > wanted["emitted"] else (scale, high)
    assert abs(late["emitted"] - wanted["emitted"]) < 1e-6
    assert 0.01 < wanted["bias"] < 0.97 * late["bias"]


def test_optimal_resampling_beats_every_other(rng, distributions):
    target, draft = distributions(rng, 40, 5), distributions(rng, 40, 5)
    for weight in (0.5, 1.0, 1.6, 3.0):
        mass = torch.minimum(draft, weight * target)
        rejected = 1 - mass.sum(-1, keepdim=True)
        best = 0.5 * (mass + rejected * residual(target, mass) - target).abs().sum(-1)
        torch.testing.assert_close(best, bias_of_test(target, mass), rtol=0, atol=1e-6)
        corners = torch.eye(5)[:, None].expand(-1, 40, -1)
        others = torch.cat([distributions(rng, 300, 40, 5, sharpness=2.0), target[None], draft[None], corners])
        distance = 0.5 * (mass + rejected * others - target).abs().sum(-1)
        assert bool((distance >= best - 1e-6).all())


def test_residual_is_the_vanilla_one_wherever_nothing_is_tightened(rng, distributions):
    # Proposition 1: for f >= min(1, p / q), G* = normalise(relu(p - q))
    target, draft = distributions(rng, 40, 5), distributions(rng, 40, 5)
    vanilla = (target - draft).relu()
    vanilla = vanilla / vanilla.sum(-1, keepdim=True)
    for weight in (1.0, 1.05):
        mass = torch.minimum(draft, weight * target)
        some = mass.sum(-1) < 0.999
        torch.testing.assert_close(residual(target, mass)[some], vanilla[some], rtol=0, atol=2e-4)


# ------------------------------------------------------------------------------ row by row, and by law


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_verify_equals_the_slow_loop_row_by_row(rule, tables, rng):
    target, draft, rows = tables(4, 4), tables(4, 3), 500
    drafted = sample_chain(draft, torch.rand(rows, 3, generator=rng))
    tree, p = chain_rows(target, draft, drafted)
    uniforms = torch.rand(rows, 4, generator=rng)
    w = rule.schedule(3)
    decision = verify(tree, p, rule, w, uniforms)
    for row in range(rows):
        emitted, bias = slow_verify(drafted[row].tolist(), p[row], tree.draft_probs[row], w, uniforms[row])
        assert decision.tokens[row, : decision.emitted[row]].tolist() == emitted
        assert decision.path[row].tolist() == [0, 1, 2, 3]
        wanted = torch.tensor(bias + [0.0] * (3 - len(bias)))
        torch.testing.assert_close(decision.bias[row], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_verify_has_the_enumerated_law(rule, tables, rng, p_value):
    codes, length, rows = 3, 3, 200_000
    target, draft = tables(codes, length + 1), tables(codes, length)
    numbers = torch.rand(rows, 3 * length + 2, generator=rng)
    tree, p = chain_rows(target, draft, sample_chain(draft, numbers[:, :length]))
    decision = verify(tree, p, rule, rule.schedule(length), numbers[:, length : 2 * length + 1])
    counts = counts_of(padded(decision, target, numbers[:, 2 * length + 1 :]), codes)
    law, expected = slow_law(target, draft, rule.schedule(length).tolist())
    assert p_value(counts, law) > 1e-3
    emitted = decision.emitted.double()
    assert abs(float(emitted.mean()) - expected["emitted"]) < 4 * float(emitted.std()) / rows**0.5
    for name, values in (("bias", decision.bias), ("kl", decision.kl)):
        sums = values.double().sum(1)
        assert abs(float(sums.mean()) - expected[name]) <= 4 * float(sums.std()) / rows**0.5 + 1e-7
    if rule == Vanilla():
        assert p_value(counts, law_of(target)) > 1e-3  # lossless
        assert float(decision.bias.abs().max()) == 0 and float(decision.kl.abs().max()) == 0
    elif max(rule.schedule(length)) > 1:
        assert p_value(counts, law_of(target)) < 1e-6  # and the test sees a relaxed rule


def test_vanilla_chain_is_not_lossless_with_a_wrong_draft_distribution(tables, rng, p_value):
    # negative control of the test above: the distributions reported are not those the drafts came from
    codes, length, rows = 3, 3, 200_000
    target, draft = tables(codes, length + 1), tables(codes, length)
    wrong = [table.roll(1, -1) for table in draft]
    numbers = torch.rand(rows, 3 * length + 2, generator=rng)
    drafted = sample_chain(draft, numbers[:, :length])
    tree, p = chain_rows(target, wrong, drafted)
    decision = verify(tree, p, Vanilla(), torch.ones(length), numbers[:, length : 2 * length + 1])
    counts = counts_of(padded(decision, target, numbers[:, 2 * length + 1 :]), codes)
    assert p_value(counts, law_of(target)) < 1e-6


def test_certificates_are_exactly_zero_where_nothing_is_relaxed(tables, rng):
    target, draft = tables(5, 4), tables(5, 3)
    tree, p = chain_rows(target, draft, sample_chain(draft, torch.rand(2000, 3, generator=rng)))
    uniforms = torch.rand(2000, 4, generator=rng)
    vanilla = verify(tree, p, Vanilla(), torch.ones(3), uniforms)
    assert not vanilla.bias.any() and not vanilla.kl.any()
    tightened = verify(tree, p, Uniform(0.9), torch.tensor([1.0, 0.9, 0.3]), uniforms)
    assert not tightened.bias.any()  # w <= 1: A <= p
    assert not tightened.kl.any()  # the same law
    annealed = verify(tree, p, CoolSD(1.1), CoolSD(1.1).schedule(3), uniforms)
    assert annealed.bias[:, 0].any() and not annealed.bias[:, 2].any()
    without = verify(tree, p, CoolSD(1.1), CoolSD(1.1).schedule(3), uniforms, certificates=False)
    assert without.bias is None and without.kl is None and torch.equal(without.tokens, annealed.tokens)


def test_tests_that_were_not_executed_are_not_charged(tables, rng):
    target, draft = tables(4, 4), tables(4, 3)
    tree, p = chain_rows(target, draft, sample_chain(draft, torch.rand(4000, 3, generator=rng)))
    rule = Uniform(1.5)
    decision = verify(tree, p, rule, rule.schedule(3), torch.rand(4000, 4, generator=rng))
    executed = torch.arange(3) < decision.emitted[:, None]
    mass = torch.minimum(tree.draft_probs, 1.5 * p[:, :3])
    torch.testing.assert_close(decision.bias, torch.where(executed, bias_of_test(p[:, :3], mass), 0.0))
    torch.testing.assert_close(decision.kl, torch.where(executed, kl_of_test(p[:, :3], mass), 0.0))
    assert {1, 2, 3, 4} == set(decision.emitted.tolist())


def test_plain_decoding_is_a_chain_of_no_drafts(rng, distributions):
    p, uniforms = distributions(rng, 50, 1, 5), torch.rand(50, 1, generator=rng)
    tree = DraftTree(torch.zeros(50, 1, dtype=torch.long), (-1,), torch.empty(50, 0, 0))
    decision = verify(tree, p, None, torch.ones(0), uniforms)
    assert torch.equal(decision.tokens[:, 0], draw(p[:, 0], uniforms[:, 0]))
    assert bool((decision.emitted == 1).all())


# ----------------------------------------------------------------------------------------------- trees


def same_decision(one, other):
    assert torch.equal(one.emitted, other.emitted)
    real = torch.arange(one.tokens.shape[1]) < one.emitted[:, None]
    assert torch.equal(one.tokens[real], other.tokens[real])
    assert torch.equal(one.path[real], other.path[real])
    if one.bias is not None:
        torch.testing.assert_close(one.bias, other.bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_chain_fast_path_equals_the_tree_walk(rule, tables, rng):
    target, draft = tables(4, 6), tables(4, 5)
    tree, p = chain_rows(target, draft, sample_chain(draft, torch.rand(5000, 5, generator=rng)))
    inputs = (tree, p, rule, rule.schedule(5), torch.rand(5000, 6, generator=rng), True)
    fast, walk = _verify_chain(*inputs), _verify_tree(*inputs)
    same_decision(fast, walk)
    assert bool((fast.emitted == 6).any())
    everywhere = DraftTree(tree.tokens, tree.parent, tree.draft_probs, present=torch.ones(5000, 6, dtype=torch.bool))
    same_decision(fast, verify(everywhere, *inputs[1:]))


FORK = (-1, 0, 0, 0, 1, 1, 2)  # three children of the root; the first has two children, the second one


def tree_rows(target, draft, parent, numbers, rows, chosen=False):
    """Grow a tree for each row: children drawn without replacement (or the draft's top tokens) in order."""
    codes = draft[0].shape[-1]
    inner = max(parent) + 1
    prefix = {0: torch.empty(rows, 0, dtype=torch.long)}
    tokens = torch.zeros(rows, len(parent), dtype=torch.long)

    def at(tables, node):
        context = prefix[node]
        table = tables[context.shape[1]]
        return table[tuple(context.unbind(1))] if context.shape[1] else table.expand(rows, -1)

    left: dict[int, torch.Tensor] = {}
    for node, above in enumerate(parent):
        if node:
            probs = left.setdefault(above, at(draft, above).clone())
            token = probs.argmax(-1) if chosen else draw(probs, numbers[:, node])
            left[above] = probs * (1 - torch.nn.functional.one_hot(token, codes))
            tokens[:, node] = token
            prefix[node] = torch.cat([prefix[above], token[:, None]], dim=1)
    p = torch.stack([at(target, node) for node in range(len(parent))], dim=1)
    q = torch.stack([at(draft, node) for node in range(inner)], dim=1)
    return DraftTree(tokens, parent, q, chosen=chosen), p


@pytest.mark.parametrize("kind", ["sampled", "chosen", "absent"])
def test_vanilla_tree_is_lossless(kind, tables, rng, p_value):
    codes, rows = 4, 100_000
    target, draft = tables(codes, 3), tables(codes, 2)
    numbers = torch.rand(rows, 17, generator=rng)
    tree, p = tree_rows(target, draft, FORK, numbers, rows, chosen=kind == "chosen")
    if kind == "absent":  # as a draft that ran out of mass: behind an absent sibling all are absent
        present = torch.rand(rows, len(FORK), generator=rng) < 0.7
        present[:, 0] = True
        present[:, 2] &= present[:, 1]
        present[:, 3] &= present[:, 2]
        present[:, 5] &= present[:, 4]
        tree = DraftTree(tree.tokens, FORK, tree.draft_probs, present=present)
    decision = verify(tree, p, Vanilla(), torch.ones(2), numbers[:, 7:14])
    assert not decision.bias.any()
    counts = counts_of(padded(decision, target, numbers[:, 14:]), codes)
    assert p_value(counts, law_of(target)) > 1e-3
    assert float(decision.emitted.float().mean()) > 1.5
    if kind == "absent":
        real = torch.arange(3) < decision.emitted[:, None]
        assert bool(present.gather(1, decision.path)[real].all())


def test_one_hot_tests_are_lossless_however_the_drafts_were_made(tables, rng, p_value):
    # chosen=True needs no draft distribution: a token proposed in any way (here sampled) is accepted with p(x)
    codes, rows = 4, 100_000
    target, draft = tables(codes, 3), tables(codes, 2)
    numbers = torch.rand(rows, 17, generator=rng)
    tree, p = tree_rows(target, draft, FORK, numbers, rows)
    tree = DraftTree(tree.tokens, FORK, tree.draft_probs, chosen=True)
    decision = verify(tree, p, Vanilla(), torch.ones(2), numbers[:, 7:14])
    counts = counts_of(padded(decision, target, numbers[:, 14:]), codes)
    assert p_value(counts, law_of(target)) > 1e-3
    assert p_value(counts, law_of([table.roll(1, -1) for table in target])) < 1e-6  # negative control


@pytest.mark.parametrize("kind", ["wrong draft", "chosen taken for sampled"])
def test_vanilla_tree_is_not_lossless_when_the_draft_is_misreported(kind, tables, rng, p_value):
    codes, rows = 4, 100_000  # negative controls
    target, draft = tables(codes, 3), tables(codes, 2)
    numbers = torch.rand(rows, 17, generator=rng)
    tree, p = tree_rows(target, draft, FORK, numbers, rows, chosen=kind.startswith("chosen"))
    q = tree.draft_probs.roll(1, -1) if kind == "wrong draft" else tree.draft_probs
    decision = verify(DraftTree(tree.tokens, FORK, q), p, Vanilla(), torch.ones(2), numbers[:, 7:14])
    counts = counts_of(padded(decision, target, numbers[:, 14:]), codes)
    assert p_value(counts, law_of(target)) < 1e-6


@pytest.mark.parametrize("rule", [Uniform(1.5), CoolSD(2.0), CoolSD(1.1, floor=1.0)], ids=str)
@pytest.mark.parametrize("chosen", [False, True])
def test_bias_of_a_tree_bounds_its_distance(rule, chosen, tables, rng):
    codes, rows = 3, 100_000
    target, draft = tables(codes, 3), tables(codes, 2)
    numbers = torch.rand(rows, 17, generator=rng)
    tree, p = tree_rows(target, draft, FORK, numbers, rows, chosen=chosen)
    decision = verify(tree, p, rule, rule.schedule(2), numbers[:, 7:14])
    assert decision.kl is None
    counts = counts_of(padded(decision, target, numbers[:, 14:]), codes)
    law = law_of(target).flatten()
    distance = 0.5 * float((counts / rows - law).abs().sum())
    noise = 0.5 * float((law * (1 - law) / rows).sqrt().sum())  # E |empirical TV - TV| at most
    assert distance - 2 * noise <= float(decision.bias.sum(1).mean())
    assert distance > 4 * noise  # the rule does something here


def test_tree_walk_visits_siblings_in_order_without_replacement(tables, rng):
    codes, rows = 4, 1500
    target, draft = tables(codes, 3), tables(codes, 2)
    numbers = torch.rand(rows, 14, generator=rng)
    tree, p = tree_rows(target, draft, FORK, numbers, rows)
    rule, w, uniforms = Uniform(1.2), [1.2, 0.9], numbers[:, 7:]
    decision = verify(tree, p, rule, torch.tensor(w), uniforms)
    children = {node: [c for c, above in enumerate(FORK) if above == node] for node in range(len(FORK))}
    for row in range(rows):
        node, emitted, going = 0, [], True
        owed = p[row, 0]
        while going:
            going = False
            q = tree.draft_probs[row, node] if children[node] else None
            for child in children[node]:
                token = int(tree.tokens[row, child])
                mass = torch.minimum(q, w[len(emitted)] * owed)
                if uniforms[row, child - 1] * q[token] < mass[token]:
                    node, going = child, True
                    emitted.append(token)
                    owed = p[row, child]
                    break
                owed = (owed - mass).clamp(min=0)
                owed = owed / owed.sum()
                q = q.clone()
                q[token] = 0
                q = q / q.sum()
        emitted.append(int(draw(owed, uniforms[row, -1])))
        assert decision.tokens[row, : decision.emitted[row]].tolist() == emitted
        assert int(decision.path[row, decision.emitted[row] - 1]) == node


def test_a_child_without_draft_mass_is_never_accepted(rng, distributions):
    # top-k left one token; the second child repeats it and must not be taken, present or not
    rows = 500
    q = torch.tensor([0.0, 1.0, 0.0]).expand(rows, 1, 3)
    p = distributions(rng, rows, 3, 3)
    tokens = torch.tensor([[0, 1, 1]]).expand(rows, 3)
    uniforms = torch.rand(rows, 3, generator=rng)
    uniforms[:, 1] = 0
    for present in (None, torch.tensor([[True, True, False]]).expand(rows, 3)):
        decision = verify(DraftTree(tokens, (-1, 0, 0), q, present=present), p, Vanilla(), torch.ones(1), uniforms)
        accepted = decision.emitted == 2
        assert bool((decision.path[accepted, 1] == 1).all())
        assert bool((decision.tokens[~accepted, 0] != 1).all())


# ---------------------------------------------------------------------------- custom rules, hard cases


class ByProbability:
    """CoolSD written as acceptance probabilities of (target, draft, depth)."""

    def __init__(self, schedule):
        self.w = schedule

    def accept_probs(self, target_probs, draft_probs, depth):
        return self.w[depth - 1] * target_probs / draft_probs


@pytest.mark.parametrize("shape", ["chain", "tree", "truncated chain"])
def test_a_custom_rule_that_encodes_the_same_function_decides_the_same(shape, tables, rng):
    rule, rows = CoolSD(1.4), 4000
    if shape.endswith("chain"):
        target, draft = tables(4, 4), tables(4, 3)
        if shape.startswith("truncated"):  # top-k leaves p / q = 0 / 0
            kept = [[p * (p > 0.2) for p in model] for model in (target, draft)]
            target, draft = ([p / p.sum(-1, keepdim=True) for p in model] for model in kept)
        tree, p = chain_rows(target, draft, sample_chain(draft, torch.rand(rows, 3, generator=rng)))
        w = rule.schedule(3)
    else:
        target, draft = tables(4, 3), tables(4, 2)
        tree, p = tree_rows(target, draft, FORK, torch.rand(rows, 7, generator=rng), rows)
        w = rule.schedule(2)
    uniforms = torch.rand(rows, len(tree.parent), generator=rng)
    same_decision(verify(tree, p, rule, w, uniforms), verify(tree, p, ByProbability(w), torch.ones_like(w), uniforms))


def test_equal_distributions_accept_everything_for_free(rng, distributions):
    p = distributions(rng, 1000, 4, 5)
    drafted = draw(p[:, :3], torch.rand(1000, 3, generator=rng))
    tree = DraftTree(torch.cat([drafted[:, :1], drafted], 1), trees.chain(3), p[:, :3].clone())
    uniforms = torch.rand(1000, 4, generator=rng)
    uniforms[0] = 1 - 2.0**-24
    for rule in (Vanilla(), Uniform(1.5)):
        for walk in (_verify_chain, _verify_tree):
            decision = walk(tree, p, rule, rule.schedule(3), uniforms, True)
            assert bool((decision.emitted == 4).all())
            assert torch.equal(decision.tokens[:, :3], drafted)
            assert float(decision.bias.max()) == 0


@pytest.mark.parametrize("rule", [Vanilla(), Uniform(3.0), Uniform(0.5)], ids=str)
@pytest.mark.parametrize("walk", [_verify_chain, _verify_tree])
def test_a_certain_target_emits_its_token(rule, walk, rng, distributions):
    # one-hot p: whatever is drafted, only tokens with target mass come out
    rows, best = 800, torch.randint(4, (800, 3), generator=rng)
    p = torch.nn.functional.one_hot(best, 4).float()
    q = distributions(rng, rows, 2, 4)
    drafted = draw(q, torch.rand(rows, 2, generator=rng))
    tree = DraftTree(torch.cat([drafted[:, :1], drafted], 1), trees.chain(2), q)
    decision = walk(tree, p, rule, rule.schedule(2), torch.rand(rows, 3, generator=rng), True)
    real = torch.arange(3) < decision.emitted[:, None]
    assert torch.equal(decision.tokens[real], best[real])
    assert bool(decision.bias.isfinite().all()) and float(decision.bias.max()) <= 1e-6  # A <= q <= 1 = p
    if decision.kl is not None:
        assert float(decision.kl.abs().max()) < 1e-6


@pytest.mark.parametrize("rule", [Vanilla(), Uniform(3.0)], ids=str)
@pytest.mark.parametrize("walk", [_verify_chain, _verify_tree])
def test_disjoint_supports_reject_and_sample_the_target(rule, walk, rng, p_value):
    rows = 50_000
    p = torch.tensor([0.0, 0.0, 0.2, 0.3, 0.5]).expand(rows, 3, 5)
    q = torch.tensor([0.4, 0.6, 0.0, 0.0, 0.0]).expand(rows, 2, 5)
    drafted = draw(q, torch.rand(rows, 2, generator=rng))
    tree = DraftTree(torch.cat([drafted[:, :1], drafted], 1), trees.chain(2), q)
    uniforms = torch.rand(rows, 3, generator=rng)
    uniforms[:100, :2] = 0  # even then
    decision = walk(tree, p, rule, rule.schedule(2), uniforms, True)
    assert bool((decision.emitted == 1).all())
    counts = decision.tokens[:, 0].bincount(minlength=5)
    assert p_value(counts, p[0, 0]) > 1e-3
    assert p_value(counts, torch.tensor([0.0, 0.0, 0.22, 0.3, 0.48])) < 1e-6  # negative control
    assert not decision.bias.any()
    if decision.kl is not None:
        assert float(decision.kl.abs().max()) < 1e-6


def test_kl_is_infinite_where_a_token_without_target_mass_can_come_out():
    class Always:
        def accept_probs(self, target_probs, draft_probs, depth):
            return torch.ones_like(target_probs)

    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    tree = DraftTree(torch.tensor([[0, 0]]), (-1, 0), torch.tensor([[[0.5, 0.5]]]))
    decision = verify(tree, p, Always(), torch.ones(1), torch.zeros(1, 2))
    assert decision.tokens[0, 0] == 0 and float(decision.kl) == float("inf") and abs(float(decision.bias) - 0.5) < 1e-6


def test_a_relaxed_one_hot_draft_keeps_what_the_target_owes():
    # chosen drafts: q = one-hot(x). w < 1 keeps (1 - w) p(x) in the residual, so x may still come out after a rejection
    p = torch.tensor([0.5, 0.25, 0.25])
    mass = torch.minimum(torch.tensor([1.0, 0, 0]), 0.5 * p)
    torch.testing.assert_close(residual(p, mass), torch.tensor([0.25, 0.25, 0.25]) / 0.75)


def test_shapes_of_trees():
    assert trees.chain(3) == (-1, 0, 1, 2)
    assert trees.node_depths(FORK) == (0, 1, 1, 1, 2, 2, 2)
    cpu = torch.device("cpu")
    assert trees.children(FORK, cpu)[:3].tolist() == [[1, 2, 3], [4, 5, -1], [6, -1, -1]]
    seen = trees.ancestors(FORK, cpu)
    assert seen[4].nonzero().flatten().tolist() == [0, 1, 4] and torch.equal(seen.sum(1) - 1, trees.depths(FORK, cpu))
    for bad in ((0, 0), (-1, 2, 1), (-1, -1), (-1, 1)):
        with pytest.raises(ValueError, match="parents stand before their children"):
            trees.node_depths(bad)
