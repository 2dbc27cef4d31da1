"""The draft head against the official drafter's numbers, and the chain's cache against a head run from scratch."""

import dataclasses

import pytest
import torch

import coolsd
from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.heads.checkpoint import load_head, save_head, show_layers
from coolsd.heads.eagle import EagleConfig, EagleHead, MultiLayerHead, make_head
from coolsd.rules.relaxed import CoolSD, Vanilla
from coolsd.sampling import Sampling
from coolsd.transformer import grid_rope

CAPTIONS = ["a", "b c a", "a b c a", "c c"]


def prefix_tokens(ids, prefix):
    """Official ids with token 0 in the caption slots -> ours with -1 there."""
    return torch.where(torch.arange(ids.shape[1]) < prefix, -1, ids)


def test_rope_table_is_that_of_the_target(official_drafter):
    # the pair with image token 0 (pair 119) sits where that token sits in the target (row 120): the same grid table
    head, _, _, _ = official_drafter
    torch.testing.assert_close(head.rope[:-20], grid_rope(120, 16, 16, 16), rtol=0, atol=1e-6)
    assert len(head.rope) == 120 + 256 + 20 and not head.rope[-20:].any()


@pytest.mark.parametrize("prepared", [False, True])
def test_teacher_forced_pass_is_the_official_one(official_drafter, prepared):
    head, given, out, _ = official_drafter
    head = head.prepare() if prepared else head.to(torch.float32)  # moving a head unfolds it
    tokens = prefix_tokens(out["tf.input_ids"], 119)
    hidden = head(tokens, out["tf.hidden_in"], head.rope[None, 1 : tokens.shape[1] + 1])
    valid = out["tf.attention_mask"].bool()
    torch.testing.assert_close(hidden[valid], out["tf.out"][valid], rtol=0, atol=1e-5)
    # and the same pass over both rows in full, without padding
    ids = torch.cat([torch.full((2, 119), -1), given["tf_codes"], torch.zeros(2, 1, dtype=torch.long)], dim=1)
    hidden = head(ids, given["tf_hidden"], head.rope[None, 1 : ids.shape[1] + 1])
    torch.testing.assert_close(hidden, out["tf.out_nomask"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_cached_rounds_and_tree_steps_are_the_official_ones(official_drafter, prepared):
    head, given, out, facts = official_drafter
    head = head.prepare() if prepared else head.to(torch.float32)
    scale = Sampling(guidance=facts["config"]["cfg_scale"])
    cache = head.transformer.new_cache(2, 160)

    def check(name, tokens, positions, mask, flat):
        hidden = head(tokens, out[f"{name}.hidden_in"], head.rope[None, positions.flatten() + 1], mask, cache, flat)
        torch.testing.assert_close(hidden, out[f"{name}.out"], rtol=0, atol=1e-5)
        cfg = out[f"{name}.cfg_logits"]
        logits = head.logits(hidden[:, -len(cfg) :])[None]  # [1, 2, N, V]
        torch.testing.assert_close(scale.guided(logits)[0], cfg, rtol=0, atol=1e-4)

    for index, facts_of_round in enumerate(facts["rounds"]):
        calls = facts_of_round["calls"]
        assert int(cache.length[0]) == calls[0]["past_len"]
        first = f"round{index}.call0"
        tokens = out[f"{first}.input_ids"]
        if index == 0:
            assert torch.equal(out[f"{first}.hidden_in"], given["prefix_hidden"])
            assert int(tokens[0, -1]) == int(given["first_token"])
            tokens = prefix_tokens(tokens, 119)
        count = tokens.shape[1]
        flat, mask = cache.place(count)
        check(first, tokens, out[f"{first}.position_ids"], mask, flat)
        cache.keep(None, torch.tensor([count, count]), int(cache.length[0]) + count)

        # all levels of the tree are placed at once, then run one after another
        sizes = [call["q_len"] for call in calls[1:]]
        seen, start = torch.zeros(sum(sizes), sum(sizes), dtype=torch.bool), 0
        for level, size in enumerate(sizes, start=1):
            official_mask = out[f"round{index}.call{level}.tree_mask"][0, 0]
            seen[start : start + size, : official_mask.shape[1]] = official_mask > 0
            start += size
        flat, mask = cache.place(sum(sizes), seen)
        flat, start = flat.view(2, -1), 0
        for level, size in enumerate(sizes, start=1):
            name, part = f"round{index}.call{level}", slice(start, start + size)
            tokens = out[f"{name}.input_ids"]
            positions = out[f"{name}.position_ids"]
            assert bool((positions == int(cache.length[0]) + level - 1).all())  # a level shares its position
            check(name, tokens, positions, mask[:, :, part], flat[:, part].reshape(-1))
            start += size


def test_folding_changes_nothing_but_speed(toy_copy, rng):
    _, head = toy_copy()
    with torch.no_grad():
        for parameter in (head.prefix_embedding, head.fc.bias):
            parameter.normal_(generator=rng)
    tokens = torch.randint(-1, 5, (3, 9), generator=rng)
    hidden, rope = torch.randn(3, 9, 32, generator=rng), head.rope[None, 1:10]
    plain = head(tokens, hidden, rope)
    folded = head.prepare()(tokens, hidden, rope)
    assert head._table is not None
    torch.testing.assert_close(folded, plain, rtol=0, atol=1e-5)
    head.train()  # training does not use the table
    torch.testing.assert_close(head(tokens, hidden, rope), plain, rtol=0, atol=0)


def test_context_is_the_targets_own_input(toy_copy, rng):
    # what the head adds to a token is what the target adds to it: the difference of their inputs is the embedding
    target, head = toy_copy()
    prompt = target.encode(CAPTIONS[:2], True)
    tokens = torch.randint(5, (2, 9), generator=rng)
    inputs = target._token_embeddings(tokens, torch.arange(9)[None], prompt)
    context = head.shifted(prompt.inputs["context"].flatten(0, 1))
    assert not context[:, 0].any()
    wanted = target.embedding(tokens).repeat_interleave(2, 0) + context[:, 1:]
    torch.testing.assert_close(inputs, wanted, rtol=0, atol=1e-5)


def from_scratch(head, target, prompt, tokens, drafted, sampling, mask_pads=True):
    """Draft distributions [L, V] of one row, no cache: committed tokens [c], then the drafted ones with own outputs."""
    count, slots = len(tokens), prompt.mask.shape[-1]
    forced = target.forced(prompt, tokens[None])
    pairs = torch.cat([torch.full((slots - 1,), -1), tokens])[None]
    hidden = head.features(forced)[0, :, : slots - 1 + count]  # [G, slots - 1 + count, H]
    probs = []
    for token in [*drafted.tolist(), None]:
        length = pairs.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if mask_pads:
            seen[:, :slots] &= prompt.mask[0, 0]
        seen |= torch.eye(length, dtype=torch.bool)
        rope = head.rope[torch.arange(1, length + 1).clamp(max=len(head.rope) - 1)][None]
        context = None
        if head.config.context:  # nothing for a caption slot, then what the target adds to token 0, 1, ...
            rows = [0] * (slots - 1) + [min(n + 1, target.image_tokens) for n in range(length - slots + 1)]
            context = head.shifted(prompt.inputs["context"][0])[:, rows]
        last = head(pairs.expand(prompt.branches, -1), hidden, rope, seen[None, None], context=context)[:, -1:]
        probs.append(sampling.probs(head.logits(last)[None])[0, 0])
        if token is not None:
            pairs = torch.cat([pairs, torch.tensor([[token]])], 1)
            hidden = torch.cat([hidden, last], 1)
    return torch.stack(probs)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(guidance=2.5), Sampling(guidance=2.0, top_k=3)], ids=str)
@pytest.mark.parametrize(
    ("mask_pads", "context", "layers"),
    [(True, False, ()), (False, False, ()), (True, True, ()), (True, False, (1, 2)), (True, True, (1, 2))],
)
def test_chain_drafts_as_a_head_run_from_scratch(toy_copy, rng, sampling, mask_pads, context, layers):
    # after each round the draft cache holds the target's own hidden states of the committed tokens, or layers joined
    target, head = toy_copy(grid=(3, 4))
    head.config = dataclasses.replace(head.config, mask_prefix_pads=mask_pads, context=context, layers=layers)
    if layers:
        torch.manual_seed(3)
        head = make_head(head.config, target.ends()).eval().requires_grad_(False)
        for parameter in head.parameters():
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=rng))
        show_layers(target, layers)
    rounds = []
    result = generate(
        target, CAPTIONS, Chain(head.prepare(), 4), CoolSD(1.5), sampling, seed=3, decode_images=False,
        observer=lambda seen: rounds.append((seen.tree, seen.active.clone())),
    )  # fmt: skip
    committed = 1 + torch.cat([torch.zeros(4, 1, dtype=torch.long), result.emitted.cumsum(1)], 1)
    assert (result.emitted.amin(0) < result.emitted.amax(0)).any()  # rows accept different lengths
    for turn, (tree, active) in enumerate(rounds):
        for row in active.nonzero().flatten().tolist():
            tokens = result.tokens[row, : int(committed[row, turn])]
            assert int(tree.tokens[row, 0]) == int(tokens[-1])
            prompt = target.encode(CAPTIONS[row : row + 1], sampling.branches == 2)
            wanted = from_scratch(head, target, prompt, tokens, tree.tokens[row, 1:-1], sampling, mask_pads)
            torch.testing.assert_close(tree.draft_probs[row], wanted, rtol=0, atol=1e-4)


def test_chain_draws_its_tokens_from_what_it_reports(toy, p_value):
    # first round of 6,000 equal prompts with equal first tokens: the drafted pair follows draft_probs
    target, head = toy()
    caught = []

    class Stop(Exception):
        pass

    def catch(seen):
        caught.append(seen.tree)
        raise Stop

    with pytest.raises(Stop):
        generate(
            target, ["a b"] * 6_000, Chain(head, 2), Vanilla(), Sampling(temperature=2.0), decode_images=False,
            observer=catch,
        )  # fmt: skip
    tree = caught[0]
    root = int(tree.tokens[:, 0].mode().values)
    rows = tree.tokens[:, 0] == root
    tokens, probs = tree.tokens[rows, 1:], tree.draft_probs[rows]
    law = probs[0, 0]
    assert p_value(tokens[:, 0].bincount(minlength=5), law) > 1e-3
    assert p_value(tokens[:, 0].bincount(minlength=5), law.roll(1)) < 1e-6  # negative control
    second = int(tokens[:, 0].mode().values)
    behind = tokens[:, 0] == second
    assert p_value(tokens[behind, 1].bincount(minlength=5), probs[behind][0, 1]) > 1e-3
    assert p_value(tokens[behind, 1].bincount(minlength=5), probs[behind][0, 1].roll(1)) < 1e-6  # negative control


def test_a_saved_head_loads_for_its_target_and_for_no_other(toy_copy, tmp_path, rng):
    target, head = toy_copy()
    target.save(tmp_path / "target")
    target = coolsd.load_target(tmp_path / "target", device="cpu", dtype="float32")
    ends = target.ends()
    config = EagleConfig(**{**vars(head.config), "target": target.fingerprint})
    own = EagleHead(config, ends["embedding"], ends["lm_head"], ends["rope"])
    own.load_state_dict(head.state_dict())
    save_head(own, tmp_path / "head")
    loaded = coolsd.load_head(tmp_path / "head", target)
    tokens, hidden = torch.randint(-1, 5, (2, 6), generator=rng), torch.randn(2, 6, 32, generator=rng)
    rope = head.rope[None, 1:7]
    torch.testing.assert_close(loaded(tokens, hidden, rope), head(tokens, hidden, rope), rtol=0, atol=1e-5)
    other, _ = toy_copy(seed=1)
    other.save(tmp_path / "other")
    other = coolsd.load_target(tmp_path / "other", device="cpu", dtype="float32")
    refusal = f"was trained on {target.fingerprint}, but the target is {other.fingerprint}"
    with pytest.raises(ValueError, match=refusal):
        coolsd.load_head(tmp_path / "head", other)


def test_a_head_that_does_not_fit_is_refused_by_shape(toy):
    target, head = toy()
    ends = target.ends()
    with pytest.raises(ValueError, match=r"wants an embedding of shape \[5, 32\], the target has \[4, 32\]"):
        EagleHead(head.config, ends["embedding"][:4], ends["lm_head"], ends["rope"])
    with pytest.raises(ValueError, match="wants 13 positions of head_dim 16, the target has 12 of 16"):
        EagleHead(head.config, ends["embedding"], ends["lm_head"], ends["rope"][:12])
    with pytest.raises(ValueError, match="Chain length is 0, but must be >= 1"):
        Chain(head, 0)


def test_a_head_of_several_layers_loads_as_such_and_has_its_target_show_them(toy_copy, tmp_path):
    target, head = toy_copy()
    config = dataclasses.replace(head.config, layers=(1, 2))
    own = make_head(config, target.ends())
    save_head(own, tmp_path / "two")
    with pytest.warns(UserWarning, match="only shapes were checked"):
        again = load_head(tmp_path / "two", target)
    assert isinstance(again, MultiLayerHead) and again.config == config and target.layers == (1, 2)
    assert torch.equal(again.join.weight, own.join.weight)
    save_head(make_head(dataclasses.replace(config, layers=(1, 9)), target.ends()), tmp_path / "nine")
    with (
        pytest.warns(UserWarning, match="only shapes were checked"),
        pytest.raises(ValueError, match=r"layers are \[1, 9\], but .* has layers 1 to 2"),
    ):
        load_head(tmp_path / "nine", target)
