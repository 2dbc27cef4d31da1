"""Extraction: captioned images -> the target's hidden states in a feature cache.  Lightning's predict does the running.

Knows a target, a dataset and the cache's writer; knows no draft head.  Which process extracts which shard:

    shard        0        1        2        3       each covers fixed samples [i * S, (i + 1) * S)
    process      0        1        0        1       (of the shards not yet finished)
    batches    b b b    b b b    b b b    b -       "-" = a repeated batch whose output is discarded, so that all
                                                    processes run equally many passes (ZeRO-3 gathers in each)

So shards are equal however many processes write them (another batch_size may round otherwise), and a run resumes with
another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from coolsd.sampling import Sampling
from coolsd.targets import load_target
from data.features import CachedSample, CacheSettings, FeatureCacheWriter, Skipped
from data.loader import EpochSampler
from data.states import Selection, States, read_batch
from training.callbacks import Throughput
from training.strategies import make_shardable


@dataclass(frozen=True)
class Pass:
    """Samples `indices` of one shard. shard None: a repeated batch, to be discarded. last: it completes its shard."""

    shard: int | None
    indices: tuple[int, ...]
    last: bool


class CaptionedBatch:
    """images uint8 [B, 3, h, w], or None where the target draws them; B captions; their indices; what was skipped.

    No dataclass: Lightning would look for tensors in it, and refuse frozen ones.
    """

    def __init__(
        self, of: Pass, images: Tensor | None, captions: tuple[str, ...], kept: tuple[int, ...],
        skipped: tuple[Skipped, ...],
    ) -> None:  # fmt: skip
        self.of, self.images, self.captions, self.kept, self.skipped = of, images, captions, kept, skipped


def plan(unfinished: Sequence[int], settings: CacheSettings, batch_size: int, rank: int, world_size: int) -> list[Pass]:
    """Every pass of one process; no batch crosses from one shard to the next."""

    def passes(shards: Sequence[int]) -> Iterator[Pass]:
        for shard in shards:
            samples = settings.samples_of(shard)
            for start in range(0, len(samples), batch_size):
                yield Pass(shard, tuple(samples[start : start + batch_size]), start + batch_size >= len(samples))

    everyone = [list(passes(unfinished[r::world_size])) for r in range(world_size)]
    repeated = [Pass(None, everyone[0][0].indices, False)] if unfinished else []
    return everyone[rank] + repeated * (max(map(len, everyone)) - len(everyone[rank]))


class CaptionedImages(L.LightningDataModule):
    """The captioned images to extract from.

    Args:
        dataset: A map-style dataset of {"image": uint8 [3, h, w], "caption": str}, named by class_path in a recipe, as
            data.captions.ImageCaptionPairs; null takes the training split of the embedded emojis.
        limit: Use only so many samples of the dataset, chosen at random but always the same; null uses all.
        batch_size: Samples (all their branches) a pass.
        workers: Processes that read images; 0 reads them in the extracting process.
    """

    def __init__(
        self, dataset: Dataset | None = None, limit: int | None = None, batch_size: int = 16, workers: int = 0
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but must be >= 1")
        self.selection, self.batch_size, self.workers = Selection(dataset, limit), batch_size, workers

    def predict_dataloader(self) -> DataLoader:
        module = self.trainer.lightning_module
        assert isinstance(module, Extraction)
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        passes = plan(module.unfinished(), module.settings, self.batch_size, rank, world_size)
        batches = _Batches(self.selection, passes, images=module.source == "images")
        order = EpochSampler(len(passes), 0, 0, 1, shuffle=False)  # the passes are this process's own already
        streamed = getattr(self.selection.dataset, "ordered", False)  # `datasets` shares a stream out between workers
        workers = min(self.workers, 1) if streamed else self.workers
        return DataLoader(batches, batch_size=None, sampler=order, num_workers=workers)

    def transfer_batch_to_device(
        self, batch: CaptionedBatch, device: torch.device, dataloader_idx: int
    ) -> CaptionedBatch:
        return batch  # the target's own methods move what they need


class _Batches(Dataset):
    def __init__(self, selection: Selection, passes: Sequence[Pass], images: bool) -> None:
        self.selection, self.passes, self.images = selection, passes, images

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, index: int) -> CaptionedBatch:
        return CaptionedBatch(self.passes[index], *read_batch(self.selection, self.passes[index].indices, self.images))


class Extraction(L.LightningModule):
    """One teacher-forced pass of a target over each captioned image; its hidden states go to a feature cache.

    Args:
        cache: Folder to write, or to continue.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        source: "images" encodes the dataset's images; "self-distill" lets the target draw images for its captions.
        guidance: Keep the unconditional branch too, as a head that decodes with guidance needs.
        null_fraction: Without guidance, this share of the samples gets the null caption (LANTERN: 0.1).
        sampling: How the target draws its images for "self-distill"; its guidance may differ from decoding's.
        seed: Of those images, image i being a function of (caption, seed, i), and of which captions are null.
        dtype: Of the target's weights; auto is bfloat16 where the hardware has it.
        cache_dtype: Of the stored hidden states; int8 and float8 (scaled per token and channel) take half of bfloat16.
        samples_per_shard: A finished shard survives an interruption.
        layers: Layers of the target to keep beside its last states, low to high, for a head that reads several, as
            EAGLE-3's does; each takes as much room as those.
        max_bad_fraction: Stop where more of the items cannot be used; fewer are skipped and listed in skipped.jsonl.
        dry_run: Say how much there is to extract and how large it will be, and stop.
    """

    def __init__(
        self,
        cache: str,
        target: str = "checkpoints/emoji/target",
        source: Literal["images", "self-distill"] = "images",
        guidance: bool = True,
        null_fraction: float = 0.0,
        sampling: Sampling | None = None,
        seed: int = 0,
        dtype: str = "auto",
        cache_dtype: Literal["bfloat16", "float16", "float32", "int8", "float8"] = "bfloat16",
        samples_per_shard: int = 64,
        layers: list[int] | None = None,
        max_bad_fraction: float = 0.01,
        dry_run: bool = False,
    ) -> None:
        super().__init__()
        if samples_per_shard < 1:
            raise ValueError(f"samples_per_shard is {samples_per_shard}, but must be >= 1")
        if not 0 <= max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction is {max_bad_fraction}, but must be in [0, 1]")
        self.folder, self.target_folder, self.source = Path(cache), target, source
        self.how = {"guidance": guidance, "null_fraction": null_fraction, "sampling": sampling, "seed": seed,
                    "layers": layers or ()}  # fmt: skip
        self.target_dtype, self.cache_dtype, self.samples_per_shard = dtype, cache_dtype, samples_per_shard
        self.max_bad_fraction, self.dry_run = max_bad_fraction, dry_run
        self.pending: list[CachedSample] = []
        self.skipped: list[Skipped] = []  # of the pending shard
        self.bad: list[Skipped] = []  # of all shards of this process

    def setup(self, stage: str) -> None:
        """Load the target and open the cache; raises ValueError where the folder was begun with other settings."""
        if stage != "predict":
            raise ValueError("extraction is a pass without training; run coolsd extract")
        selection = self.trainer.datamodule.selection  # type: ignore[attr-defined]
        sharded = getattr(self.trainer.strategy, "zero_stage_3", False)  # then DeepSpeed moves each process's share
        device = "cpu" if sharded else str(self.trainer.strategy.root_device)
        self.target = load_target(self.target_folder, device, self.target_dtype)
        self.states = States(self.target, self.source, **self.how)
        self.settings = self.states.settings(selection, self.samples_per_shard, self.cache_dtype)
        each, samples = self.settings.bytes_per_sample, self.settings.samples
        if self.trainer.is_global_zero:
            print(
                f"{samples} samples of up to {each / 1e6:.2f} MB: up to {samples * each / 1e9:.2f} GB in "
                f"{self.settings.shards} shards of {self.cache_dtype}"
            )
        if self.dry_run:
            raise SystemExit(0)
        self.writer = FeatureCacheWriter(self.folder, self.settings)
        if self.trainer.is_global_zero:
            self.writer.lock()
        if sharded:
            self._shard()

    def _shard(self) -> None:
        """Share out the weights one by one: DeepSpeed's engine would first move all of them to every device."""
        import deepspeed

        make_shardable(self.target)
        config: Any = self.trainer.strategy.config  # type: ignore[attr-defined]
        if self.target.dtype != torch.float32:  # else DeepSpeed makes them float32
            config[{torch.bfloat16: "bf16", torch.float16: "fp16"}[self.target.dtype]] = {"enabled": True}
        device = self.trainer.strategy.root_device
        config = {"train_micro_batch_size_per_gpu": 1, **config}  # asked for, though nothing is trained
        deepspeed.zero.Init(self.target, config_dict_or_path=config)
        self.target._apply(lambda tensor: tensor if hasattr(tensor, "ds_id") else tensor.to(device))

    def configure_callbacks(self) -> list[L.Callback]:
        return [Throughput()]

    def unfinished(self) -> list[int]:
        """Shards still to write, the same list in every process; each looks at its share."""
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        mine = [shard for shard in range(rank, self.settings.shards, world_size) if not self.writer.is_finished(shard)]
        gathered = [mine]
        if world_size > 1:
            gathered = [[] for _ in range(world_size)]
            torch.distributed.all_gather_object(gathered, mine)
        missing = sorted(shard for share in gathered for shard in share)
        rank_zero_info(f"{self.settings.shards - len(missing)} of {self.settings.shards} shards are finished already")
        return missing

    def _sifted(self, batch: CaptionedBatch) -> CaptionedBatch:
        """Without the captions that the target refuses: only here is there a target."""
        whys = [self.target.problem(caption) for caption in batch.captions]
        if not any(whys):
            return batch
        use = [place for place, why in enumerate(whys) if why is None]
        refused = tuple(
            Skipped(batch.kept[place], f"item {batch.kept[place]}", f"caption with {why}", batch.captions[place][:60])
            for place, why in enumerate(whys)
            if why is not None
        )
        images = None if batch.images is None else batch.images[use]
        captions, kept = (tuple(values[place] for place in use) for values in (batch.captions, batch.kept))
        skipped = tuple(sorted((*batch.skipped, *refused), key=lambda one: one.index))
        return CaptionedBatch(batch.of, images, captions, kept, skipped)  # type: ignore[arg-type]

    def predict_step(self, batch: CaptionedBatch, batch_idx: int) -> dict[str, int]:
        """Returns how many samples it kept (in a dict, for DeepSpeed); their states went to the cache."""
        batch = self._sifted(batch)
        samples = self.states(batch.images, batch.captions, batch.kept) if batch.kept else self.states.idle()
        if batch.of.shard is None:
            return {"samples": 0}
        self.pending += samples
        self.skipped += batch.skipped
        # as soon as this process sees it; `finish` counts those of all processes and of earlier runs
        self.writer.check_skipped(self.bad + self.skipped, self.max_bad_fraction)
        if batch.of.last:
            self.writer.write_shard(batch.of.shard, self.pending, self.skipped)
            self.bad += self.skipped
            self.pending, self.skipped = [], []
        return {"samples": len(samples)}

    def teardown(self, stage: str) -> None:
        """After all processes are done, the first writes the target's ends and the manifest."""
        if self.dry_run:
            return
        self.trainer.strategy.barrier()
        if self.trainer.is_global_zero:
            try:
                self.writer.write_ends(self.states.ends)
                cache = self.writer.finish(self.max_bad_fraction)
            finally:
                self.writer.release()
            left_out = f", {sum(cache.skipped.values())} skipped ({cache.skipped})" if cache.skipped else ""
            rank_zero_info(f"feature cache {self.folder}: {len(cache)} samples, {cache.bytes / 1e6:.1f} MB{left_out}")
        self.trainer.strategy.barrier()
