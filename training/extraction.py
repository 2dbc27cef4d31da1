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

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from coolsd.interfaces import TargetOutput
from coolsd.sampling import Sampling
from coolsd.targets import load_target
from data.features import DTYPES, CachedSample, CacheSettings, FeatureCacheWriter
from data.loader import EpochSampler


@dataclass(frozen=True)
class Pass:
    """Samples `indices` of one shard. shard None: a repeated batch, to be discarded. last: it completes its shard."""

    shard: int | None
    indices: tuple[int, ...]
    last: bool


@dataclass(frozen=True)
class CaptionedBatch:
    """images uint8 [B, 3, h, w], or None where the target draws them; B captions."""

    of: Pass
    images: Tensor | None
    captions: tuple[str, ...]


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
        dataset: A map-style dataset of {"image": uint8 [3, h, w], "caption": str}, named by class_path in a recipe;
            null takes the training split of the embedded emojis.
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
        if limit is not None and limit < 1:
            raise ValueError(f"limit is {limit}, but must be >= 1, or null for all samples")
        if dataset is None:
            from data.emoji.dataset import EmojiImages

            dataset = EmojiImages("train")
        self.dataset, self.batch_size, self.workers = dataset, batch_size, workers
        found = len(dataset)  # type: ignore[arg-type]
        if not found:
            raise ValueError(f"{type(dataset).__name__} is empty; point it at captioned images")
        # a dataset may be sorted, yet its first samples should stand for it: the loader holds out the last ones
        self.chosen = torch.randperm(found, generator=torch.Generator().manual_seed(0))[:limit].tolist()

    def fingerprint(self) -> str:
        """Of what is extracted: the dataset's own `fingerprint` where it has one, else its class, its size and a hash
        of 16 samples spread over it."""
        own = getattr(self.dataset, "fingerprint", None)
        if isinstance(own, str):
            return own
        digest = hashlib.sha256()
        for i in range(16):
            sample = self.dataset[self.chosen[i * (len(self.chosen) - 1) // 15]]
            digest.update(sample["caption"].encode(errors="replace"))
            digest.update(sample["image"].contiguous().numpy().tobytes())
        return f"{type(self.dataset).__name__}[{len(self.chosen)}]@{digest.hexdigest()[:12]}"

    def predict_dataloader(self) -> DataLoader:
        module = self.trainer.lightning_module
        assert isinstance(module, Extraction)
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        passes = plan(module.unfinished(), module.settings, self.batch_size, rank, world_size)
        batches = _Batches(self.dataset, self.chosen, passes, images=module.source == "images")
        order = EpochSampler(len(passes), 0, 0, 1, shuffle=False)  # the passes are this process's own already
        return DataLoader(batches, batch_size=None, sampler=order, num_workers=self.workers)

    def transfer_batch_to_device(
        self, batch: CaptionedBatch, device: torch.device, dataloader_idx: int
    ) -> CaptionedBatch:
        return batch  # the target's own methods move what they need


class _Batches(Dataset):
    def __init__(self, dataset: Dataset, chosen: Sequence[int], passes: Sequence[Pass], images: bool) -> None:
        self.dataset, self.chosen, self.passes, self.images = dataset, chosen, passes, images

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, index: int) -> CaptionedBatch:
        samples = [self.dataset[self.chosen[i]] for i in self.passes[index].indices]
        images = torch.stack([sample["image"] for sample in samples]) if self.images else None
        return CaptionedBatch(self.passes[index], images, tuple(sample["caption"] for sample in samples))


class Extraction(L.LightningModule):
    """One teacher-forced pass of a target over each captioned image; its hidden states go to a feature cache.

    Args:
        cache: Folder to write, or to continue.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        source: "images" encodes the dataset's images; "self-distill" lets the target draw images for its captions.
        guidance: Keep the unconditional branch too, as a head that decodes with guidance needs.
        sampling: How the target draws its images for "self-distill"; its guidance may differ from decoding's.
        seed: Of those images; image i is a function of (caption, seed, i).
        dtype: Of the target's weights; auto is bfloat16 where the hardware has it.
        cache_dtype: Of the stored hidden states.
        samples_per_shard: A finished shard survives an interruption.
    """

    def __init__(
        self,
        cache: str,
        target: str = "checkpoints/emoji/target",
        source: Literal["images", "self-distill"] = "images",
        guidance: bool = True,
        sampling: Sampling | None = None,
        seed: int = 0,
        dtype: str = "auto",
        cache_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
        samples_per_shard: int = 64,
    ) -> None:
        super().__init__()
        if cache_dtype not in DTYPES:
            raise ValueError(f"cache_dtype is {cache_dtype!r}; choose one of {', '.join(DTYPES)}")
        if samples_per_shard < 1:
            raise ValueError(f"samples_per_shard is {samples_per_shard}, but must be >= 1")
        if sampling is not None and source != "self-distill":
            raise ValueError('sampling decides how the target draws images; give it with source "self-distill" only')
        self.folder, self.target_folder, self.source, self.guidance = Path(cache), target, source, guidance
        self.sampling, self.seed, self.target_dtype = sampling or Sampling(), seed, dtype
        self.cache_dtype, self.samples_per_shard = cache_dtype, samples_per_shard
        self.pending: list[CachedSample] = []
        self.checked = False

    def setup(self, stage: str) -> None:
        """Load the target and open the cache; raises ValueError where the folder was begun with other settings."""
        if stage != "predict":
            raise ValueError("extraction is a pass without training; run coolsd extract")
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self.target = load_target(self.target_folder, str(self.trainer.strategy.root_device), self.target_dtype)
        if self.source == "images" and self.target.image_tokenizer is None:
            raise ValueError(f"{self.target_folder} has no image tokenizer beside it, so it cannot encode images")
        prompt = self.target.encode([data.dataset[0]["caption"]], self.guidance)
        how: dict[str, Any] = {"source": self.source, "target_dtype": str(self.target.dtype).removeprefix("torch.")}
        if self.source == "self-distill":
            how |= {"sampling": asdict(self.sampling), "seed": self.seed}
        self.settings = CacheSettings(
            target=self.target.fingerprint,
            dataset=data.fingerprint(),
            hidden_size=self.target.hidden_size,
            prompt_slots=prompt.mask.shape[-1],
            image_tokens=self.target.image_tokens,
            codebook_size=self.target.codebook_size,
            branches=prompt.branches,
            samples=len(data.chosen),
            samples_per_shard=self.samples_per_shard,
            dtype=self.cache_dtype,
            context="context" in prompt.inputs,
            settings=how,
        )
        self.writer = FeatureCacheWriter(self.folder, self.settings)
        if self.trainer.is_global_zero:
            self.writer.lock()
        size = self.settings.samples * self.settings.bytes_per_sample
        rank_zero_info(f"{self.settings.samples} samples, up to {size / 1e6:.0f} MB in {self.settings.shards} shards")

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

    def predict_step(self, batch: CaptionedBatch, batch_idx: int) -> int:
        """Returns how many samples it kept; their states went to the cache."""
        prompt = self.target.encode(batch.captions, self.guidance)
        tokens = self._tokens(batch)
        output = self.target.forced(prompt, tokens)
        if not self.checked:
            self._check_states(output)
        if batch.of.shard is None:
            return 0
        caption = torch.full(prompt.mask.shape, -1, device=tokens.device)
        ids = torch.cat([caption, tokens[:, None].expand(-1, prompt.branches, -1)], dim=-1)  # [B, G, P + T]
        held = torch.cat([prompt.mask, torch.ones_like(ids[..., prompt.mask.shape[-1] :], dtype=torch.bool)], dim=-1)
        hidden, ids, held = output.hidden_states.cpu(), ids.cpu(), held.cpu()
        context = prompt.inputs["context"].cpu() if self.settings.context else None
        self.pending += [
            CachedSample(
                words,
                tuple(hidden[b, g][held[b, g]] for g in range(prompt.branches)),
                tuple(ids[b, g][held[b, g]] for g in range(prompt.branches)),
                None if context is None else context[b],
            )
            for b, words in enumerate(batch.captions)
        ]
        if batch.of.last:
            self.writer.write_shard(batch.of.shard, self.pending)
            self.pending = []
        return len(batch.captions)

    def teardown(self, stage: str) -> None:
        """After all processes are done, the first writes the target's ends and the manifest."""
        self.trainer.strategy.barrier()
        if self.trainer.is_global_zero:
            try:
                self.writer.write_ends(self.target.ends())
                cache = self.writer.finish()
            finally:
                self.writer.release()
            rank_zero_info(f"feature cache {self.folder}: {len(cache)} samples, {cache.bytes / 1e6:.1f} MB")
        self.trainer.strategy.barrier()

    def _tokens(self, batch: CaptionedBatch) -> Tensor:
        """Image tokens [B, T] of the batch."""
        if self.source == "images":
            assert batch.images is not None
            return self.target.encode_images(batch.images.to(self.target.device))
        from coolsd.decode import generate

        drawn = generate(
            self.target,
            batch.captions,
            sampling=self.sampling,
            seed=self.seed,
            rows=batch.of.indices,
            decode_images=False,
        )
        return drawn.tokens

    def _check_states(self, output: TargetOutput) -> None:
        """The stored states must give the target's logits again, else a head trained on them is worthless."""
        first = output.hidden_states.shape[2] - output.logits.shape[2] - 1  # slot whose state gives token 0
        again = output.hidden_states[:, :, first:-1] @ self.target.ends()["lm_head"].T
        error = (again - output.logits).float().norm() / output.logits.float().norm()
        if not error < 0.02:
            raise ValueError(f"the target's hidden states do not give its logits (relative error {error:.3f})")
        self.checked = True
