"""Verification of a draft tree. Knows distributions and trees; knows nothing of models or images.

One test: a token x drawn from q is accepted with probability A(x) / q(x), A = accepted mass; after a rejection
the token comes from G* = normalise(relu(p - A)) (Cool-SD, Theorem 2). p = target, q = draft. No host sync inside.
Where the image's layout forces a token (`DraftTree.forced`) p is certain of it, and so is any draft of it accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coolsd import tree as trees
from coolsd.interfaces import DraftTree, Verification
from coolsd.sampling import draw, residual


def accepted_mass(rule: Any, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor, depth: Tensor) -> Tensor:
    """A [..., V] of a rule, or draft * accept_probs of one that only knows acceptance probabilities."""
    if hasattr(rule, "accept_probs"):
        accept = rule.accept_probs(target_probs, draft_probs, depth).clamp(0, 1)
        return torch.where(draft_probs > 0, draft_probs * accept, 0.0)  # p / q is 0 / 0 where top-k left nothing
    return rule.accepted_mass(target_probs, draft_probs, relaxation)


def bias_of_test(target_probs: Tensor, accepted: Tensor) -> Tensor:
    """N = sum relu(A - p) over [..., V]: total variation of one test with optimal resampling. Exactly 0 if A <= p."""
    return (accepted - target_probs).relu().sum(-1)


def kl_of_test(target_probs: Tensor, accepted: Tensor) -> Tensor:
    """KL(K || p) of one test in nats, K = A + (1 - sum A) G*: [..., V] -> [...]. Infinite where K > 0 = p."""
    emitted = accepted + (1 - accepted.sum(-1, keepdim=True)).relu() * residual(target_probs, accepted)
    return torch.special.xlogy(emitted, emitted / target_probs).nan_to_num(nan=0.0, posinf=torch.inf).sum(-1).relu()


def own_resampling(rule: Any) -> bool:
    """Whether a rejected token is replaced as the rule's own paper does, `rule.resample`, instead of by G*."""
    return getattr(rule, "resampling", "optimal") == "own"


def verify(
    tree: DraftTree,
    target_probs: Tensor,
    rule: Any,
    relaxation: Tensor,
    uniforms: Tensor,
    certificates: bool = True,
) -> Verification:
    """Accept a path of the tree and draw one more token.

    target_probs: float32 [B, N, V], row n = distribution behind node n. relaxation: float32 [L], rule.schedule(L).
    uniforms: float32 [B, N]; number n - 1 tests node n, the last one draws the final token.
    """
    if tree.is_chain and not tree.chosen and tree.present is None:
        return _verify_chain(tree, target_probs, rule, relaxation, uniforms, certificates)
    return _verify_tree(tree, target_probs, rule, relaxation, uniforms, certificates)


def _verify_chain(
    tree: DraftTree, target_probs: Tensor, rule: Any, relaxation: Tensor, uniforms: Tensor, certificates: bool
) -> Verification:
    """All L tests at once: they depend on each other only through which of them is reached."""
    length = tree.depth
    path = torch.arange(length + 1, device=target_probs.device).expand(target_probs.shape[0], -1)
    if length == 0:
        tokens = draw(target_probs[:, 0], uniforms[:, 0])[:, None]
        return Verification(tokens, path, torch.ones_like(tokens[:, 0]))
    drafted = tree.tokens[:, 1:, None]
    tested, depth = target_probs[:, :length], path[:1, 1:, None]
    accepted = None  # a rule that can tell single tokens need not tell all of them, unless they are to be certified
    if certificates or not hasattr(rule, "accepted_at"):
        accepted = accepted_mass(rule, tested, tree.draft_probs, relaxation[:, None], depth)
        mass = accepted.gather(-1, drafted)
    else:
        mass = rule.accepted_at(tested, tree.draft_probs, relaxation[:, None], drafted)
    # u q < A, not u < A / q: no division, and a draft token without mass is never accepted
    passes = uniforms[:, :length, None] * tree.draft_probs.gather(-1, drafted) < mass
    if tree.forced is not None:
        passes = passes | (drafted == tree.forced[..., None])
    count = passes.squeeze(-1).cumprod(1).sum(1)  # [B], accepted drafts; test number count was rejected, if < length

    rows = torch.arange(count.shape[0], device=count.device)
    behind, last = target_probs[rows, count], count.clamp(max=length - 1)
    rejected, draft, relaxed = (count < length)[:, None], tree.draft_probs[rows, last], relaxation[last, None]
    distance = optimal = None
    if accepted is not None or not own_resampling(rule):
        full = (
            accepted_mass(rule, behind, draft, relaxed, last[:, None] + 1) if accepted is None else accepted[rows, last]
        )
        law = optimal = residual(behind, full * rejected)
    if own_resampling(rule):
        law = torch.where(rejected, rule.resample(behind, draft, relaxed, drafted[rows, last]), behind)
        distance = None if optimal is None else 0.5 * (law - optimal).abs().sum(-1)
    final = draw(law, uniforms[:, length])
    tokens = torch.cat([tree.tokens[:, 1:], final[:, None]], dim=1).scatter(1, count[:, None], final[:, None])

    bias = kl = None
    if certificates:
        executed = path[:, :length] <= count[:, None]
        if getattr(rule, "lossless", False):
            bias = kl = torch.zeros(executed.shape, device=executed.device)
        else:
            assert accepted is not None
            relaxed_by = bias_of_test(tested, accepted)
            bias = relaxed_by * executed
            if distance is None:  # where A <= p the test's law is p, whatever rounding says
                kl = torch.where(executed & (relaxed_by > 0), kl_of_test(tested, accepted), 0.0)
            else:  # G depends on the rejected token: charged where it was rejected, no KL certificate
                bias = bias.scatter_add(1, last[:, None], distance[:, None] * rejected)
    return Verification(tokens, path, count + 1, bias, kl)


def _verify_tree(
    tree: DraftTree, target_probs: Tensor, rule: Any, relaxation: Tensor, uniforms: Tensor, certificates: bool
) -> Verification:
    """Walk down: test the children of the current node one after another, without replacement (THEORY.md section 4)."""
    batch, _, codes = target_probs.shape
    device = target_probs.device
    rows = torch.arange(batch, device=device)
    children = trees.children(tree.parent, device, tree.width)
    if children.ndim == 2:
        children = children.expand(batch, -1, -1)
    length, own = tree.depth, own_resampling(rule)
    widths = trees.widths(tree.parent) if isinstance(tree.parent, tuple) else (tree.width,) * length
    sparse = hasattr(rule, "accepted_at")
    node = torch.zeros(batch, dtype=torch.long, device=device)
    going = torch.ones(batch, dtype=torch.bool, device=device)
    target = target_probs[:, 0]
    path = torch.zeros(batch, length + 1, dtype=torch.long, device=device)
    emitted = torch.ones(batch, dtype=torch.long, device=device)
    bias = torch.zeros(batch, length, device=device)
    last_inner = tree.draft_probs.shape[1] - 1
    for depth in range(length):
        number = torch.full((batch, 1), depth + 1, device=device)
        draft = target if tree.chosen else tree.draft_probs[rows, node.clamp(max=last_inner)]
        moved = torch.zeros_like(going)
        for order, child in enumerate(children[rows, node, : widths[depth]].unbind(1), start=1):
            test = going & ~moved & (child >= 0)
            child = child.clamp(min=0)
            if tree.present is not None:
                test = test & tree.present[rows, child]
            token = tree.tokens[rows, child][:, None]
            proposal = torch.zeros(batch, codes, device=device).scatter_(1, token, 1.0) if tree.chosen else draft
            accepted = None
            if certificates or not (sparse and own):
                accepted = accepted_mass(rule, target, proposal, relaxation[depth], number)
                mass = accepted.gather(1, token)
            else:
                mass = rule.accepted_at(target, proposal, relaxation[depth], token)
            uniform = uniforms[rows, (child - 1).clamp(min=0)][:, None]
            passes = (uniform * proposal.gather(1, token) < mass).squeeze(1)
            if tree.forced is not None:
                passes = passes | (token[:, 0] == tree.forced[:, depth])
            accept, reject = test & passes, test & ~passes
            optimal: Any = None if accepted is None else residual(target, accepted)
            law = rule.resample(target, proposal, relaxation[depth], token) if own else optimal
            if certificates:
                assert accepted is not None
                charge = bias_of_test(target, accepted)
                if own:
                    charge = charge + 0.5 * (law - optimal).abs().sum(-1) * reject
                bias[:, depth] += charge * test
            target = torch.where(reject[:, None], law, target)
            if not tree.chosen and order < widths[depth]:
                without = draft.scatter(1, token, 0.0)
                draft = torch.where(reject[:, None], without / without.sum(-1, keepdim=True).clamp(min=1e-38), draft)
            node = torch.where(accept, child, node)
            moved = moved | accept
        target = torch.where(moved[:, None], target_probs[rows, node], target)
        going = going & moved
        emitted = emitted + moved
        path[:, depth + 1] = node
    final = draw(target, uniforms[:, -1])
    tokens = torch.cat([tree.tokens.gather(1, path[:, 1:]), final[:, None]], dim=1)
    tokens = tokens.scatter(1, emitted[:, None] - 1, final[:, None])
    kl = torch.zeros_like(bias) if certificates and getattr(rule, "lossless", False) else None
    return Verification(tokens, path, emitted, bias if certificates else None, kl)
