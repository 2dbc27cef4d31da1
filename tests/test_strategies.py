"""Other strategies than one process: the overlay recipes change where a draft head is trained, not what comes out."""

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coolsd.checkpoint import save_checkpoint, sha256
from coolsd.cli import main
from coolsd.heads.checkpoint import save_head
from coolsd.heads.eagle import EagleConfig, make_head
from coolsd.transformer import grid_rope
from data.features import CachedSample, CacheSettings, FeatureCache, FeatureCacheWriter

ROOT = Path(__file__).resolve().parent.parent
OVERLAY = ROOT / "recipes" / "strategies" / "cpu_deepspeed.yaml"
RECIPE = """
model: {class_path: training.draft.DraftTraining, init_args: {warmup_steps: 2, intermediate_size: 32}}
data: {class_path: data.loader.FeatureModule, init_args: {cache: CACHE, held_out: 0.2}}
trainer: {accelerator: cpu, max_epochs: 10, log_every_n_steps: 2, enable_progress_bar: false,
  enable_model_summary: false}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """20 made-up samples of 16 tokens."""
    folder, rng = tmp_path_factory.mktemp("features") / "cache", torch.Generator().manual_seed(0)
    settings = CacheSettings("toy@1", "numbers", 32, 3, 16, 7, 1, samples=20, samples_per_shard=20, dtype="float32")
    writer = FeatureCacheWriter(folder, settings)
    samples = []
    for i in range(20):
        tokens = torch.cat([torch.full((3,), -1), torch.randint(0, 7, (16,), generator=rng)])
        samples.append(CachedSample(f"caption {i}", (torch.randn(19, 32, generator=rng),), (tokens,)))
    writer.write_shard(0, samples)
    matrix = torch.randn(7, 32, generator=rng)
    writer.write_ends({"embedding": matrix, "lm_head": matrix * 0.3, "rope": grid_rope(3, 4, 4, 16)})
    writer.finish()
    return folder


def trained(cache, folder, batch_size, *more, run=main):
    """Weights of a head after the recipe's epochs, as `coolsd export` writes them; run(arguments) gives 0 = fine."""
    (folder / "recipe.yaml").write_text(RECIPE.replace("CACHE", str(cache)))
    where = ["--data.batch_size", str(batch_size), "--out", str(folder / "run")]
    assert run(["fit", "--config", str(folder / "recipe.yaml"), *where, *more]) == 0
    assert main(["export", str(folder / "run"), "--out", str(folder / "head"), "--trust", "true"]) == 0
    return load_file(folder / "head" / "model.safetensors")


def scalars(run, name):
    """What TensorBoard has of it."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return [event.value for event in events.Scalars(name)]


def losses(run):
    """The loss of every second step, of all processes."""
    return scalars(run, "train/loss")


def under(name, tree):
    """All tensors that are called so, anywhere in nested lists and dicts."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key == name:
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from under(name, value)


def in_processes(arguments):
    """Lightning starts the other processes by running the command line again, so this one needs its own."""
    return subprocess.run([sys.executable, "-m", "coolsd.cli", *arguments], cwd=ROOT, timeout=1200).returncode


@pytest.fixture(scope="module")
def plain(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, trained(cache, folder, 8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "ddp"])
def test_two_processes_train_the_head_that_one_trains(cache, plain, tmp_path, strategy):
    """The noise on the input states included: it is a function of the sample, not of the process. Stage 3 with the
    settings for GPUs, offloading included."""
    more = ["--config", str(OVERLAY if strategy != "ddp" else OVERLAY.with_name("ddp.yaml"))]
    if strategy == "zero3":
        recipe = yaml.safe_load(OVERLAY.with_name("deepspeed_zero3_offload.yaml").read_text())
        config = recipe["trainer"]["strategy"]["init_args"]["config"]
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # shares out small weights, too
        (tmp_path / "zero3.json").write_text(json.dumps(config))
        more += ["--trainer.strategy.config", str(tmp_path / "zero3.json")]
    more += ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    shared, expected = trained(cache, tmp_path, 4, *more, run=in_processes), plain[1]
    if strategy != "ddp":
        assert list((tmp_path / "run" / "checkpoints").glob("*.ckpt/checkpoint/*_optim_states.pt"))  # DeepSpeed's
    assert shared.keys() == expected.keys()
    ours, theirs = losses(tmp_path / "run"), losses(plain[0] / "run")
    assert len(ours) == 10 and ours == pytest.approx(theirs, rel=1e-4)
    assert abs(theirs[0] - theirs[-1]) > 0.01 * abs(theirs[0])  # it learns
    if strategy == "zero3":  # what fit exports itself, of shared-out weights, is what the checkpoint holds
        own = load_file(tmp_path / "run" / "export" / "draft" / "model.safetensors")
        assert own.keys() == shared.keys() and all(torch.equal(own[name], shared[name]) for name in own)
    for name in expected:  # Adam divides by small second moments: rounding shows in the fourth digit of a step of 1e-3
        torch.testing.assert_close(shared[name], expected[name], atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_deepspeed_trains_in_bfloat16_as_the_large_recipes_do(cache, plain, tmp_path):
    """Its weights are then bfloat16 themselves, without autocast; a number has 8 bits of precision."""
    more = ["--config", str(OVERLAY), "--trainer.precision", "bf16-mixed"]
    weights = trained(cache, tmp_path, 8, *more, run=in_processes)
    ours, theirs = losses(tmp_path / "run"), losses(plain[0] / "run")
    assert ours != theirs and ours == pytest.approx(theirs, rel=0.03)
    for name, weight in plain[1].items():
        torch.testing.assert_close(weights[name].float(), weight, atol=5e-3, rtol=2e-2)


def test_sharded_state_is_unpickled_only_when_trusted(tmp_path, capfd):
    (tmp_path / "run" / "checkpoints" / "last.ckpt" / "checkpoint").mkdir(parents=True)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "head")]) == 2
    assert "--trust" in capfd.readouterr().err


def test_a_run_says_how_fast_it_was(plain):
    rates = scalars(plain[0] / "run", "train/tokens_per_s")
    assert len(rates) == 10 and all(rate > 0 for rate in rates)


def test_a_run_says_what_it_was_made_of(cache, plain):
    folder, _ = plain
    about = json.loads((folder / "run" / "run.json").read_text())
    assert about["features"]["target"] == "toy@1" and about["features"]["kept"] == 20
    assert about["features"]["sha256"] == sha256(cache / "manifest.json")
    assert about["environment"]["versions"]["torch"] == torch.__version__
    assert about["source"] is None or len(about["source"]["commit"]) == 40


def test_a_look_at_a_run_leaves_its_config(plain):
    folder, _ = plain
    before = (folder / "run" / "config.yaml").read_text()
    checkpoint = str(next((folder / "run").glob("**/*.ckpt")))
    for verb in ("validate", "test"):
        look = [verb, "--config", str(folder / "recipe.yaml"), "--out", str(folder / "run"), "--ckpt_path", checkpoint]
        assert main([*look, "--data.batch_size", "4"]) == 0
    assert (folder / "run" / "config.yaml").read_text() == before


def test_a_look_at_a_head_of_another_shape_is_one_sentence(plain, tmp_path, capfd):
    folder, _ = plain
    checkpoint = str(next((folder / "run").glob("**/*.ckpt")))
    look = ["validate", "--config", str(folder / "recipe.yaml"), "--out", str(tmp_path), "--ckpt_path", checkpoint]
    assert main([*look, "--data.batch_size", "4", "--model.intermediate_size", "64"]) == 2
    assert "the checkpoint's head has intermediate_size 32 (here 64); pass" in capfd.readouterr().err


def test_a_second_run_in_the_same_folder_goes_on(plain):
    folder, _ = plain
    again = ["fit", "--config", str(folder / "recipe.yaml"), "--out", str(folder / "run"), "--data.batch_size", "8"]
    assert (
        main([*again, "--trainer.max_epochs", "11", "--ckpt_path", str(next((folder / "run").glob("**/*.ckpt")))]) == 0
    )
    assert (folder / "run" / "config.yaml").read_text().count("max_epochs: 11") == 1
    assert sorted((folder / "run" / "checkpoints").glob("epoch=10*"))


def test_a_fit_starts_from_a_trained_head(plain, tmp_path, capfd):
    (folder, weights), still = plain, ["--model.learning_rate", "0"]
    recipe = ["fit", "--config", str(folder / "recipe.yaml"), "--data.batch_size", "8", "--out", str(tmp_path / "run")]
    assert main([*recipe, "--model.start_from", str(folder / "head"), *still]) == 0
    again = load_file(tmp_path / "run" / "export" / "draft" / "model.safetensors")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    assert main([*recipe, "--model.start_from", str(folder / "head"), *still, "--model.intermediate_size", "64"]) == 0
    wide = load_file(tmp_path / "run" / "export" / "draft" / "model.safetensors")
    down = next(name for name in weights if name.endswith("down.weight"))
    assert torch.equal(wide[down][:, :32], weights[down]) and wide[down].shape[1] == 64 and not wide[down][:, 32:].any()
    config = json.loads((folder / "head" / "config.json").read_text())
    save_checkpoint(tmp_path / "stranger", {**config, "target": "toy@2"}, weights)
    assert main([*recipe, "--model.start_from", str(tmp_path / "stranger")]) == 2
    assert "was trained on toy@2, but the target is toy@1" in capfd.readouterr().err


def test_a_head_is_exported_in_half_the_bytes(plain, tmp_path):
    found = []
    for dtype in ("float32", "bfloat16"):
        assert main(["export", str(plain[0] / "run"), "--out", str(tmp_path / dtype), "--dtype", dtype]) == 0
        found.append(load_file(tmp_path / dtype / "model.safetensors"))
    whole, half = found
    assert half.keys() == whole.keys() and all(torch.equal(half[name], whole[name].bfloat16()) for name in half)


def test_what_was_made_for_another_cache_is_refused(cache, plain, tmp_path, capfd):
    """A head or a checkpoint of other layers, of another caption context or of another target."""
    folder, weights = plain
    recipe = ["fit", "--config", str(folder / "recipe.yaml"), "--data.batch_size", "8", "--out", str(tmp_path / "run")]
    config = json.loads((folder / "head" / "config.json").read_text())
    save_checkpoint(tmp_path / "context", {**config, "context": True}, weights)
    ends = FeatureCache(cache).ends()
    save_head(make_head(replace(EagleConfig.from_json(config), layers=(1, 2)), ends), tmp_path / "layers")
    for name, said in (("context", "context True, but"), ("layers", "layers (1, 2), but")):
        assert main([*recipe, "--model.start_from", str(tmp_path / name)]) == 2
        assert said in capfd.readouterr().err
    checkpoint = torch.load(next((folder / "run").glob("**/*.ckpt")), weights_only=True)
    for name, change in (("target", {"eagle": {**checkpoint["eagle"], "target": "toy@2"}}), ("nothing", {"eagle": 0})):
        changed = {key: value for key, value in (checkpoint | change).items() if value != 0}
        torch.save(changed, tmp_path / f"{name}.ckpt")
        assert main([*recipe, "--ckpt_path", str(tmp_path / f"{name}.ckpt")]) == 2
        assert {"target": "target 'toy@2', but", "nothing": "holds no draft head"}[name] in capfd.readouterr().err


def test_accumulated_batches_are_one_larger_batch(cache, plain, tmp_path):
    shared, expected = trained(cache, tmp_path, 4, "--trainer.accumulate_grad_batches", "2"), plain[1]
    for name in expected:
        torch.testing.assert_close(shared[name], expected[name], atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_averages_and_accumulated_batches_under_deepspeed(cache, tmp_path):
    """Two batches a step, weights averaged, gone on from a checkpoint: as without DeepSpeed, gradients' size included;
    and its sharded checkpoint exports and validates the average, too."""
    recipe, found, squares, seen = tmp_path / "recipe.yaml", {}, {}, {}
    recipe.write_text(RECIPE.replace("CACHE", str(cache)))
    for name, where in (("plain", []), ("zero", ["--config", str(OVERLAY)])):
        out, checkpoints = tmp_path / name, tmp_path / name / "checkpoints"
        common = ["--config", str(recipe), *where, *AVERAGE, "--data.batch_size", "4"]
        fit = ["fit", *common, "--out", str(out), "--trainer.accumulate_grad_batches", "2", "--trainer.max_epochs"]
        half, end = (str(checkpoints / f"epoch={epoch - 1}-step={epoch * 2}.ckpt") for epoch in (5, 10))
        look = ["validate", *common, "--ckpt_path", end, "--out", str(tmp_path / f"{name}-look")]
        run = in_one_process if where else lambda *commands: all(main(command) == 0 for command in commands)
        assert run([*fit, "5"], [*fit, "10", "--ckpt_path", half], look)
        assert main(["export", str(out), "--out", str(out / "head"), "--trust", "true"]) == 0
        found[name], own = (load_file(out / head / "model.safetensors") for head in ("head", "export/draft"))
        assert all(torch.equal(own[key], weight) for key, weight in found[name].items())
        states = next(Path(end).rglob("*_optim_states.pt")) if where else end
        squares[name] = sum(float(each.sum()) for each in under("exp_avg_sq", torch.load(states, weights_only=False)))
        seen[name] = scalars(tmp_path / f"{name}-look", "val/loss")
    assert squares["zero"] == pytest.approx(squares["plain"], rel=1e-3) and squares["plain"] > 0
    assert len(seen["plain"]) == 1 and seen["zero"] == pytest.approx(seen["plain"], rel=1e-4)
    for key, weight in found["plain"].items():
        torch.testing.assert_close(found["zero"][key], weight, atol=2e-4, rtol=1e-3)


def in_one_process(*commands):
    """Whether all commands, one after the other in a process of their own, end well."""
    program = "import json, sys; from coolsd.cli import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", program, json.dumps(commands)], cwd=ROOT, timeout=600)
    return done.returncode == 0


@pytest.fixture(scope="module")
def endless(cache, tmp_path_factory):
    """A command but for its --out: 60 steps, 4 an epoch, a checkpoint every 7; and the weights it ends at."""
    folder = tmp_path_factory.mktemp("endless")
    (folder / "recipe.yaml").write_text(RECIPE.replace("CACHE", str(cache)))
    saver = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    command = ["fit", "--config", str(folder / "recipe.yaml"), "--data.batch_size", "4", "--trainer.max_epochs", "-1"]
    command += ["--trainer.max_steps", "60", *saver, "--trainer.callbacks.every_n_train_steps=7"]
    assert main([*command, "--out", str(folder / "straight")]) == 0
    return command, load_file(folder / "straight" / "export" / "draft" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_fit_goes_on_to_equal_weights(endless, tmp_path, workers):
    """SIGKILL somewhere behind the first checkpoint, then the same command with --ckpt_path last: as if it never was,
    in one process and without workers."""
    command, expected = endless
    command = [*command, "--data.workers", str(workers), "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "coolsd.cli", *command], cwd=ROOT)
    last = tmp_path / "checkpoints" / "last.ckpt"
    while process.poll() is None and not last.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 0 < torch.load(last, weights_only=True)["global_step"] < 60
    assert main([*command, "--ckpt_path", "last"]) == 0
    weights = load_file(tmp_path / "export" / "draft" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


AVERAGE = ["--trainer.callbacks+=lightning.pytorch.callbacks.EMAWeightAveraging", "--trainer.callbacks.decay=0.5"]


def test_averaged_weights_are_exported(cache, plain, tmp_path):
    """Lightning's own callback: what `fit` exports at its end is the average, not the last step's weights."""
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("CACHE", str(cache)))
    command = [
        "fit",
        "--config",
        str(tmp_path / "recipe.yaml"),
        "--data.batch_size",
        "8",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*command, *AVERAGE]) == 0
    found, last = load_file(tmp_path / "run" / "export" / "draft" / "model.safetensors"), plain[1]
    name = next(name for name in last if name.endswith("down.weight"))
    assert 0 < (found[name] - last[name]).abs().max() < 0.05  # close to the weights it averages, and not they
