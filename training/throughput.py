"""`coolsd throughput`: what extraction and the loader add to the passes they feed, as ratios measured in one run.

Knows a target, a dataset and a head.  Whatever is compared is timed in turn, so that drift of the machine hits all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch

from coolsd.cli import argument_parser
from coolsd.results import environment
from coolsd.targets import load_target
from data.features import FeatureCache, FeatureCacheWriter
from data.loader import FeatureModule
from data.states import Selection, States, read_batch
from training.draft import DraftTraining


def timed(work: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def throughput(
    target: str = "emoji/target",
    samples: int = 256,
    extraction_batch: int = 16,
    training_batch: int = 8,
    workers: int = 2,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, float]:
    """Print tokens/s of extraction and of the target's bare pass, and samples/s of the loader and of a training step.

    Args:
        target: Checkpoint folder of the target, or its name under checkpoints/.
        samples: Embedded emoji images to extract, in shards of 64.
        extraction_batch: Samples a pass of the target.
        training_batch: Samples a step of the head.
        workers: Of the loader, which reads from disk.
        device: cpu, cuda, mps or auto.
        dtype: Of the target: float32, bfloat16, float16 or auto.
    """
    model = load_target(target, device, dtype)
    selection, states = Selection(None, samples), States(model)
    settings = states.settings(selection, 64, "bfloat16")
    tokens = settings.branches * settings.image_tokens
    with tempfile.TemporaryDirectory() as folder:
        writer = FeatureCacheWriter(Path(folder) / "cache", settings)
        whole, reading, bare = [], [], []
        for shard in range(settings.shards):
            indices, pending = settings.samples_of(shard), []
            for first in range(0, len(indices), extraction_batch):
                batch = indices[first : first + extraction_batch]

                def extract(batch: range = batch, pending: list[Any] = pending) -> None:
                    images, captions, kept, _ = read_batch(selection, batch, images=True)
                    pending += states(images, captions, kept)

                images, captions, _, _ = read_batch(selection, batch, images=True)
                assert images is not None
                with torch.no_grad():
                    prompt, drawn = model.encode(captions, True), model.encode_images(images.to(model.device))
                    if not whole:
                        model.forced(prompt, drawn)  # warm up
                    bare.append(timed(lambda p=prompt, t=drawn: model.forced(p, t), model.device))
                    pixels = images.to(model.device)
                    reading.append(timed(lambda x=pixels: model.encode_images(x), model.device))
                whole.append(timed(extract, model.device))
            whole.append(timed(lambda s=shard, p=pending: writer.write_shard(s, p), model.device))
        writer.write_ends(states.ends)
        cache = writer.finish()
        extraction, passes, encoding = (sum(times) / samples for times in (whole, bare, reading))
        found = {
            "extraction_tokens_per_s": tokens / extraction,
            "bare_tokens_per_s": tokens / passes,
            "extraction_over_bare": passes / extraction,
            "extraction_over_bare_and_encoding": (passes + encoding) / extraction,
            **_loading(cache, training_batch, workers, model.device),
        }
    made = environment(model.device, model.dtype)
    for name, value in found.items():
        print(f"{name:<36} {value:,.2f}" if value < 100 else f"{name:<36} {value:,.0f}")
    print(f"{samples} samples; {made['device']}, {made['cpu']}, {made['threads']} threads, {made['dtype']}")
    return found


class _Steps(L.Callback):
    """Seconds of each training step, the loader's share left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.began)


def _loading(cache: FeatureCache, batch_size: int, workers: int, device: torch.device) -> dict[str, float]:
    """The loader alone, from disk, and a training step of an EAGLE head alone."""
    data = FeatureModule(str(cache.folder), batch_size, in_memory=False, workers=workers)
    data.setup("fit")
    loader = data.train_dataloader()
    list(loader)  # start the workers
    epochs = 4
    loading = timed(lambda: [list(loader) for _ in range(epochs)], device) / (epochs * len(loader) * batch_size)
    steps = _Steps()
    options: dict[str, Any] = {
        "accelerator": device.type, "devices": 1, "max_steps": 12, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [steps], "limit_val_batches": 0,
        "use_distributed_sampler": False, "default_root_dir": str(cache.folder.parent / "run"),
    }  # fmt: skip
    guidance = 2.0 if cache.settings.branches == 2 else 1.0
    L.Trainer(**options).fit(DraftTraining(guidance=guidance), FeatureModule(str(cache.folder), batch_size))
    step = median(steps.seconds[2:]) / batch_size
    return {
        "loader_samples_per_s": 1 / loading,
        "step_samples_per_s": 1 / step,
        "loader_over_step": step / loading,
    }


def main(args: list[str]) -> None:
    parser = argument_parser("throughput", "What extraction and the loader add to the passes they feed.")
    parser.add_function_arguments(throughput)
    options = parser.instantiate(parser.parse_args(args)).as_dict()
    options.pop("config")
    throughput(**options)
