"""The loader over a feature cache, or over states as they are made.  Knows rows and their order; knows no loss.

A batch is a dict; every row, one (sample, branch), has P + T slots, its captions padded on the left:

    slot            0   1  ...  P-1 | P   P+1 ... P+T-1
    valid           F   T  ...   T  | T    T  ...   T       bool [B, G, P + T], False = padding
    token_ids      -1  -1  ...  -1  | t0   t1 ...  t(T-1)   long [B, G, P + T], -1 = caption or padding
    hidden          0   h  ...   h  | h    h  ...   h       float32 [B, G, P + T, H], after the target's final norm
    context         float32 [B, G, T + 1, H], where the cache has one (coolsd.interfaces.Prompt), else missing
    layers          float32 [B, G, P + T, k H], where the cache has k layers of the target, else missing
    captions       B strings
    index           long [B], which samples of the cache

A draft head reads pair i = (hidden[i], token_ids[i + 1]) and predicts hidden[i + 1], see `pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from coolsd.sampling import Sampling
from coolsd.targets import free_memory, load_target
from data.features import CachedSample, FeatureCache, check_sample
from data.states import Selection, States, read_batch

Batch = dict[str, Any]


def pairs(batch: Batch) -> dict[str, Tensor]:
    """The shifted pairs of a batch, N = P + T - 1 of them a row; pair i sits at slot i.

    hidden [B, G, N, H] and token_ids [B, G, N] are the head's input, target_hidden [B, G, N, H] what it should say.
    seen bool [B, G, N]: the pair exists (no padding). loss bool [B, G, N]: its token is an image token, so decoding
    drafts from it; the first is (last caption slot, t0). Caption pairs are there to be attended only.
    context [B, G, N, H]: where the batch has it, what the target adds to each token's embedding (0 for a caption's).
    layers [B, G, N, k H]: where the batch has them, the head's input instead of hidden.
    """
    hidden, tokens, valid = batch["hidden"], batch["token_ids"], batch["valid"]
    seen = valid[..., :-1] & valid[..., 1:]
    more = {"layers": batch["layers"][..., :-1, :]} if "layers" in batch else {}
    if "context" in batch:  # of the token read: token n's is row n + 1, a caption slot has none
        read = batch["context"][..., 1:, :]
        more["context"] = F.pad(read, (0, 0, hidden.shape[-2] - 1 - read.shape[-2], 0))
    return {
        **more,
        "hidden": hidden[..., :-1, :],
        "token_ids": tokens[..., 1:],
        "target_hidden": hidden[..., 1:, :],
        "seen": seen,
        "loss": seen & (tokens[..., 1:] >= 0),
    }


class FeatureRows(Dataset):
    """Batches of a cache: `rows[[4, 0]]` is the batch of the 4th and the 0th of the chosen samples.

    in_memory reads and checks all chosen samples at once, in the cache's dtype; else each batch does, its own, from the
    memory-mapped files.
    """

    def __init__(self, cache: Any, chosen: range, in_memory: bool) -> None:
        self.cache, self.chosen = cache, chosen
        self.memory = [self._checked(index, cache[index]) for index in chosen] if in_memory else None

    def _checked(self, index: int, sample: CachedSample) -> CachedSample:
        try:
            check_sample(index, sample, self.cache.settings)
        except ValueError as error:
            raise ValueError(f"{self.cache.folder}: {error}; coolsd cache verify finds all of them") from None
        return sample

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Raises ValueError, naming the sample, where a state is not finite."""
        settings = self.cache.settings
        if self.memory:
            samples = [self.memory[i] for i in indices]
        else:
            numbers = [self.chosen[i] for i in indices]
            samples = [self._checked(*each) for each in zip(numbers, self.cache.read(numbers), strict=True)]
        shape = (len(samples), settings.branches, settings.prompt_slots + settings.image_tokens)
        hidden = torch.zeros(*shape, settings.hidden_size)
        tokens = torch.full(shape, -1)
        valid = torch.zeros(shape, dtype=torch.bool)
        layers = torch.zeros(*shape, len(settings.layers) * settings.hidden_size)
        for b, sample in enumerate(samples):
            for g, (states, ids) in enumerate(zip(sample.hidden_states, sample.token_ids, strict=True)):
                hidden[b, g, -len(ids) :] = states
                tokens[b, g, -len(ids) :] = ids
                valid[b, g, -len(ids) :] = True
                if settings.layers:
                    layers[b, g, -len(ids) :] = sample.layers[g]
        contexts = [sample.context for sample in samples if sample.context is not None]
        return {
            **({"context": torch.stack(contexts).float()} if contexts else {}),
            **({"layers": layers} if settings.layers else {}),
            "hidden": hidden,
            "token_ids": tokens,
            "valid": valid,
            "captions": [sample.caption for sample in samples],
            "index": torch.tensor([self.chosen[i] for i in indices]),
        }


class EpochSampler(DistributedSampler):
    """This process's share of a permutation that is a pure function of (seed, epoch).

    All processes get equally many samples, a multiple of `multiple`: the last few of the permutation are left out
    where they do not share evenly. (A DistributedSampler by type alone: Lightning neither replaces nor wraps those.)
    """

    def __init__(
        self, samples: int, seed: int, rank: int, world_size: int, shuffle: bool = True, multiple: int = 1
    ) -> None:
        super().__init__(range(samples), world_size, rank, shuffle, seed, drop_last=True)  # type: ignore[arg-type]
        self.samples, self.multiple = samples, multiple
        self.start = 0  # a pass leaves out so many of its first samples

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        return iter(order[self.rank :: self.num_replicas][self.start : len(self)].tolist())

    def __len__(self) -> int:
        return self.samples // self.num_replicas // self.multiple * self.multiple


class ResumableLoader(DataLoader):
    """A loader whose place in the epoch is part of Lightning's checkpoint: a resumed run neither repeats nor skips.

    Iterating is lazy, so that worker processes start only after Lightning has told the sampler its epoch.
    """

    begin = 0  # batches that the next pass leaves out
    delivered = 0  # batches of this pass so far

    def __iter__(self) -> Iterator[Batch]:
        self.delivered, self.begin = self.begin, 0
        self.sampler.start = self.delivered * (self.batch_size or 1)  # type: ignore[attr-defined]
        try:
            for batch in super().__iter__():
                self.delivered += 1
                yield batch
        except ValueError as error:
            if not str(error).startswith("Caught ValueError in"):
                raise
            # a worker process has sent its whole traceback
            raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None

    def state_dict(self) -> dict[str, int]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["delivered"] % len(self)


class FeatureModule(L.LightningDataModule):
    """Training and held-out batches of a feature cache.

    Args:
        cache: Folder that `coolsd extract` wrote.
        batch_size: Samples (all their branches) a batch and process.
        held_out: Fraction of the samples, the last ones, kept for validation.
        limit: Use only the first so many samples; null uses all.
        in_memory: true reads the cache once into memory, false reads every batch from disk, null decides: true where it
            takes at most half of the free memory, all processes of the machine together.
        workers: Processes that prepare batches; 0 prepares them in the training process.
        seed: Of the order of the samples.
    """

    def __init__(
        self,
        cache: str,
        batch_size: int = 8,
        held_out: float = 0.05,
        limit: int | None = None,
        in_memory: bool | None = None,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.folder, self.batch_size, self.workers, self.seed = Path(cache), batch_size, workers, seed
        self.held_out, self.limit, self.in_memory = held_out, limit, in_memory
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but must be >= 1")
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is {held_out}, but must be in [0, 1)")
        if limit is not None and limit < 2:
            raise ValueError(f"limit is {limit}, but must be >= 2, or null for all samples")
        self._rows: dict[bool, FeatureRows] = {}

    @property
    def cache(self) -> Any:
        if not hasattr(self, "_cache"):
            self._cache: Any = FeatureCache(self.folder)
        return self._cache

    @property
    def step(self) -> int:
        """Samples of an optimizer step in each process. An epoch is whole steps, if all have equally many batches:
        Lightning would divide the gradients of a last, shorter one by as many as the others have."""
        return self.batch_size * (self.trainer.accumulate_grad_batches if self.trainer else 1)

    def setup(self, stage: str) -> None:
        if not len(self.cache):
            raise ValueError(f"{self.folder} holds no sample; extract it again")
        used = min(len(self.cache), self.limit or len(self.cache))
        kept = round(used * self.held_out)
        if self.held_out > 0:
            kept = min(max(kept, 1), used - 1)
        split, processes = used - kept, self.trainer.world_size if self.trainer else 1
        if split // processes < self.step:
            batches = self.step // self.batch_size
            each = f", {batches} of them a step" if batches > 1 else ""
            raise ValueError(
                f"{split} training samples of {self.folder}, shared by {processes} process(es), make no batch of "
                f"{self.batch_size}{each}; lower batch_size"
            )
        in_memory = self.in_memory
        if in_memory is None:
            processes = self.trainer.num_devices if self.trainer else 1  # on this machine, each with a copy
            in_memory = processes * used * self.cache.settings.memory_per_sample <= free_memory(torch.device("cpu")) / 2
        if not self._rows:  # fit sets up once more for its validation
            self._rows[True] = FeatureRows(self.cache, range(split), in_memory)
            self._rows[False] = FeatureRows(self.cache, range(split, used), in_memory)

    def held_out_captions(self, count: int) -> list[str]:
        """Captions of the last `count` held-out samples, or of all where they are fewer."""
        return [self.cache[index].caption for index in self._rows[False].chosen[::-1][:count]]

    def train_dataloader(self) -> DataLoader:
        return self._loader(training=True)

    def val_dataloader(self) -> DataLoader | list:
        return self._loader(training=False) if len(self._rows[False]) else []

    test_dataloader = val_dataloader

    def _loader(self, training: bool) -> DataLoader:
        rows, trainer = self._rows[training], self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        multiple = self.step if training else 1
        sampler = EpochSampler(len(rows), self.seed, rank, world_size, shuffle=training, multiple=multiple)
        return ResumableLoader(
            rows,
            self.batch_size,
            sampler=sampler,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            drop_last=training,
            pin_memory=trainer is not None and trainer.strategy.root_device.type == "cuda",
            collate_fn=_as_is,
        )


class OnlineFeatures(FeatureModule):
    """The batches of a `FeatureModule` without a cache: the target runs as they are asked for, each time anew.

    Args:
        dataset: As for `coolsd extract`: a map-style dataset of images and captions; null takes the embedded emojis.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        source: "images" encodes the dataset's images; "self-distill" lets the target draw images for its captions.
        guidance: Give the unconditional branch too, as a head that decodes with guidance needs.
        null_fraction: Without guidance, this share of the samples gets the null caption.
        layers: Layers of the target to give beside its last states, for a head that reads several.
        sampling: How the target draws its images for "self-distill".
        draw_seed: Of those images and of which captions are null; `seed` of an extraction.
        dtype: Of the target's weights; auto is bfloat16 where the hardware has it.
        limit: Use only so many samples of the dataset, those that an extraction would take.
        batch_size: Samples (all their branches) a batch and process.
        held_out: Fraction of the samples, the last ones, kept for validation.
        seed: Of the order of the samples.
    """

    def __init__(
        self,
        dataset: Dataset | None = None,
        target: str = "emoji/target",
        source: Literal["images", "self-distill"] = "images",
        guidance: bool = True,
        null_fraction: float = 0.0,
        layers: list[int] | None = None,
        sampling: Sampling | None = None,
        draw_seed: int = 0,
        dtype: str = "auto",
        limit: int | None = None,
        batch_size: int = 8,
        held_out: float = 0.05,
        seed: int = 0,
    ) -> None:
        super().__init__(target, batch_size, held_out, in_memory=False, seed=seed)
        self.selection, self.dtype = Selection(dataset, limit), dtype
        if getattr(dataset, "ordered", False):
            raise ValueError("a stream gives its rows in one order, and training wants another; extract a cache of it")
        self.how: dict[str, Any] = {"guidance": guidance, "null_fraction": null_fraction, "sampling": sampling}
        self.how |= {"source": source, "seed": draw_seed, "layers": layers or ()}

    def held_out_captions(self, count: int) -> list[str]:
        kept, last = self.cache.kept, self._rows[False].chosen[::-1][:count]
        return [self.selection.read(kept[index], image=False)[1] for index in last]

    @property
    def cache(self) -> Any:
        if not hasattr(self, "_cache"):
            device = str(self.trainer.strategy.root_device) if self.trainer else "auto"
            states = States(load_target(self.folder, device, self.dtype), **self.how)
            self._cache: Any = _Online(states, self.selection)
        return self._cache


class _Online:
    """What a `FeatureCache` of the same extraction would hold, computed when read."""

    def __init__(self, states: States, selection: Selection) -> None:
        self.states, self.selection, self.folder = states, selection, states.target.fingerprint
        self.images = states.source == "images"
        items, problem = range(len(selection)), states.target.problem
        found = [read_batch(selection, [item], self.images, problem)[2:] for item in items]  # no image is kept
        self.kept = [index for kept, _ in found for index in kept]
        skipped = [one for _, some in found for one in some]
        if not self.kept:
            raise ValueError(f"none of {len(selection)} items can be used: {skipped[0].reason}, {skipped[0].item}")
        if skipped:
            rank_zero_info(f"{len(skipped)} of {len(selection)} items cannot be used, as {skipped[0].item}: "
                           f"{skipped[0].reason}")  # fmt: skip
        self.settings = states.settings(selection, samples_per_shard=64, dtype="float32")

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> CachedSample:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[CachedSample]:
        chosen = [self.kept[index] for index in indices]
        images, captions, kept, skipped = read_batch(self.selection, chosen, self.images, self.states.target.problem)
        if skipped:
            raise ValueError(
                f"{skipped[0].item} could be used when training began, and now cannot: {skipped[0].reason}"
            )
        return self.states(images, captions, kept)

    def ends(self) -> dict[str, Tensor]:
        return self.states.ends


def _as_is(batch: Batch) -> Batch:
    return batch
