"""Training of targets and heads: growth keeps the function, Muon orthogonalises, losses see the right pairs."""

import dataclasses
import math
import shutil
from unittest.mock import Mock

import lightning as L
import pytest
import torch

from coolsd.heads.eagle import EagleConfig, make_head
from coolsd.image_tokenizers import LlamaGenVQ, LlamaGenVQConfig
from coolsd.rules.relaxed import CoolSD
from coolsd.sampling import Sampling
from coolsd.targets import load_target
from coolsd.targets.llamagen import LlamaGen
from coolsd.transformer import TransformerConfig
from data.emoji.dataset import EmojiImages
from data.loader import pairs
from training.callbacks import AcceptedLength, TokensPerSecond
from training.draft import DraftTraining, widened
from training.losses import acceptance_mass, masked_mean, soft_cross_entropy
from training.memory import training_bytes
from training.muon import Muon, orthogonalize
from training.rollout import RolloutCache, depth_mask, shifted
from training.target import (
    EmojiCaptions,
    TargetTraining,
    caption_tokenizer,
    deepen,
    negative_log_likelihood,
)
from training.tokenizer import EmojiImagesModule, EmojiSampler, TokenizerTraining


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


def test_a_widened_head_computes_the_same_function(toy, rng):
    _, head = toy()
    config = head.config.transformer
    wide = widened(head, config.intermediate_size + 24)
    assert wide.config == dataclasses.replace(
        head.config, transformer=dataclasses.replace(config, intermediate_size=config.intermediate_size + 24)
    )
    tokens, hidden = torch.randint(5, (3, 9), generator=rng), torch.randn(3, 9, config.hidden_size, generator=rng)
    arguments = tokens, hidden, head.rope[None, :9]
    torch.testing.assert_close(wide(*arguments), head(*arguments))
    wide(*arguments).pow(2).mean().backward()
    down = wide.transformer.layers[0].feed_forward.down.weight.grad
    assert down is not None and bool((down != 0).any(0).all())  # every new channel learns at once
    assert widened(head, config.intermediate_size) is head
    with pytest.raises(ValueError, match="pass at least that"):
        widened(head, config.intermediate_size - 8)


def test_likelihood_of_a_branch_is_that_of_the_branch_alone(toy, rng):
    target, _ = toy()
    tokens = torch.randint(5, (3, 9), generator=rng)
    prompt = target.encode(["a", "b c", "a b c"], True)
    both = negative_log_likelihood(target, prompt, tokens)
    branch = torch.tensor([1, 0, 1])
    alone = negative_log_likelihood(target, prompt.choose(branch), tokens)
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
    optimizer = Muon([{"params": [matrix], "muon": 0.2}, {"params": [vector], "muon": 0}], lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(60):
        loss = (matrix - goal).square().mean() + (vector - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.fixture
def features(toy_copy, rng):
    """A batch as data.loader makes it, of the toy target: 2 captions, one left-padded, 2 branches."""
    target, head = toy_copy()
    tokens = torch.randint(5, (2, 9), generator=rng)
    prompt = target.encode(["a b c a", "b"], True)
    hidden = target.forced(prompt, tokens).hidden_states
    ids = torch.cat([torch.full((2, 2, 4), -1), tokens[:, None].expand(-1, 2, -1)], dim=-1)
    valid = torch.cat([prompt.mask, torch.ones(2, 2, 9, dtype=torch.bool)], dim=-1)
    return head, {"hidden": hidden, "token_ids": ids, "valid": valid}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Folder of a random image tokenizer: 64 pixels, 4 x 4 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    torch.manual_seed(0)
    LlamaGenVQ(VQ).save(folder)
    return folder


VQ = LlamaGenVQConfig(64, 5, 4, True, 8, 8, (1,), 1, 16, 4)
SMALL = {"hidden_size": 16, "layers": 1, "heads": 1, "intermediate_size": 16, "caption_dim": 8, "warmup_steps": 0}


def small_trainer(folder, steps=1):
    return L.Trainer(
        accelerator="cpu", max_steps=steps, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_val_batches=1, val_check_interval=1,
        use_distributed_sampler=False, num_sanity_val_steps=0,
    )  # fmt: skip


def test_only_a_fit_exports(tokenizer, tmp_path):
    module, data = TargetTraining(str(tokenizer), **SMALL), EmojiCaptions(2, held_out_images=2)
    small_trainer(tmp_path).validate(module, data, verbose=False)
    assert not (tmp_path / "export").exists()
    small_trainer(tmp_path).fit(module, data)
    assert (tmp_path / "export" / "target" / "model.safetensors").exists()
    small_trainer(tmp_path / "vq").fit(TokenizerTraining(VQ, warmup_steps=0), EmojiImagesModule(2, held_out_images=2))
    assert (tmp_path / "vq" / "export" / "model.safetensors").exists()


def test_a_schedule_needs_an_end(tokenizer, tmp_path):
    for module, data in (
        (TargetTraining(str(tokenizer), **SMALL), EmojiCaptions(2)),
        (TokenizerTraining(VQ), EmojiImagesModule(2)),
    ):
        with pytest.raises(ValueError, match="max_minutes are both unlimited"):
            small_trainer(tmp_path, steps=-1).fit(module, data)


def test_a_start_of_another_width_is_refused(tokenizer, saved_toy):
    with pytest.raises(ValueError, match="does not fit this model"):
        TargetTraining(str(tokenizer), str(saved_toy / "target"), **{**SMALL, "layers": 2})
    with pytest.raises(ValueError, match="does not fit this model"):
        TokenizerTraining(dataclasses.replace(VQ, channels=16), start_from=tokenizer)
    with pytest.raises(ValueError, match="decoder_only needs start_from"):
        TokenizerTraining(VQ, decoder_only=True)


def test_processes_share_an_epoch_of_emojis():
    images = EmojiImages("train", limit=11)
    samplers = [EmojiSampler(images, 0, Mock(global_rank=rank, world_size=2)) for rank in range(2)]
    for sampler in samplers:
        sampler.set_epoch(3)
    first, second = map(set, samplers)
    assert len(first) == len(second) == 5 and not first & second
    alone = EmojiSampler(images, 0, None)
    assert sorted(alone) == list(range(11))
    before = images.placement(0)
    alone.set_epoch(4)
    assert images.placement(0) != before or images.placement(1) != before


def test_accepted_length_is_measured_in_the_heads_dtype(toy_copy, saved_toy):
    _, head = toy_copy()
    head.to(torch.bfloat16)
    target = load_target(saved_toy / "target", "cpu")
    data = Mock(
        held_out_captions=lambda count: ["a b", "c"][:count], cache=Mock(settings=Mock(target=target.fingerprint))
    )
    trainer, callback = Mock(datamodule=data, global_step=3), AcceptedLength(str(saved_toy / "target"), 4, Sampling())
    callback.measure(trainer, Mock(head=head, device="cpu"), "before")
    (metrics, step), _ = trainer.logger.log_metrics.call_args
    assert step == 3 and 1 <= metrics["accepted_length"] <= 6
    assert not any(isinstance(value, LlamaGen) for value in vars(callback).values())


def test_a_head_of_several_layers_is_measured_too(toy_copy, saved_toy):
    target = load_target(saved_toy / "target", "cpu")
    _, plain = toy_copy()
    ends = {name: getattr(plain, name) for name in ("embedding", "lm_head", "rope")}
    head = make_head(dataclasses.replace(plain.config, layers=(1, 2)), ends)
    data = Mock(held_out_captions=lambda count: ["a b"], cache=Mock(settings=Mock(target=target.fingerprint)))
    trainer, callback = Mock(datamodule=data, global_step=3), AcceptedLength(str(saved_toy / "target"), 4, Sampling())
    callback.measure(trainer, Mock(head=head, device="cpu"), "before")
    assert 1 <= trainer.logger.log_metrics.call_args[0][0]["accepted_length"] <= 6


def test_tokens_a_second_are_those_since_they_were_last_told(monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 9.0, 9.0])
    monkeypatch.setattr("training.callbacks.time.perf_counter", lambda: next(clock))
    callback, module, rates = TokensPerSecond(), Mock(), []
    module.log = lambda name, value, **_: rates.append(value)
    settings = Mock(image_tokens=10)
    trainer = Mock(world_size=2, log_every_n_steps=2, global_step=0, datamodule=Mock(cache=Mock(settings=settings)))
    callback.on_train_epoch_start(trainer, module)
    for trainer.global_step in (0, 1, 1, 2, 2, 3, 3, 4):  # two batches a step
        callback.on_train_batch_end(trainer, module, None, {"token_ids": torch.zeros(3, 2, 14)}, 0)
    assert rates == [4 * 120 / 4, 4 * 120 / 5]


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
        goals[..., slot, :] += 10.0
        captured = {}
        original = module._losses
        module._losses = lambda predicted, goal, *places: (
            captured.update(loss=original(predicted, module._goal(goals.flatten(0, 1)[:, 1:], 2), *places))
            or original(predicted, goal, *places)
        )
        module.training_step(batch, 0)
        module._losses = original
        return captured["loss"]["feature"] + 0.1 * captured["loss"]["classification"]

    assert goal_changed(4) > base + 0.01  # slot P = 4 holds t0: the goal of the first draft
    torch.testing.assert_close(goal_changed(2), base)  # a caption slot


def test_eagle1_is_the_step_that_is_written_out_here(features):
    """Row by row without padding, pair by pair with loss; AdamW's first step is w (1 - lr wd) - lr g / (|g| + eps)."""
    head, batch = features
    module = training_of(head.train().requires_grad_(True), warmup_steps=1)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    found = torch.autograd.grad(module.training_step(batch, 0), weights, allow_unused=True)
    feature, entropy = [], []
    for hidden, ids, valid in zip(
        *(batch[name].flatten(0, 1) for name in ("hidden", "token_ids", "valid")), strict=True
    ):
        pad = int((~valid).sum())
        hidden, ids = hidden[pad:], ids[pad:]
        rope = head.rope[None, pad + 1 : pad + len(ids)]
        predicted = head(ids[None, 1:], hidden[None, :-1], rope)[0]
        for pair in range(len(ids) - 1):
            if ids[pair + 1] >= 0:
                error = (predicted[pair] - hidden[pair + 1]).abs()
                feature.append(torch.where(error < 1, error**2 / 2, error - 0.5).mean())
                target, draft = (torch.exp(head.lm_head @ state) for state in (hidden[pair + 1], predicted[pair]))
                entropy.append(-(target / target.sum() * torch.log(draft / draft.sum())).sum())
    assert len(feature) == 2 * 2 * 9
    loss = torch.stack(feature).mean() + 0.1 * torch.stack(entropy).mean()
    expected = torch.autograd.grad(loss, weights, allow_unused=True)
    module.trainer = Mock(estimated_stepping_batches=10)
    optimizer, before = module.configure_optimizers()["optimizer"], [weight.detach().clone() for weight in weights]
    for weight, gradient, same in zip(weights, found, expected, strict=True):
        assert gradient is not None and same is not None
        torch.testing.assert_close(gradient, same, atol=1e-6, rtol=1e-4)
        weight.grad = gradient
    optimizer.step()
    for weight, was, gradient in zip(weights, before, found, strict=True):
        stepped = was * (1 - 1e-3 * 0.01) - 1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(weight.detach(), stepped, atol=1e-6, rtol=1e-4)


def test_a_head_that_copies_the_target_has_full_acceptance_and_no_feature_loss(features):
    head, batch = features
    module = training_of(head)
    goal = batch["hidden"].flatten(0, 1)[:, 1:]
    trained = torch.ones(goal.shape[:2], dtype=torch.bool)
    losses = module._losses(goal, module._goal(goal, 2), trained, 0)
    assert losses["feature"] == 0
    assert losses["acceptance"].item() == pytest.approx(1.0, abs=1e-5)


def test_the_acceptance_loss_raises_the_acceptance_of_the_guided_distribution(features):
    head, batch = features
    weights = {"classification_weight": 0.0, "acceptance_weight": 1000.0}
    module = training_of(head.train().requires_grad_(True), **weights)

    def acceptance():
        found = {}
        module.log = lambda name, value, **_: found.update({name: float(value)})
        loss = module.training_step(batch, 0)
        assert float(loss) == pytest.approx(found["train/feature"] - 1000 * found["train/acceptance"], rel=1e-5)
        return loss, found["train/acceptance"]

    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=1e-3)
    first = acceptance()[1]
    for _ in range(20):
        optimizer.zero_grad()
        acceptance()[0].backward()
        optimizer.step()
    assert acceptance()[1] > first + 0.01
    with torch.no_grad():  # where it is no part of the loss it costs no gradient
        module.hparams["acceptance_weight"] = 0.0
    states, trained = torch.rand(2, 9, 32, requires_grad=True), torch.ones(2, 9).bool()
    assert not module._losses(states, module._goal(states, 2), trained, 0)["acceptance"].requires_grad


def test_every_depth_of_a_rollout_is_a_chain_from_scratch(features):
    """Depth s at pair i + s is what a head says that reads the target's states up to pair i and its own after it."""
    head, batch = features
    rows = {name: value.flatten(0, 1) for name, value in pairs(batch).items()}
    tokens, hidden, seen, context = rows["token_ids"], rows["hidden"], rows["seen"], rows.get("context")
    count, cache, depths = hidden.shape[1], RolloutCache(head.config.transformer.layers), []
    rope, flat, inputs = head.rope[None, 1 : 1 + count], torch.empty(0), hidden
    for depth in range(3):
        depths.append(head(tokens, inputs, rope, depth_mask(seen, depth), cache, flat, context))
        inputs = shifted(depths[-1], inputs)
    own = torch.eye(count, dtype=torch.bool)
    for first in range(head.config.prompt_slots - 1, count - 2):
        states = hidden.clone()
        for depth in range(3):
            here = first + depth + 1  # pairs read so far
            mask = (torch.ones(here, here).tril().bool() & seen[:, None, :here] | own[:here, :here])[:, None]
            words = None if context is None else context[:, :here]
            said = head(tokens[:, :here], states[:, :here], rope[:, :here], mask, context=words)[:, -1]
            torch.testing.assert_close(depths[depth][:, here - 1], said, atol=1e-5, rtol=1e-4)
            states[:, here if here < count else -1] = said
    wrong = head(tokens, inputs, rope, depth_mask(seen, 0), None, None, context)  # negative control: no branch
    assert (wrong - depths[2]).abs().max() > 1e-3


def test_a_rollout_trains_through_its_own_predictions(features):
    head, batch = features
    module = training_of(head.train().requires_grad_(True), rollout=3, rollout_decay=0.5, classification_weight=0.0)
    losses, real = [], module._losses
    module._losses = lambda *given: losses.append(real(*given)) or losses[-1]
    loss = module.training_step(batch, 0)
    parts = [float(each["feature"]) for each in losses]
    assert float(loss) == pytest.approx((parts[0] + parts[1] / 2 + parts[2] / 4) / 1.75, rel=1e-5)
    gradients = []
    for depth in range(3):
        module._losses = lambda *given: losses.append(real(*given)) or losses[-1]
        losses.clear()
        module.training_step(batch, 0)
        wanted = [p for p in head.parameters() if p.requires_grad]
        gradients.append(torch.autograd.grad(losses[depth]["feature"], wanted, allow_unused=True))
    for of_depth in gradients:
        assert all(gradient is not None and bool(gradient.abs().max() > 0) for gradient in of_depth)


def test_validation_tells_every_depth_and_the_length_that_follows(features):
    head, batch = features
    found = {}
    module = training_of(head, relaxation=CoolSD(1.5))
    module.log = lambda name, value, **_: found.update({name: float(value)})
    with torch.no_grad():
        module.validation_step(batch, 0)
    masses = [found["val/acceptance"], *(found[f"val/acceptance_{depth}"] for depth in range(2, 6))]
    length = 1 + sum(math.prod(masses[:depth]) for depth in range(1, 6))
    assert found["val/accepted_length"] == pytest.approx(length, rel=1e-5)
    assert found["val/relaxed"] > found["val/acceptance"] and found["val/relaxed_length"] > length
    assert 0 <= found["val/top1"] <= found["val/top3"] <= 1


def test_validation_tells_the_interval_of_each_measure_over_samples(features):
    head, batch = features
    count, single, found = len(batch["hidden"]), [], {}
    module = training_of(head, relaxation=CoolSD(1.5))
    for at in range(count):
        told = {}
        module.log = lambda name, value, told=told, **_: told.update({name: float(value)})
        with torch.no_grad():
            module.validation_step({name: value[at : at + 1] for name, value in batch.items()}, 0)
        single.append(told)
    module.of_samples.reset()
    module.log = lambda name, value, **_: found.update({name: float(value)})
    with torch.no_grad():
        module.validation_step(batch, 0)
    found.clear()
    module.on_validation_epoch_end()
    assert count > 1 and len(found) == 14  # acceptance and relaxed at five depths, top1, top3, two lengths
    for name, half in found.items():
        own = torch.tensor([told[name.removesuffix("_ci95")] for told in single])
        assert half == pytest.approx(float(1.96 * own.std() / count**0.5), rel=1e-4)


compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": True}, pytest.param({"compile": True}, marks=[pytest.mark.slow, compiler])]
)
def test_switches_that_save_memory_or_time_leave_the_step(features, settings):
    """Loss and gradients, of every objective at once; compiled code adds up in another order."""
    head, batch = features
    weights = [weight for weight in head.train().requires_grad_(True).parameters() if weight.requires_grad]
    whole = {"rollout": 2, "acceptance_weight": 5.0, "guided_weight": 0.5}

    def step(**more):
        module = training_of(head, **whole, **more)
        if more.get("compile"):
            head.transformer.compile_shapes()
        loss = module.training_step(batch, 0)
        return [loss, *torch.autograd.grad(loss, weights, allow_unused=True)]

    expected, found = step(), step(**settings)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_first_steps_are_eagle1s_and_the_others_are_not(features, monkeypatch):
    """Loss and gradients before and from `eagle1_steps` on are those of the two recipes."""
    head, batch = features
    weights = [weight for weight in head.train().requires_grad_(True).parameters() if weight.requires_grad]

    def step(at, **settings):
        monkeypatch.setattr(DraftTraining, "global_step", at)
        loss = training_of(head, **settings).training_step(batch, 0)
        return [loss, *torch.autograd.grad(loss, weights, allow_unused=True)]

    whole = {"rollout": 2, "acceptance_weight": 5.0, "guided_weight": 0.5}
    eagle1, later = step(0), step(0, **whole)
    assert abs(eagle1[0] - later[0]) > 0.1
    torch.testing.assert_close(step(2, eagle1_steps=3, **whole), eagle1, rtol=0, atol=0)
    torch.testing.assert_close(step(3, eagle1_steps=3, **whole), later, rtol=0, atol=0)
    module = training_of(head, eagle1_steps=3, **whole).eval()  # a look at a checkpoint knows no step
    module.log = lambda name, value, **_: found.update({name: value})
    found = {}
    with torch.no_grad():
        module.validation_step(batch, 0)
    torch.testing.assert_close(found["val/loss"], later[0].detach())


@pytest.mark.parametrize(("decay", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("linear", 0.75), ("cosine", 0.75)])
def test_the_learning_rate_warms_up_and_falls_to_zero(features, decay, halfway):
    module = training_of(features[0].requires_grad_(True), decay=decay, warmup_steps=4, learning_rate=1.0)
    module.trainer = Mock(estimated_stepping_batches=100)
    factor = module.configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas[0]
    left = 1 - halfway if decay == "linear" else (1 + math.cos(math.pi * halfway)) / 2
    assert factor(100 * halfway) == pytest.approx(left)
    assert factor(0) == 0.25 and factor(100) == pytest.approx(0) and factor(3) > 0.9


def test_broken_weights_replace_no_checkpoint(features):
    head, _ = features
    module = training_of(head)
    module.on_save_checkpoint({})
    with torch.no_grad():
        head.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"head.fc.weight is not finite .* no checkpoint is written"):
        module.on_save_checkpoint({})


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"rollout": 0}, "rollout is 0"), ({"rollout_decay": 0}, "decay is 0"), ({"eagle1_steps": -1}, "steps is -1")],
)
def test_a_rollout_has_limits(settings, said):
    with pytest.raises(ValueError, match=said):
        DraftTraining(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"acceptance_weight": 5.0},
        {"rollout": 3},
        {"rollout": 5, "acceptance_weight": 5.0},
        {"deep": 3, "rollout": 3},
    ],
)
def test_the_memory_of_a_step_is_known_before_it_runs(settings, rng):
    """What autograd really keeps, each storage once, against the formula."""
    settings = dict(settings)
    deep = settings.pop("deep", 1)
    shape, layers = TransformerConfig(64, deep, 2, 128), (1, 2, 3) if deep > 1 else ()
    config = EagleConfig(shape, codebook_size=300, prompt_slots=8, image_tokens=64, layers=layers)
    matrix = torch.randn(300, 64, generator=rng)
    head = make_head(config, {"embedding": matrix, "lm_head": matrix, "rope": torch.zeros(72, 16, 2)})
    tokens = torch.cat([torch.full((3, 2, 8), -1), torch.randint(300, (3, 2, 64), generator=rng)], -1)
    hidden = torch.randn(3, 2, 72, 64, generator=rng)
    batch = {"hidden": hidden, "token_ids": tokens, "valid": tokens > -2, "index": torch.arange(3)}
    batch["layers"] = torch.randn(3, 2, 72, 3 * 64, generator=rng)
    module, kept = training_of(head.train(), **settings), {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*head.parameters(), *head.buffers())}
    alive = []

    def pack(tensor):
        alive.append(tensor)  # else its storage would be used again
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.training_step(batch, 0)
    acceptance, rollout = "acceptance_weight" in settings, settings.get("rollout", 1)
    needed = training_bytes(head, 3, 2, rollout, acceptance)
    later = 4 * (3 * sum(p.numel() for p in head.parameters()) + 2 * 3 * 2 * 64 * 300)  # in the backward pass
    assert 0.8 < sum(kept.values()) / (needed - later) < 1.2
    assert training_bytes(head, 3, 2, rollout, acceptance, True) < needed
    assert training_bytes(head, 3, 2, rollout, acceptance, width=2) < needed


def test_a_step_that_cannot_fit_is_refused(features, monkeypatch):
    head, _ = features
    module = training_of(head)
    module.trainer = Mock(
        datamodule=Mock(batch_size=4, cache=Mock(settings=Mock(branches=2))), num_devices=1, precision="32-true"
    )
    module._check_memory()
    monkeypatch.setattr("training.draft.free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match=r"a step of 4 samples takes about .* GB free; lower --data.batch_size"):
        module._check_memory()


def test_a_loss_that_is_not_finite_names_the_batch(features):
    head, batch = features
    module = training_of(head)
    with pytest.raises(ValueError, match=r"loss is nan at step 0, samples \[7, 3\]; lower model.learning_rate"):
        module.training_step({**batch, "hidden": batch["hidden"] * torch.nan, "index": torch.tensor([7, 3])}, 0)


def test_losses_against_their_definitions(rng, distributions):
    draft, target = distributions(rng, 3, 7), distributions(rng, 3, 7)
    expected = -(target * draft.log()).sum(-1)
    torch.testing.assert_close(soft_cross_entropy(draft.log(), target), expected)
    torch.testing.assert_close(acceptance_mass(draft, target), 1 - 0.5 * (draft - target).abs().sum(-1))
    mask = torch.tensor([True, False, True])
    torch.testing.assert_close(masked_mean(expected, mask), expected[mask].mean())


def test_noise_is_uniform_and_a_function_of_the_sample(features, rng):
    head, _ = features
    module = training_of(head)
    hidden, seen = 3 * torch.randn(3, 2, 40, 33, generator=rng), torch.ones(3, 2, 40, dtype=torch.bool)
    seen[1, :, :15] = False
    noise = module._noise(torch.tensor([5, 9, 2]), hidden, seen)
    assert torch.equal(noise[1:2], module._noise(torch.tensor([9]), hidden[1:2], seen[1:2]))
    assert not torch.equal(noise[0], module._noise(torch.tensor([6]), hidden[:1], seen[:1])[0])
    for one, states, held in zip(noise, hidden, seen, strict=True):
        unit = one / states[held].std(correction=0)
        assert unit.abs().max() <= 1 and unit.abs().max() > 0.99
        assert abs(unit.mean()) < 5 / math.sqrt(3 * unit.numel())  # five standard deviations of a mean
        assert abs(unit.var() - 1 / 3) < 5 * math.sqrt(4 / 45 / unit.numel())  # and of a variance
        pairs = unit.flatten()[:-1] * unit.flatten()[1:]
        assert abs(pairs.mean()) < 5 / 3 / math.sqrt(pairs.numel())  # neighbours share bits, not chance
