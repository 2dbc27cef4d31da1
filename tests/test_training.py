"""Training of targets and heads: growth keeps the function, Muon orthogonalises, losses see the right pairs."""

import dataclasses

import pytest
import torch

from coolsd.targets.llamagen import LlamaGen
from training.draft import DraftTraining
from training.losses import acceptance_mass, masked_mean, soft_cross_entropy
from training.muon import MuonAdamW, orthogonalize
from training.target import caption_tokenizer, choose_branch, deepen, negative_log_likelihood


def test_a_deepened_target_computes_the_same_function(toy, rng):
    target, _ = toy()
    config = dataclasses.replace(target.config, transformer=dataclasses.replace(target.config.transformer, layers=6))
    deep = LlamaGen(config, target.caption_encoder)
    deep.load_state_dict(deepen(target.state_dict(), 2, 6))
    tokens = torch.randint(5, (3, 9), generator=rng)
    prompt = target.encode(["a", "b c", "a b c"], True)
    torch.testing.assert_close(deep.forced(prompt, tokens).logits, target.forced(prompt, tokens).logits)
    with pytest.raises(ValueError, match="not a multiple"):
        deepen(target.state_dict(), 2, 5)


def test_likelihood_of_a_branch_is_that_of_the_branch_alone(toy, rng):
    target, _ = toy()
    tokens = torch.randint(5, (3, 9), generator=rng)
    prompt = target.encode(["a", "b c", "a b c"], True)
    both = negative_log_likelihood(target, prompt, tokens)
    branch = torch.tensor([1, 0, 1])
    alone = negative_log_likelihood(target, choose_branch(prompt, branch), tokens)
    torch.testing.assert_close(alone[:, 0], both[torch.arange(3), branch])


def test_captions_become_words(toy):
    tokenizer = caption_tokenizer(["noto emoji of a red apple", "noto emoji of a rose"])
    ids = tokenizer.encode("NOTO emoji of a blue rose").ids
    assert len(ids) == 6 and ids[4] == tokenizer.token_to_id("[unknown]") and ids[5] == tokenizer.token_to_id("rose")


def test_orthogonalised_matrices_have_singular_values_near_one(rng):
    """Five steps of the quintic iteration leave them in about [0.68, 1.13] (Jordan et al. 2024)."""
    for shape in ((4, 24, 64), (2, 64, 24)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(*shape, generator=rng)))
        assert values.min() > 0.6 and values.max() < 1.25


def test_muon_and_adamw_both_descend(rng):
    goal = torch.randn(16, 16, generator=rng)
    matrix, vector = torch.nn.Parameter(torch.zeros(16, 16)), torch.nn.Parameter(torch.zeros(16))
    optimizer = MuonAdamW([matrix], [vector], lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = (matrix - goal).square().mean() + (vector - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.fixture
def features(toy, rng):
    """A batch as data.loader makes it, of the toy target: 2 captions, one left-padded, 2 branches."""
    target, head = toy()
    tokens = torch.randint(5, (2, 9), generator=rng)
    prompt = target.encode(["a b c a", "b"], True)
    hidden = target.forced(prompt, tokens).hidden_states
    ids = torch.cat([torch.full((2, 2, 4), -1), tokens[:, None].expand(-1, 2, -1)], dim=-1)
    valid = torch.cat([prompt.mask, torch.ones(2, 2, 9, dtype=torch.bool)], dim=-1)
    return head, {"hidden": hidden, "token_ids": ids, "valid": valid}


def training_of(head, **settings) -> DraftTraining:
    module = DraftTraining(guidance=2.0, noise=0.0, **settings)
    module.head = head
    module.log = lambda *args, **kwargs: None
    return module


def test_the_first_draft_has_loss_and_captions_have_none(features):
    """Changing the hidden state after the first image token changes the loss; those of caption slots do not."""
    head, batch = features
    module = training_of(head)
    base = module.training_step(batch, 0)

    def goal_changed(slot):
        goals = batch["hidden"].clone()
        goals[..., slot, :] += 1.0
        captured = {}
        original = module._losses
        module._losses = lambda predicted, goal, trained, branches: (
            captured.update(loss=original(predicted, goals.flatten(0, 1)[:, 1:], trained, branches))
            or original(predicted, goal, trained, branches)
        )
        module.training_step(batch, 0)
        module._losses = original
        return captured["loss"]["feature"] + 0.1 * captured["loss"]["classification"]

    assert goal_changed(4) > base + 0.01  # slot P = 4 holds t0: the goal of the first draft
    torch.testing.assert_close(goal_changed(2), base)  # a caption slot


def test_a_head_that_copies_the_target_has_full_acceptance_and_no_feature_loss(features):
    head, batch = features
    module = training_of(head)
    goal = batch["hidden"].flatten(0, 1)[:, 1:]
    trained = torch.ones(goal.shape[:2], dtype=torch.bool)
    losses = module._losses(goal, goal, trained, 2)
    assert losses["feature"] == 0
    assert losses["acceptance"].item() == pytest.approx(1.0, abs=1e-5)


def test_losses_against_their_definitions(rng, distributions):
    draft, target = distributions(rng, 3, 7), distributions(rng, 3, 7)
    expected = -(target * draft.log()).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(draft.log(), target.log()), expected)
    torch.testing.assert_close(acceptance_mass(draft, target), 1 - 0.5 * (draft - target).abs().sum(-1))
    mask = torch.tensor([True, False, True])
    torch.testing.assert_close(masked_mean(expected, mask), expected[mask].mean())
