"""`coolsd throughput`: what extraction, the loader and Lightning add to the passes they feed, as ratios measured in one
run; and one optimiser step of a head of any shape, for `coolsd bench`.

Knows a target, a dataset and a head.  Whatever is compared is timed in turn, so that drift of the machine hits all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor

from coolsd.cli import argument_parser, call
from coolsd.heads.eagle import EagleConfig
from coolsd.results import environment
from coolsd.targets import load_target
from data.features import CachedSample, CacheSettings, FeatureCache, FeatureCacheWriter
from data.loader import Batch, FeatureModule
from data.states import Selection, States, read_batch
from training.draft import DraftTraining
from training.losses import feature_loss, soft_cross_entropy
from training.memory import training_bytes


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def timed(work: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
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
    """Print tokens/s of extraction and of the target's bare pass, and samples/s of the loader, of a training step
    and of the head's bare passes forward and backward, on synthetic states.

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
    samples = len(selection)
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
    """Seconds of each training step, the loader's share left out, and of a bare one between any two of them."""

    def __init__(self, bare: bool = False) -> None:
        self.seconds: list[float] = []
        self.bare: list[float] | None = [] if bare else None

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        assert isinstance(module, DraftTraining)
        synchronize(module.device)
        self.seconds.append(time.perf_counter() - self.began)
        if self.bare is not None:
            self.bare.append(timed(partial(bare_step, module, batch), module.device))


def bare_step(module: DraftTraining, batch: Batch) -> None:
    """EAGLE-1's loss and its gradients on random states of a batch's shape: no loader, noise, optimizer or measure."""
    head, slots = module.head, batch["token_ids"].shape[-1] - 1
    assert head is not None
    rows, drafts = batch["token_ids"].shape[:2].numel(), head.config.prompt_slots - 1
    tokens = torch.randint(head.config.codebook_size, (rows, slots), device=module.device)
    hidden, goal = torch.randn(2, rows, slots, head.config.transformer.hidden_size, device=module.device)
    context = torch.zeros_like(hidden) if head.config.context else None
    predicted = head(tokens, hidden, head.rope[None, 1 : 1 + slots], context=context)[:, drafts:]
    with torch.no_grad():
        probs = head.logits(goal[:, drafts:]).softmax(-1)
    loss = feature_loss(predicted, goal[:, drafts:]) + 0.1 * soft_cross_entropy(head.logits(predicted), probs)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    torch.autograd.grad(loss.mean(), weights, allow_unused=True)


def _loading(cache: FeatureCache, batch_size: int, workers: int, device: torch.device) -> dict[str, float]:
    """The loader alone, from disk, and a training step of an EAGLE head alone."""
    data = FeatureModule(str(cache.folder), batch_size, in_memory=False, workers=workers)
    data.setup("fit")
    loader = data.train_dataloader()
    list(loader)  # start the workers
    epochs = 4
    loading = timed(lambda: [list(loader) for _ in range(epochs)], device) / (epochs * len(loader) * batch_size)
    steps = _Steps(bare=True)
    module, data = DraftTraining(guidance=_guidance(cache.settings)), FeatureModule(str(cache.folder), batch_size)
    _fit(module, data, steps, 12, device)
    assert steps.bare is not None
    step, bare = median(steps.seconds[2:]) / batch_size, median(steps.bare[2:]) / batch_size
    return {
        "loader_samples_per_s": 1 / loading,
        "step_samples_per_s": 1 / step,
        "bare_step_samples_per_s": 1 / bare,
        "loader_over_step": step / loading,
        "step_over_bare": bare / step,
    }


def _guidance(settings: CacheSettings) -> float:
    return 2.0 if settings.branches == 2 else 1.0


def _fit(
    module: DraftTraining, data: FeatureModule, steps: _Steps, count: int, device: torch.device, **more: Any
) -> None:
    options: dict[str, Any] = {
        "accelerator": device.type, "devices": 1, "max_steps": count, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [steps], "limit_val_batches": 0,
        "use_distributed_sampler": False, "default_root_dir": str(data.folder.parent / "run"), **more,
    }  # fmt: skip
    L.Trainer(**options).fit(module, data)


def optimizer_step(
    head: EagleConfig, ends: Mapping[str, Tensor], branches: int, samples: int, device: torch.device, precision: str
) -> dict[str, float]:
    """One step of a head of this shape on a synthetic cache of so many samples, as `coolsd bench` prints it: the third
    on a GPU; the first on a CPU, which warms up in no time and may take minutes.

    ends: the target's. precision: Lightning's. Returns milliseconds, and bytes by the shapes (`training_bytes`).
    """
    shape, size = head.transformer, head.transformer.hidden_size
    settings = CacheSettings(
        "random", "random", size, head.prompt_slots, head.image_tokens, head.codebook_size, branches, samples, samples,
        context=head.context, layers=head.layers,
    )  # fmt: skip
    slots = head.prompt_slots + head.image_tokens
    drawn = torch.randint(head.codebook_size, (samples, slots))
    drawn[:, : head.prompt_slots] = -1
    more = {
        "context": torch.randn(branches, head.image_tokens + 1, size) if head.context else None,
        "layers": (torch.randn(slots, len(head.layers) * size),) * branches if head.layers else (),
    }
    with tempfile.TemporaryDirectory() as folder:
        writer = FeatureCacheWriter(Path(folder) / "cache", settings)
        states = [tuple(torch.randn(slots, size) for _ in range(branches)) for _ in drawn]
        made = zip(states, drawn, strict=True)
        writer.write_shard(0, [CachedSample("", of, (ids,) * branches, **more) for of, ids in made])  # type: ignore[arg-type]
        writer.write_ends({name: tensor.detach().cpu() for name, tensor in ends.items()})
        writer.finish()
        module = DraftTraining(
            shape.layers, shape.intermediate_size, guidance=_guidance(settings), acceptance_weight=5.0
        )
        steps, data = _Steps(), FeatureModule(str(Path(folder) / "cache"), samples, held_out=0)
        _fit(module, data, steps, 1 if device.type == "cpu" else 3, device, precision=precision)
        assert module.head is not None
        width = 4 if precision.startswith("32") else 2
        needed = training_bytes(module.head, samples, branches, acceptance=True, width=width)
    return {"milliseconds": 1000 * steps.seconds[-1], "bytes": needed}


def main(args: list[str]) -> None:
    call(throughput, argument_parser("throughput", "What extraction and the loader add to the passes they feed."), args)
