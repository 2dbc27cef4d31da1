"""Any rule with any drafter, by the names that people use, on a saved toy pair."""

import itertools

import pytest
import torch

import coolsd
from coolsd.methods import DRAFTERS, RULES, make_drafter, make_rule, needs_head

CAPTIONS = ["a b", "c", "a b c a"]
NUMBERS = {"lantern": {"k": 3, "bound": 0.4}, "lantern++": {"k": 3, "bound": 3.0}, "uniform": {"delta": 1.5}}


@pytest.fixture(scope="module")
def pair(saved_toy):
    target = coolsd.load_target(saved_toy / "target", "cpu", "float32")
    return target, coolsd.load_head(saved_toy / "draft", target)


@pytest.mark.parametrize(("drafter", "rule"), itertools.product(DRAFTERS, RULES))
def test_every_rule_decodes_with_every_drafter_row_by_row(drafter, rule, pair):
    target, head = pair
    own = [{}, {"resampling": "own"}] if rule in ("lantern", "lantern++", "grouped") else [{}]
    for more in own:
        arguments = (make_rule(rule, **NUMBERS.get(rule, {}), **more), coolsd.Sampling(guidance=1.5, top_k=4))
        make = lambda: make_drafter(drafter, head if needs_head(drafter) else None)  # noqa: E731
        batch = coolsd.generate(target, CAPTIONS, make(), *arguments, seed=3, rows=[4, 0, 7])
        assert batch.tokens.shape == (3, target.image_tokens) and int(batch.tokens.max()) < target.codebook_size
        assert bool((batch.accepted_length >= 1).all()) and bool(batch.nll_per_token.isfinite().all())
        assert bool((batch.bias_per_token >= 0).all()) and bool(batch.bias_per_token.isfinite().all())
        if rule == "vanilla":
            assert not batch.bias_per_token.any() and not batch.kl_per_token.any()
        for index, row in enumerate((4, 0, 7)):
            alone = coolsd.generate(target, [CAPTIONS[index]], make(), *arguments, seed=3, rows=[row])
            assert torch.equal(alone.tokens[0], batch.tokens[index])
            assert int(alone.target_calls[0]) == int(batch.target_calls[index])
            torch.testing.assert_close(alone.bias_per_token[0], batch.bias_per_token[index], rtol=0, atol=1e-5)


def test_a_description_tells_trees_and_rules_apart(pair):
    _, head = pair
    one, other = (coolsd.StaticTree(head, [(0,), (1,), (at, 0)]) for at in (0, 1))
    assert coolsd.methods.describe_drafter(one, "h") != coolsd.methods.describe_drafter(other, "h")

    class Handmade:
        def __init__(self, strength):
            self.strength, self.table = strength, torch.ones(3)

        def accept_probs(self, target_probs, draft_probs, depth):
            return (target_probs / draft_probs).clamp(max=1) ** self.strength

    about = coolsd.methods.describe_rule(Handmade(0.5), 3)
    assert about["strength"] == 0.5 and "table" not in about and about["name"].endswith("Handmade")
