"""Static and dynamic trees: their shapes, their drafts against slow ones without a cache, and the laws of their output.

The law of `verify` is integrated over all uniforms as a black box: whether a node is accepted is a step function of its
own uniform, so bisection over the 2^24 values there are finds the probability exactly.
"""

import dataclasses
import functools
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coolsd import tree as trees
from coolsd.decode import generate
from coolsd.drafters import static_tree
from coolsd.drafters.chain import Chain
from coolsd.drafters.dynamic_tree import DynamicTree
from coolsd.drafters.static_tree import StaticTree
from coolsd.interfaces import DraftTree, Prompt, TargetOutput
from coolsd.rules.grouped import Grouped
from coolsd.rules.lantern import Lantern, LanternPP
from coolsd.rules.relaxed import CoolSD, Vanilla
from coolsd.sampling import Sampling
from coolsd.verify import verify

PARITY = Path(__file__).parent / "parity"
CPU = torch.device("cpu")
CAPTIONS = ["a b", "c", "a b c a", "b", "a a"]
SMALL = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
ODD = [(0,), (1,), (2,), (1, 0), (2, 0), (2, 1), (1, 0, 0)]  # the first child has no children, the last one most
TINY = {"codes": 4, "grid": (1, 3), "size": 16, "layers": 1, "sharpness": 1.5}


def decode(target, captions, *arguments, **options):
    return generate(target, captions, *arguments, decode_images=False, **options)


def drafters(head):
    return [StaticTree(head), StaticTree(head, ODD), DynamicTree(head, 9, 3, 3), DynamicTree(head, 3, 2, 2)]


def path_of(parent, tokens, node):
    """Tokens from the root's child down to the node."""
    return () if node == 0 else (*path_of(parent, tokens, int(parent[node])), int(tokens[node]))


def drafter_paths(drafter):
    parent = drafter.parent
    ranks = [parent[:node].count(above) for node, above in enumerate(parent)]
    return [path_of(parent, ranks, node) for node in range(1, drafter.nodes)]


# -------------------------------------------------------------------------------------------- shapes


def test_eagle_25_is_the_published_tree(toy):
    golden = json.loads((PARITY / "lantern_trees.json").read_text())["mc_sim_7b_63"]
    choices = [(), *map(tuple, golden["choices"])]
    drafter = StaticTree(toy()[1])
    shape, paths = drafter.parent, [(), *drafter_paths(drafter)]
    assert sorted(paths) == sorted(choices) and len(paths) == 26
    place = [paths.index(path) for path in choices]
    seen = trees.ancestors(shape, CPU)[place][:, place]
    assert torch.equal(seen, torch.tensor(golden["tree_attn_mask"]) > 0)
    assert trees.depths(shape, CPU)[place].tolist() == [len(path) for path in choices]


def test_lantern_57_has_the_published_size(toy):
    drafter = StaticTree(toy()[1], "lantern-57")
    depths = trees.node_depths(drafter.parent)
    assert [depths.count(depth) for depth in range(6)] == [1, 5, 13, 16, 14, 9] and drafter.depth == 5
    assert trees.widths(drafter.parent) == (5, 4, 4, 4, 3)


@pytest.mark.parametrize("shape", ["eagle-25", "lantern-57", SMALL, ODD])
def test_nodes_with_children_come_first(shape, toy):
    drafter = StaticTree(toy()[1], shape)
    inner = set(drafter.parent[1:])
    rows = max(inner) + 1  # of draft_probs
    assert rows == len(inner) + (shape == ODD)  # there one leaf has a later sibling with children
    assert StaticTree(toy()[1], drafter_paths(drafter)[::-1]).parent == drafter.parent  # whatever the order given


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda head: StaticTree(head, "eagle-26"), "no tree named 'eagle-26'; choose one of eagle-25, lantern-57"),
        (lambda head: StaticTree(head, []), "a tree of no paths drafts nothing"),
        (lambda head: StaticTree(head, [(0,), (2,)]), r"\(2,\) of a tree needs \(1,\), which is missing"),
        (lambda head: StaticTree(head, [(0,), (1, 0)]), r"\(1, 0\) of a tree needs \(1,\), which is missing"),
        (lambda head: StaticTree(head, [(0,), (0,)]), r"\(0,\) of a tree is listed 2 times"),
        (lambda head: StaticTree(head, [()]), r"path \(\) of a tree must be at least one rank >= 0"),
        (lambda head: StaticTree(head, [(0,), (-1,)]), r"path \(-1,\) of a tree must be"),
        (lambda head: DynamicTree(head, 9, 3, 0), "branch is 0, but must be >= 1"),
        (lambda head: DynamicTree(head, 9, 0, 2), "depth is 0, but must be >= 1"),
        (lambda head: DynamicTree(head, 5, 5, 2), "nodes is 5, but depth 5 and branch 2 make trees of 6 to 19 nodes"),
        (lambda head: DynamicTree(head, 12, 3, 2), "nodes is 12, but depth 3 and branch 2 make trees of 4 to 11 nodes"),
    ],
)
def test_bad_shapes_are_refused_in_a_sentence(make, message, toy):
    with pytest.raises(ValueError, match=message):
        make(toy()[1])


def random_parents(generator, batch, nodes):
    columns = [torch.full((batch,), -1)] + [torch.randint(n, (batch,), generator=generator) for n in range(1, nodes)]
    return torch.stack(columns, 1)


def test_parents_by_row_give_what_tuples_give(rng):
    parents = random_parents(rng, 20, 7)
    shapes = [tuple(row) for row in parents.tolist()]
    depth, width = (max(map(max, map(of, shapes))) for of in (trees.node_depths, trees.widths))
    seen = trees.ancestors(parents, CPU, depth)
    assert torch.equal(seen, trees.ancestors(parents, CPU))
    table = trees.children(parents, CPU, width)
    for row, shape in enumerate(shapes):
        assert torch.equal(seen[row], trees.ancestors(shape, CPU))
        own = trees.children(shape, CPU)
        assert torch.equal(table[row, :, : own.shape[1]], own) and bool((table[row, :, own.shape[1] :] == -1).all())


# ------------------------------------------------------------------------------- tree logits, no cache


@pytest.mark.parametrize("guidance", [False, True])
def test_logits_of_trees_that_differ_by_row_are_those_of_their_paths(guidance, toy, rng):
    target, _ = toy(grid=(4, 4), sharpness=1.0)
    captions, counts = CAPTIONS[:3], [1, 4, 2]
    prompt = target.encode(captions, guidance)
    _, cache = target.prefill(prompt, 6)
    known = torch.randint(5, (3, 4), generator=rng)
    target.score(DraftTree(known, trees.chain(3), torch.empty(3, 0, 5)), prompt, cache)
    cache.keep(None, torch.tensor(counts).repeat_interleave(prompt.branches), 4 + 4)
    parents, tokens = random_parents(rng, 3, 6), torch.randint(5, (3, 6), generator=rng)
    assert len(parents.unique(dim=0)) == 3
    output = target.score(DraftTree(tokens, parents, torch.empty(3, 0, 5), depth=5, width=5), prompt, cache)
    for row, count in enumerate(counts):
        alone = target.encode(captions[row : row + 1], guidance)
        for node in range(6):
            path = path_of(parents[row], tokens[row], node)
            text = torch.tensor([[*known[row, :count].tolist(), int(tokens[row, 0]), *path, 0]])
            wanted = target.forced(alone, text)
            torch.testing.assert_close(output.logits[row, :, node], wanted.logits[0, :, -1], rtol=0, atol=1e-5)
            hidden = wanted.hidden_states[0, :, -2]
            torch.testing.assert_close(output.hidden_states[row, :, node], hidden, rtol=0, atol=1e-5)


def head_without_cache(head, target, prompt, tokens):
    """law(path) -> guided logits [1, 1, V] of one row behind committed tokens [c] and then a path of drafts."""
    slots, count = prompt.mask.shape[-1], len(tokens)
    committed = target.forced(prompt, tokens[None]).hidden_states[0, :, : slots - 1 + count]  # [G, pairs, H]

    @functools.lru_cache
    def hidden_behind(path):
        return torch.cat([hidden_behind(path[:-1]), output_behind(path[:-1])], 1) if path else committed

    @functools.lru_cache
    def output_behind(path):
        pairs = torch.cat([torch.full((slots - 1,), -1), tokens, torch.tensor(path, dtype=torch.long)])
        length = len(pairs)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        seen[:, :slots] &= prompt.mask[0, 0]
        seen |= torch.eye(length, dtype=torch.bool)
        rope = head.rope[torch.arange(1, length + 1).clamp(max=len(head.rope) - 1)][None]
        return head(pairs.expand(prompt.branches, -1), hidden_behind(path), rope, seen[None, None])[:, -1:]

    return lambda path: head.logits(output_behind(path))[None]


def slow_dynamic(law, nodes, depth, branch):
    """EAGLE-2 for one row, path by path: the kept paths with their log probabilities."""
    frontier, candidates = {(): 0.0}, {}
    for _ in range(depth):
        grown = {}
        for path, joint in frontier.items():
            best = law(path).topk(branch)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                grown[(*path, token)] = joint + value
        candidates |= grown
        frontier = dict(sorted(grown.items(), key=lambda item: -item[1])[:branch])
    return dict(sorted(candidates.items(), key=lambda item: -item[1])[: nodes - 1])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(guidance=2.0, top_k=3, temperature=1.2)], ids=str)
@pytest.mark.parametrize("which", range(4))
def test_drafts_are_those_of_a_head_without_cache(which, sampling, toy):
    target, head = toy(grid=(3, 4))
    drafter, rounds = drafters(head)[which], []
    result = decode(
        target, CAPTIONS, drafter, CoolSD(1.5), sampling, seed=3,
        observer=lambda seen: rounds.append((seen.tree, seen.active.clone())),
    )  # fmt: skip
    committed = 1 + torch.cat([torch.zeros(5, 1, dtype=torch.long), result.emitted.cumsum(1)], 1)
    assert (result.emitted.amin(0) < result.emitted.amax(0)).any()  # rows accept different lengths
    for turn, (tree, active) in list(enumerate(rounds))[:3]:
        for row in active.nonzero().flatten().tolist():
            tokens = result.tokens[row, : int(committed[row, turn])]
            assert int(tree.tokens[row, 0]) == int(tokens[-1])
            prompt = target.encode(CAPTIONS[row : row + 1], sampling.branches == 2)
            logits = head_without_cache(head, target, prompt, tokens)
            parent = tree.parent[row] if tree.chosen else tree.parent
            paths = [path_of(parent, tree.tokens[row], node) for node in range(tree.nodes)]
            if tree.chosen:
                law = lambda path: sampling.guided(logits(path))[0, 0].log_softmax(-1)  # noqa: B023, E731
                wanted = slow_dynamic(law, drafter.nodes, drafter.depth, drafter.branch)
                assert set(paths[1:]) == set(wanted)
                scores = [0.0] + [wanted[path] for path in paths[1:]]
                assert all(0 <= above < node for node, above in enumerate(parent.tolist()) if node)
                assert all(one >= other - 1e-5 for one, other in itertools.pairwise(scores))  # siblings too
            else:
                probs = [sampling.probs(logits(path))[0, 0] for path in paths[: tree.draft_probs.shape[1]]]
                torch.testing.assert_close(tree.draft_probs[row], torch.stack(probs), rtol=0, atol=1e-4)


def test_the_dynamic_tree_is_the_official_one(official_drafter):
    """EAGLE-2's own tree on LANTERN's drafter."""
    head, given, out, facts = official_drafter
    c = facts["config"]
    golden = facts["dynamic"]
    drafter = DynamicTree(head, golden["total_tokens_arg"], golden["depth"] + 1, golden["top_k"])
    prompt = Prompt(("",), torch.ones(1, 2, c["prefix"], dtype=torch.bool), {})
    hidden = TargetOutput(torch.empty(0), given["prefix_hidden"][None])
    drafter.start(None, prompt, hidden, given["first_token"], Sampling(guidance=c["cfg_scale"]))
    tree = drafter.propose(torch.empty(1, 0))
    ours = {path_of(tree.parent[0], tree.tokens[0], node) for node in range(1, tree.nodes)}
    tokens, seen = out["dynamic.draft_tokens"][0], out["dynamic.tree_mask"][0, 0] > 0
    official = {tuple(tokens[seen[node].nonzero().flatten()[1:]].tolist()) for node in range(1, len(tokens))}
    assert ours == official and len(ours) == 12


def test_a_certain_head_gives_its_chain_first(toy):
    # all along the chain the probability is 1: parents tie with their children, and must still come before them
    target, head = toy(grid=(4, 4))
    rounds = []
    decode(target, CAPTIONS, DynamicTree(head, 20, 5, 4), Vanilla(), Sampling(temperature=1e-5), observer=rounds.append)
    for look in rounds:
        assert torch.equal(look.tree.parent[:, :6], torch.arange(-1, 5).expand(5, -1))
        assert bool((look.tree.parent[:, 1:] < torch.arange(1, 20)).all())
    greedy = decode(target, CAPTIONS, sampling=Sampling(temperature=0))
    drafted = decode(target, CAPTIONS, DynamicTree(head, 20, 5, 4), Vanilla(), Sampling(temperature=0))
    assert torch.equal(drafted.tokens, greedy.tokens)
    chain = decode(target, CAPTIONS, Chain(head, 5), Vanilla(), Sampling(temperature=0))
    assert float(drafted.accepted_length.mean()) > float(chain.accepted_length.mean())  # the second best count too


# ------------------------------------------------------------------------------ laws of drafting, row by row


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(guidance=2.0, top_k=3)], ids=str)
@pytest.mark.parametrize("length", [1, 4])
def test_a_static_tree_of_one_path_is_the_chain(sampling, length, toy):
    target, head = toy(grid=(4, 4))
    path = StaticTree(head, [(0,) * n for n in range(1, length + 1)])
    assert (path.nodes, path.slots, path.depth) == (length + 1, length, length)
    one, other = (decode(target, CAPTIONS, d, CoolSD(1.5), sampling, seed=4) for d in (path, Chain(head, length)))
    for name in ("tokens", "emitted", "bias_per_token", "kl_per_token"):
        assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("rule", [Vanilla(), CoolSD(1.6)], ids=str)
def test_a_batch_of_five_is_five_calls_of_one(which, rule, toy):
    target, head = toy(grid=(4, 4))
    drafter, sampling, rows = drafters(head)[which], Sampling(guidance=2.0, top_k=4), [3, 0, 17, 4, 2**33]
    batch = decode(target, CAPTIONS, drafter, rule, sampling, seed=9, rows=rows)
    assert len(batch.target_calls.unique()) > 1
    kl = batch.kl_per_token  # trees have such a certificate only where nothing is relaxed
    assert not kl.any() if rule == Vanilla() else kl is None
    for index, row in enumerate(rows):
        alone = decode(target, CAPTIONS[index : index + 1], drafter, rule, sampling, seed=9, rows=[row])
        assert torch.equal(alone.tokens[0], batch.tokens[index])
        calls = int(alone.target_calls[0])
        assert torch.equal(alone.emitted[0], batch.emitted[index, :calls])
        assert not batch.emitted[index, calls:].any()
        for name in ("bias_per_token", "nll_per_token"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(batch, name)[index], rtol=1e-4, atol=1e-5)


def test_children_without_mass_are_absent_with_all_behind_them(toy):
    target, head = toy(grid=(4, 4))
    shape = [(0,), (1,), (2,), (2, 0), (0, 0), (0, 1), (0, 2)]
    drafter, rounds = StaticTree(head, shape), []
    decode(target, CAPTIONS * 20, drafter, Vanilla(), Sampling(top_k=2), observer=rounds.append)
    paths = drafter_paths(drafter)
    node = {path: number for number, path in enumerate(paths, start=1)}
    for look in rounds:
        tree = look.tree
        gone = [node[path] for path in ((2,), (2, 0), (0, 2))]
        assert torch.equal(tree.present.all(0).nonzero().flatten(), torch.tensor(sorted({*range(8)} - {*gone})))
        assert not tree.present[:, gone].any()
        for one, other in (((0,), (1,)), ((0, 0), (0, 1))):
            first, second = (tree.tokens[:, node[path]] for path in (one, other))
            law = tree.draft_probs[:, node[one[:-1]] if one[:-1] else 0]
            assert bool((first != second).all())
            torch.testing.assert_close(
                law.gather(1, torch.stack([first, second], 1)).sum(1), torch.ones(100), rtol=0, atol=1e-6
            )


def test_eagle_25_accepts_more_than_its_longest_chain(toy):
    target, head = toy(grid=(4, 4))
    chain = [(0,) * n for n in range(1, 6)]
    tree, path = (decode(target, ["a b"] * 300, StaticTree(head, shape), Vanilla()) for shape in ("eagle-25", chain))
    gain = tree.accepted_length - path.accepted_length
    assert float(gain.mean()) > 4 * float(gain.std()) / 300**0.5 > 0


# --------------------------------------------------------------------------------- laws of verification


def behind(tables, parent, tokens):
    """Distributions [N, V] behind the nodes of one tree, read from tables by path."""
    return torch.stack([tables[len(path)][path] for path in (path_of(parent, tokens, n) for n in range(len(parent)))])


def grow(parent, draft, chosen=False, replace=False):
    """All drafts of a shape: (tokens, present, probability). Children without mass left are absent."""
    found = [([0], [True], 1.0)]
    for node, above in enumerate(parent[1:], start=1):
        more = []
        for tokens, present, weight in found:
            law = draft[len(path_of(parent, tokens, above))][path_of(parent, tokens, above)].double().clone()
            for before in range(1, node):
                if parent[before] == above and not replace:
                    law[tokens[before]] = 0
            if chosen:
                more.append(([*tokens, int(law.argmax())], [*present, True], weight))
            elif float(law.sum()) <= 0:
                more.append(([*tokens, 0], [*present, False], weight))
            else:
                shares = (law / law.sum()).tolist()
                alive = present[above]
                more += [([*tokens, x], [*present, alive], weight * s) for x, s in enumerate(shares) if s > 0]
        found = more
    return found


def integrated_law(parents, draft, reported, target, per_row=False, chosen=False, replace=False):
    """Law [V] * (L + 1) of the block that `verify` emits, continued by the target, over all drafts and uniforms.

    parents: shapes of equal size, equally likely. draft: what the tokens come from; reported: as draft_probs.
    """
    grown = [(shape, *one) for shape in parents for one in grow(shape, draft, chosen, replace)]
    shapes, tokens, present, weight = zip(*grown, strict=True)
    weight = torch.tensor(weight, dtype=torch.float64) / len(parents)
    p = torch.stack([behind(target, shape, one) for shape, one in zip(shapes, tokens, strict=True)])
    inner = 1 + max(max(shape) for shape in parents)
    q = torch.stack([behind(reported, shape, one)[:inner] for shape, one in zip(shapes, tokens, strict=True)])
    parent = torch.tensor(shapes) if per_row else parents[0]
    depth, width = max(map(max, map(trees.node_depths, parents))), max(map(trees.width, parents))
    tree = DraftTree(torch.tensor(tokens), parent, q, chosen, torch.tensor(present), depth, width)
    nodes, codes = p.shape[1:]

    def run(rows, uniforms):
        pick = parent[rows] if per_row else parent
        own = DraftTree(tree.tokens[rows], pick, q[rows], chosen, tree.present[rows], depth, width)
        return verify(own, p[rows], Vanilla(), torch.ones(depth), uniforms.float(), certificates=False)

    def steps(rows, uniforms, column, holds):
        """Of the 2^24 values of uniforms[:, column], the share from 0 upwards for which `holds(decision)` [rows]."""
        low, high = torch.zeros(len(rows)).long(), torch.full((len(rows),), 1 << 24)
        for _ in range(25):
            middle = (low + high) // 2
            trial = uniforms.scatter(1, column[:, None], middle[:, None].double() / (1 << 24))
            up = holds(run(rows, trial)) & (low < high)
            low, high = torch.where(up, middle + 1, low), torch.where(up, high, middle)
        return low.double() / (1 << 24)

    def accepted(decision, node):
        real = torch.arange(depth + 1) < decision.emitted[:, None]
        return ((decision.path == node[:, None]) & real).any(1)

    # every pattern of accepting (uniform 0) and rejecting (just below 1), for every draft
    pattern = torch.cartesian_prod(*[torch.tensor([0, 1])] * (nodes - 1)).view(-1, nodes - 1)
    rows = torch.arange(len(tokens)).repeat_interleave(len(pattern))
    pattern = pattern.repeat(len(tokens), 1)
    uniforms = torch.cat([(1 - pattern) * (1 - 2.0**-24), torch.zeros(len(rows), 1)], 1).double()
    chance = weight[rows]
    for node in range(1, nodes):
        at = torch.full_like(rows, node)
        share = steps(rows, uniforms, at - 1, lambda decision, at=at: accepted(decision, at))
        chance = chance * torch.where(pattern[:, node - 1] == 1, share, 1 - share)
    live = chance > 0
    rows, uniforms, chance = rows[live], uniforms[live], chance[live]
    last, decision = torch.full_like(rows, nodes - 1), run(rows, uniforms)

    def final(decision):
        return decision.tokens.gather(1, decision.emitted[:, None] - 1).squeeze(1)

    below = [steps(rows, uniforms, last, lambda found, x=x: final(found) <= x) for x in range(codes - 1)]
    ends = torch.stack([torch.zeros_like(chance), *below, torch.ones_like(chance)], 1).diff(dim=1)  # [rows, V]
    law = torch.zeros([codes] * (depth + 1), dtype=torch.float64)
    for emitted in range(1, depth + 2):
        these = decision.emitted == emitted
        mass = torch.zeros([codes] * emitted, dtype=torch.float64)
        prefix = decision.tokens[these, : emitted - 1]
        for x in range(codes):
            where = torch.cat([prefix, prefix.new_full((len(prefix), 1), x)], 1)
            mass.index_put_(tuple(where.unbind(1)), chance[these] * ends[these, x], accumulate=True)
        for table in target[emitted:]:
            mass = mass[..., None] * table.double()
        law += mass
    return law


FORK, TWIG = (-1, 0, 0, 1, 1), (-1, 0, 1, 0, 3)


@pytest.fixture
def tables(rng, distributions):
    return lambda codes: [distributions(rng, *[codes] * i, codes) for i in range(3)]


def wanted_law(target):
    joint = torch.ones((), dtype=torch.float64)
    for table in target:
        joint = joint[..., None] * table.double()
    return joint


@pytest.mark.parametrize("codes", [3, 4])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_verify_of_a_tree_has_exactly_the_law_of_the_target(codes, chosen, per_row, tables):
    target, draft = tables(codes), tables(codes)
    shapes = [FORK, TWIG] if per_row else [FORK]
    law = integrated_law(shapes, draft, draft, target, per_row, chosen)
    torch.testing.assert_close(law, wanted_law(target), rtol=0, atol=1e-6)
    if not chosen:  # negative controls: siblings drawn with replacement, and a draft that is not the reported one
        again = integrated_law(shapes, draft, draft, target, per_row, replace=True)
        assert float((again - wanted_law(target)).abs().sum()) > 1e-3
    else:
        drawn = integrated_law(shapes, draft, [t.roll(1, -1) for t in draft], target, per_row)
        assert float((drawn - wanted_law(target)).abs().sum()) > 1e-3


def test_verify_of_a_tree_with_absent_children_has_exactly_the_law_of_the_target(tables):
    def top(table):
        kept = table * (table >= table.topk(2, dim=-1).values[..., -1:])
        return kept / kept.sum(-1, keepdim=True)

    target, raw = tables(3), tables(3)
    draft, shape = [top(table) for table in raw], (-1, 0, 0, 0, 1, 3)
    law = integrated_law([shape], draft, draft, target)
    torch.testing.assert_close(law, wanted_law(target), rtol=0, atol=1e-6)
    wrong = integrated_law([shape], draft, raw, target)  # negative control: raw q where top-k was sampled
    assert float((wrong - wanted_law(target)).abs().sum()) > 1e-3


# ----------------------------------------------------------------------- laws of whole toy images


def images_law(target, caption, sampling):
    codes, total = target.codebook_size, target.image_tokens
    images = torch.cartesian_prod(*[torch.arange(codes)] * total)
    prompt = target.encode([caption] * len(images), sampling.branches == 2)
    probs = sampling.probs(target.forced(prompt, images).logits)
    return probs.double().gather(-1, images[..., None]).squeeze(-1).prod(-1)


def count_images(target, caption, images, *arguments, batch=20_000):
    codes, total = target.codebook_size, target.image_tokens
    counts, lengths = torch.zeros(codes**total, dtype=torch.long), []
    for first in range(0, images, batch):
        result = decode(target, [caption] * batch, *arguments, seed=8, rows=range(first, first + batch))
        assert not result.bias_per_token.any()
        index = torch.zeros(batch, dtype=torch.long)
        for column in result.tokens.unbind(1):
            index = index * codes + column
        counts += index.bincount(minlength=codes**total)
        lengths.append(result.accepted_length)
    return counts, float(torch.cat(lengths).mean())


class Recorder:
    """A Sampling that also remembers what the draft's distributions were before top-k."""

    def __init__(self, sampling):
        self.sampling, self.raw = sampling, []

    def probs(self, logits):
        self.raw.append(dataclasses.replace(self.sampling, top_k=0).probs(logits))
        return self.sampling.probs(logits)


class Raw(StaticTree):
    """Reports q before top-k where it sampled after it: a negative control."""

    def start(self, target, prompt, output, token, sampling):
        super().start(target, prompt, output, token, Recorder(sampling))

    def propose(self, uniforms):
        self.sampling.raw.clear()
        tree = super().propose(uniforms)
        return dataclasses.replace(tree, draft_probs=torch.cat(self.sampling.raw, 1))


class Drawn(DynamicTree):
    """Says of its chosen tokens that they were drawn, uniformly: a negative control."""

    def propose(self, uniforms):
        tree = super().propose(uniforms)
        law = torch.full((len(uniforms), tree.nodes, tree.draft_probs.shape[-1]), 1 / tree.draft_probs.shape[-1])
        return dataclasses.replace(tree, chosen=False, draft_probs=law)


@pytest.mark.slow
def test_a_static_tree_with_vanilla_is_lossless(toy, p_value, monkeypatch):
    target, head = toy(**TINY)
    sampling, shape = Sampling(top_k=3, temperature=1.2), SMALL
    law = images_law(target, "b a", sampling)
    counts, length = count_images(target, "b a", 100_000, StaticTree(head, shape), Vanilla(), sampling)
    assert p_value(counts, law) > 1e-3 and 1.3 < length < 1.95
    counts, _ = count_images(target, "b a", 20_000, Raw(head, shape), Vanilla(), sampling)
    assert p_value(counts, law) < 1e-6
    monkeypatch.setattr(static_tree, "without", lambda left, token: left)  # siblings with replacement
    counts, _ = count_images(target, "b a", 20_000, StaticTree(head, shape), Vanilla(), sampling)
    assert p_value(counts, law) < 1e-6


@pytest.mark.slow
def test_a_dynamic_tree_with_vanilla_is_lossless(toy, p_value):
    target, head = toy(**TINY)
    law = images_law(target, "b a", Sampling())
    arguments = (Vanilla(), Sampling())
    counts, length = count_images(target, "b a", 100_000, DynamicTree(head, 6, 2, 2), *arguments)
    assert p_value(counts, law) > 1e-3 and 1.3 < length < 1.95
    counts, _ = count_images(target, "b a", 20_000, Drawn(head, 6, 2, 2), *arguments)
    assert p_value(counts, law) < 1e-6


# -------------------------------------------------------------------------------------------- compile


INDUCTOR = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
    ),
]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("chain", "aot_eager"), pytest.param("static", "inductor", marks=INDUCTOR), ("dynamic", "aot_eager")],
)
def test_verify_compiles_whole(kind, backend, rng, distributions):
    # fullgraph: no host synchronisation and no loop that depends on data
    parent = {"chain": trees.chain(2), "static": FORK}.get(kind, torch.tensor([FORK, TWIG, FORK, (-1, 0, 0, 2, 2)]))
    q, p = distributions(rng, 4, 2, 6), distributions(rng, 4, len(FORK), 6)
    tree = DraftTree(torch.randint(6, (4, 5), generator=rng), parent, q, kind == "dynamic", depth=2, width=2)
    if kind == "chain":
        tree, p = dataclasses.replace(tree, tokens=tree.tokens[:, :3]), p[:, :3]
    rule, uniforms = CoolSD(1.5), torch.rand(4, 5, generator=rng)[:, : tree.nodes]
    arguments = (tree, p, rule, rule.schedule(2), uniforms)
    eager = verify(*arguments)
    compiled = torch.compile(verify, fullgraph=True, dynamic=False, backend=backend)(*arguments)
    for name in ("tokens", "path", "emitted"):
        assert torch.equal(getattr(eager, name), getattr(compiled, name))
    torch.testing.assert_close(compiled.bias, eager.bias, rtol=0, atol=1e-6)


@dataclasses.dataclass(frozen=True)  # whose name in a test's is the same in every worker
class Squared:
    def accept_probs(self, target_probs, draft_probs, depth):
        return (target_probs / draft_probs).clamp(max=1).sqrt()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(("shape", "certificates"), [("chain", False), ("fork", True)])
@pytest.mark.parametrize(
    "rule", [Lantern(2, 0.3), LanternPP(2, 2.5, "own"), Grouped(2, 0.4, 9.0, "own"), Squared()], ids=str
)
def test_verify_compiles_whole_with_every_kind_of_rule(rule, shape, certificates, rng, distributions):
    codes = torch.randn(6, 2, generator=rng)
    target = SimpleNamespace(codebook=lambda: codes, device=CPU, folder=None, ends=lambda: {"embedding": codes})
    rule = rule.bind(target) if hasattr(rule, "bind") else rule
    parent = trees.chain(2) if shape == "chain" else FORK
    q, p = distributions(rng, 4, 2, 6), distributions(rng, 4, len(parent), 6)
    tokens = torch.randint(6, (4, len(parent)), generator=rng)
    present = None if shape == "chain" else torch.rand(4, len(parent), generator=rng) < 0.8
    tree = DraftTree(tokens, parent, q, present=present)
    arguments = (tree, p, rule, torch.ones(2), torch.rand(4, len(parent), generator=rng), certificates)
    eager = verify(*arguments)
    torch._dynamo.reset()
    compiled = torch.compile(verify, fullgraph=True, dynamic=False, backend="aot_eager")(*arguments)
    for name in ("tokens", "path", "emitted"):
        assert torch.equal(getattr(eager, name), getattr(compiled, name))
    assert (compiled.bias is None) == (not certificates)
