"""DeepSpeed ZeRO-2 on CPU: the overlay recipe changes where a draft head is trained, not what comes out."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coolsd.transformer import grid_rope
from data.features import CachedSample, CacheSettings, FeatureCacheWriter

ROOT = Path(__file__).resolve().parent.parent
OVERLAY = ROOT / "recipes" / "emoji" / "deepspeed-cpu.yaml"
RECIPE = """
model: {class_path: training.draft.DraftTraining, init_args: {noise: 0.0, warmup_steps: 2, intermediate_size: 32}}
data: {class_path: data.loader.FeatureModule, init_args: {cache: CACHE, held_out: 0.2}}
trainer: {accelerator: cpu, max_epochs: 2, enable_progress_bar: false, enable_model_summary: false}
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


def coolsd(*arguments):
    command = [sys.executable, "-m", "coolsd.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def trained(cache, folder, batch_size, *more):
    """Weights of a head after two epochs, as `coolsd export` writes them."""
    (folder / "recipe.yaml").write_text(RECIPE.replace("CACHE", str(cache)))
    coolsd("fit", "--config", folder / "recipe.yaml", "--data.batch_size", batch_size, "--out", folder / "run", *more)
    coolsd("export", folder / "run", "--out", folder / "head", "--trust", "true")
    return load_file(folder / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def plain(cache, tmp_path_factory):
    return trained(cache, tmp_path_factory.mktemp("plain"), 8)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_zero_2_trains_the_head_that_one_process_trains(cache, plain, tmp_path, processes):
    more = ["--config", OVERLAY, "--trainer.devices", processes]
    sharded = trained(cache, tmp_path, 8 // processes, *more)
    assert list((tmp_path / "run" / "checkpoints").glob("*.ckpt/checkpoint/*_optim_states.pt"))  # really DeepSpeed's
    assert sharded.keys() == plain.keys()
    for name in plain:  # Adam divides by small second moments: rounding shows in the fourth digit of a step of 1e-3
        torch.testing.assert_close(sharded[name], plain[name], atol=2e-4, rtol=1e-3)
