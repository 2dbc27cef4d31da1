"""Verification of a draft tree. Knows distributions and trees; knows nothing of models or images.

One test: a token x drawn from q is accepted with probability A(x) / q(x), A = accepted mass; after a rejection
the token comes from G* = normalise(relu(p - A)) (Cool-SD, Theorem 2). p = target, q = draft. No host sync inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coolsd import tree as trees
from coolsd.interfaces import DraftTree, Verification
from coolsd.sampling import draw


def accepted_mass(rule: Any, target_probs: Tensor, draft_probs: Tensor, relaxation: Tensor, depth: Tensor) -> Tensor:
    """A [..., V] of a rule, or draft * accept_probs of one that only knows acceptance probabilities."""
    if hasattr(rule, "accept_probs"):
        accept = rule.accept_probs(target_probs, draft_probs, depth).clamp(0, 1)
        return torch.where(draft_probs > 0, draft_probs * accept, 0.0)  # p / q is 0 / 0 where top-k left nothing
    return rule.accepted_mass(target_probs, draft_probs, relaxation)


def residual(target_probs: Tensor, accepted: Tensor) -> Tensor:
    """Distribution to resample from after a rejection: what the target still owes.  All [..., V].

    normalise(relu(target - accepted)).  Of all choices it minimises the total-variation distance to the target at
    this position (Theorem 2, Eqn. 5); where nothing is owed, the target itself is returned.
    """
    owed = (target_probs - accepted).relu()
    total = owed.sum(-1, keepdim=True)
    return torch.where(total > 0, owed / total.clamp(min=1e-38), target_probs)


def bias_of_test(target_probs: Tensor, accepted: Tensor) -> Tensor:
    """N = sum relu(A - p) over [..., V]: total variation of one test with optimal resampling. Exactly 0 if A <= p."""
    return (accepted - target_probs).relu().sum(-1)


def kl_of_test(target_probs: Tensor, accepted: Tensor) -> Tensor:
    """KL(K || p) of one test in nats, K = A + (1 - sum A) G*: [..., V] -> [...]. Infinite where K > 0 = p."""
    emitted = accepted + (1 - accepted.sum(-1, keepdim=True)).relu() * residual(target_probs, accepted)
    return torch.special.xlogy(emitted, emitted / target_probs).nan_to_num(nan=0.0, posinf=torch.inf).sum(-1).relu()


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
    length = len(tree.parent) - 1
    path = torch.arange(length + 1, device=target_probs.device).expand(target_probs.shape[0], -1)
    if length == 0:
        tokens = draw(target_probs[:, 0], uniforms[:, 0])[:, None]
        return Verification(tokens, path, torch.ones_like(tokens[:, 0]))
    drafted = tree.tokens[:, 1:, None]
    tested = target_probs[:, :length]
    accepted = accepted_mass(rule, tested, tree.draft_probs, relaxation[:, None], path[:1, 1:, None])
    # u q < A, not u < A / q: no division, and a draft token without mass is never accepted
    passes = uniforms[:, :length, None] * tree.draft_probs.gather(-1, drafted) < accepted.gather(-1, drafted)
    count = passes.squeeze(-1).cumprod(1).sum(1)  # [B], accepted drafts; test number count was rejected, if < length

    rows = torch.arange(count.shape[0], device=count.device)
    behind = target_probs[rows, count]  # [B, V]
    rejected = accepted[rows, count.clamp(max=length - 1)] * (count < length)[:, None]
    final = draw(residual(behind, rejected), uniforms[:, length])
    tokens = torch.cat([tree.tokens[:, 1:], final[:, None]], dim=1).scatter(1, count[:, None], final[:, None])

    bias = kl = None
    if certificates:
        executed = path[:, :length] <= count[:, None]
        if getattr(rule, "lossless", False):
            bias = kl = torch.zeros(executed.shape, device=executed.device)
        else:
            bias = bias_of_test(tested, accepted) * executed
            kl = torch.where(executed, kl_of_test(tested, accepted), 0.0)
    return Verification(tokens, path, count + 1, bias, kl)


def _verify_tree(
    tree: DraftTree, target_probs: Tensor, rule: Any, relaxation: Tensor, uniforms: Tensor, certificates: bool
) -> Verification:
    """Walk down: test the children of the current node one after another, without replacement (THEORY.md section 4)."""
    batch, _, codes = target_probs.shape
    device = target_probs.device
    rows = torch.arange(batch, device=device)
    children = trees.children(tree.parent, device)
    length = int(max(trees.node_depths(tree.parent)))
    node = torch.zeros(batch, dtype=torch.long, device=device)
    going = torch.ones(batch, dtype=torch.bool, device=device)
    target = target_probs[:, 0]
    path = torch.zeros(batch, length + 1, dtype=torch.long, device=device)
    bias = torch.zeros(batch, length, device=device)
    last_inner = tree.draft_probs.shape[1] - 1
    for depth in range(length):
        draft = tree.draft_probs[rows, node.clamp(max=last_inner)]
        moved = torch.zeros_like(going)
        for child in children[node].unbind(1):
            test = going & ~moved & (child >= 0)
            child = child.clamp(min=0)
            if tree.present is not None:
                test = test & tree.present[rows, child]
            token = tree.tokens[rows, child][:, None]
            one_hot = torch.zeros(batch, codes, device=device).scatter_(1, token, 1.0)
            proposal = one_hot if tree.chosen else draft
            depth_tensor = torch.full((batch, 1), depth + 1, device=device)
            accepted = accepted_mass(rule, target, proposal, relaxation[depth], depth_tensor)
            uniform = uniforms[rows, (child - 1).clamp(min=0)][:, None]
            passes = (uniform * proposal.gather(1, token) < accepted.gather(1, token)).squeeze(1)
            if certificates:
                bias[:, depth] += bias_of_test(target, accepted) * test
            accept, reject = test & passes, (test & ~passes)[:, None]
            target = torch.where(reject, residual(target, accepted), target)
            without = draft * (1 - one_hot)
            draft = torch.where(reject, without / without.sum(-1, keepdim=True).clamp(min=1e-38), draft)
            node = torch.where(accept, child, node)
            moved = moved | accept
        target = torch.where(moved[:, None], target_probs[rows, node], target)
        going = going & moved
        path[:, depth + 1] = node
    final = draw(target, uniforms[:, -1])
    depth_of = trees.depths(tree.parent, device)[node]  # accepted drafts
    tokens = torch.cat([tree.tokens.gather(1, path[:, 1:]), final[:, None]], dim=1)
    tokens = tokens.scatter(1, depth_of[:, None], final[:, None])
    kl = torch.zeros_like(bias) if certificates and getattr(rule, "lossless", False) and tree.is_chain else None
    return Verification(tokens, path, depth_of + 1, bias if certificates else None, kl)
