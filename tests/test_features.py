"""Feature caches: what is written is what is read, an interruption costs nothing, and a broken file is told by name."""

import errno
import json
import math
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from coolsd import cli
from coolsd.checkpoint import sha256
from coolsd.heads.checkpoint import load_head
from coolsd.heads.eagle import MultiLayerHead
from coolsd.image_tokenizers import LlamaGenVQ, LlamaGenVQConfig
from coolsd.sampling import Sampling, counter_uniforms
from coolsd.targets import load_target
from data.features import CachedSample, CacheSettings, FeatureCache, FeatureCacheWriter, main
from data.loader import EpochSampler, FeatureModule, OnlineFeatures, pairs
from data.states import BadItem, Selection
from training.callbacks import AcceptedLength
from training.cli import CheckpointsExist, extract
from training.draft import DraftTraining
from training.extraction import CaptionedImages, plan
from training.throughput import throughput

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = CacheSettings(
    "toy@1", "numbers", 4, 3, 5, 7, 2, samples=10, samples_per_shard=4, settings={"source": "images"}
)


def ends(size):
    return {"embedding": torch.randn(7, size), "lm_head": torch.randn(7, size), "rope": torch.zeros(8, 1, 2)}


ENDS = ends(4)


def sample(index):
    """A made-up sample; its length and its numbers follow from its index."""
    rng = torch.Generator().manual_seed(index)
    slots = 1 + index % 3
    tokens = torch.cat([torch.full((slots,), -1), torch.randint(0, 7, (5,), generator=rng)])
    hidden = tuple(torch.randn(slots + 5, 4, generator=rng).bfloat16() for _ in range(2))
    return CachedSample(f"caption {index} \N{GRINNING FACE}", hidden, (tokens, tokens))


def write(folder, settings=SETTINGS, shards=None, change=lambda index, sample: sample):
    writer = FeatureCacheWriter(folder, settings)
    for shard in range(settings.shards) if shards is None else shards:
        writer.write_shard(shard, [change(i, sample(i)) for i in settings.samples_of(shard)])
    writer.write_ends(ENDS if settings.hidden_size == 4 else ends(settings.hidden_size))
    return writer


def hashes(folder):
    return {path.name: path.read_text() for path in sorted(Path(folder).glob("*.sha256"))}


@pytest.fixture
def cache(tmp_path):
    return write(tmp_path / "cache").finish()


def test_what_is_written_is_read(cache):
    assert len(cache) == 10 and cache.settings == SETTINGS
    for index in (9, 0, 5, 3, 4):  # out of order, across shards
        expected, found = sample(index), cache[index]
        assert found.caption == expected.caption
        for ours, theirs in zip(
            expected.hidden_states + expected.token_ids, found.hidden_states + found.token_ids, strict=True
        ):
            assert torch.equal(ours, theirs.to(ours.dtype))
    assert torch.equal(cache.ends()["embedding"], ENDS["embedding"])
    cache.verify()


def test_context_is_kept_and_wanted(tmp_path):
    settings = replace(SETTINGS, context=True)
    context = torch.arange(2 * 6 * 4.0).view(2, 6, 4).bfloat16()
    cache = write(tmp_path / "cache", settings, change=lambda i, sample: replace(sample, context=context + i)).finish()
    cache.verify()
    assert torch.equal(cache[6].context, context + 6) and cache.settings.context
    module = FeatureModule(str(cache.folder), batch_size=3, held_out=0.2)
    module.setup("fit")
    batch = next(iter(module.val_dataloader()))
    assert torch.equal(batch["context"][1], context.float() + 9) and batch["context"].shape == (2, 2, 6, 4)
    with pytest.raises(ValueError, match="context None"):
        write(tmp_path / "without", settings)
    with pytest.raises(ValueError, match=r"context \(2, 6, 4\), but the cache takes None"):
        write(tmp_path / "unwanted", change=lambda i, sample: replace(sample, context=context))


def test_a_shard_counts_only_when_whole(tmp_path):
    writer = write(tmp_path, shards=[0, 2])
    assert [writer.is_finished(shard) for shard in range(3)] == [True, False, True]
    with pytest.raises(ValueError, match="lacks 1 of 3 shards"):
        writer.finish()
    with pytest.raises(FileNotFoundError, match="unfinished"):
        FeatureCache(tmp_path)
    (tmp_path / "shard-00000.safetensors.sha256").unlink()  # killed between the two renames
    with (tmp_path / "shard-00002.safetensors").open("r+b") as file:
        file.truncate(100)
    assert not any(writer.is_finished(shard) for shard in range(3))


def test_a_resumed_cache_equals_an_unbroken_one(tmp_path, cache):
    write(tmp_path / "other", shards=[1])
    (tmp_path / "other" / ".shard-00000.safetensors.1.part").write_bytes(b"half a shard")  # killed while writing
    resumed = FeatureCacheWriter(tmp_path / "other", SETTINGS)
    for shard in (0, 2):
        assert not resumed.is_finished(shard)
        resumed.write_shard(shard, [sample(i) for i in SETTINGS.samples_of(shard)])
    resumed.finish().verify()
    assert hashes(tmp_path / "other") == hashes(cache.folder)
    assert not list((tmp_path / "other").glob(".*"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": "toy@2"}, "target = 'toy@1', not 'toy@2'"),
        ({"dataset": "letters"}, "dataset"),
        ({"dtype": "float32"}, "dtype"),
        ({"branches": 1}, "branches"),
        ({"samples": 11}, "samples = 10, not 11"),
        ({"samples_per_shard": 5}, "samples_per_shard"),
        ({"settings": {"source": "self-distill"}}, "settings.source"),
        ({"settings": {"source": "images", "crop": 2}}, "settings.crop = None, not 2"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, named):
    write(tmp_path, shards=[0])
    with pytest.raises(ValueError, match=named):
        FeatureCacheWriter(tmp_path, replace(SETTINGS, **change))


def test_a_foreign_folder_and_a_small_disk_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no feature cache"):
        FeatureCacheWriter(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="free"):
        FeatureCacheWriter(tmp_path / "large", replace(SETTINGS, samples=10**9, hidden_size=10**5))


def test_a_second_writer_is_told_who_writes(tmp_path):
    first, second = FeatureCacheWriter(tmp_path, SETTINGS), FeatureCacheWriter(tmp_path, SETTINGS)
    first.lock()
    with pytest.raises(ValueError, match=f"process {os.getpid()}"):
        second.lock()


def broken(index, found):
    """Sample 5 with one number that is not finite."""
    if index == 5:
        found.hidden_states[1][2, 3] = float("nan")
    return found


def test_only_finite_states_are_written(tmp_path):
    with pytest.raises(ValueError, match=r"sample 5 .*finite"):
        write(tmp_path, change=broken)
    assert not (tmp_path / "shard-00001.safetensors").exists()


def test_a_full_disk_is_one_sentence_and_costs_one_shard(tmp_path, cache, monkeypatch):
    write(tmp_path / "other", shards=[0])

    def full(path, content):
        path.with_name(f".{path.name}.part").write_bytes(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("data.features._write", full)
        writer = FeatureCacheWriter.__new__(FeatureCacheWriter)
        writer.folder, writer.settings = tmp_path / "other", SETTINGS
        with pytest.raises(ValueError, match=r"no space for .*shard-00001.* run the same command again"):
            writer.write_shard(1, [sample(i) for i in SETTINGS.samples_of(1)])
    assert writer.is_finished(0) and not writer.is_finished(1)
    assert hashes(write(tmp_path / "other", shards=[1, 2]).finish().folder) == hashes(cache.folder)
    assert not list((tmp_path / "other").glob(".*.part"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda s: replace(s, hidden_states=s.hidden_states[:1]), "branches"),
        (lambda s: replace(s, hidden_states=tuple(h[:-1] for h in s.hidden_states)), "tokens"),
        (lambda s: replace(s, hidden_states=tuple(h[:, :3] for h in s.hidden_states)), "takes"),
        (lambda s: replace(s, token_ids=tuple(t + 1 for t in s.token_ids)), "-1 for caption slots"),
        (lambda s: replace(s, token_ids=tuple(t + 7 * (t >= 0) for t in s.token_ids)), "tokens of 0"),
    ],
)
def test_a_misshapen_sample_is_refused(tmp_path, wrong, named):
    with pytest.raises(ValueError, match=named):
        write(tmp_path, change=lambda index, found: wrong(found))


def test_verify_finds_a_flipped_byte(cache):
    path = cache.folder / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    reopened = FeatureCache(cache.folder)  # same size: only the hash can tell
    with pytest.raises(ValueError, match="shard-00001"):
        reopened.verify()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["shards"][0].update(file="../../secret"), "secret"),
        (lambda m: m["shards"][0].update(file="/etc/passwd"), "passwd"),
        (lambda m: m["shards"].pop(), "2 shards"),
        (lambda m: m.update(shards="all"), "no shards"),
        (lambda m: m["shards"][1].update(bytes=3), "3"),
        (lambda m: m["shards"][1].update(sha256="0"), "sha256"),
        (lambda m: m.update(samples=-1), "samples is -1"),
        (lambda m: m.update(samples=1 << 60), "samples"),
        (lambda m: m.update(hidden_size=1 << 30), "hidden_states"),
        (lambda m: m.update(codebook_size=2), "token_ids"),
        (lambda m: m.update(image_tokens=6, prompt_slots=1), "offsets"),
        (lambda m: m.update(branches=1), "offsets"),
        (lambda m: m.update(dtype="float32"), "hidden_states"),
        (lambda m: m.update(dtype="__import__"), "dtype"),
        (lambda m: m.update(schema=99), "schema 99"),
        (lambda m: m.pop("ends"), "ends.safetensors"),
        (lambda m: m.update(skipped=[1]), "counts by reason"),
        (lambda m: m.update(skipped={"broken": "1"}), "counts by reason"),
        (lambda m: m.update(relative_error="0"), "relative_error 0"),
        (lambda m: m.update(relative_error=math.nan), "relative_error nan"),
        (lambda m: m.update(relative_error=10**400), "relative_error 1000"),
        (lambda m: m.clear(), "schema None"),
    ],
)
def test_a_hostile_manifest_is_refused_by_name(cache, change, named):
    path = cache.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=named):
        FeatureCache(cache.folder)[0]


def test_broken_files_are_told_by_name(cache):
    (cache.folder / "shard-00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="shard-00000"):
        FeatureCache(cache.folder)
    (cache.folder / "shard-00000.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00000"):
        FeatureCache(cache.folder)
    (cache.folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        FeatureCache(cache.folder)


def test_cache_commands(cache, capsys):
    main(["info", str(cache.folder)])
    assert "toy@1" in capsys.readouterr().out
    main(["verify", str(cache.folder)])
    assert "verified" in capsys.readouterr().out


def test_merged_caches_hold_every_sample_once_and_mixed(cache, tmp_path, capsys):
    shifted = replace(SETTINGS, dataset="others", samples=7, samples_per_shard=7, settings={"source": "self-distill"})
    other = write(tmp_path / "other", shifted, change=lambda i, _: sample(100 + i)).finish()
    arguments = ["merge", str(cache.folder), str(other.folder), "--out", str(tmp_path / "both")]
    main(arguments)
    assert "merge@" in capsys.readouterr().out
    both = FeatureCache(tmp_path / "both")
    both.verify()
    assert len(both) == 17
    captions = [both[index].caption for index in range(17)]
    originals = {sample(i).caption: sample(i) for i in (*range(10), *range(100, 107))}
    assert sorted(captions) == sorted(originals) and captions != list(originals)
    held_out = {sample(i).caption for i in (8, 9, 106)}  # the last fifth of each: of a training on either as well
    assert set(captions[-3:]) == held_out
    for index in range(17):
        ours, theirs = both[index], originals[captions[index]]
        for one, two in zip(ours.hidden_states + ours.token_ids, theirs.hidden_states + theirs.token_ids, strict=True):
            assert torch.equal(one, two.to(one.dtype))
    assert [origin["source"] for origin in both.settings.settings["merged"]] == ["images", "self-distill"]
    before = hashes(both.folder)
    (both.folder / "manifest.json").unlink()
    (both.folder / "shard-00001.safetensors").unlink()
    main(arguments)  # it goes on
    assert hashes(both.folder) == before


def test_caches_of_different_targets_are_not_merged(cache, tmp_path):
    other = write(tmp_path / "other", replace(SETTINGS, target="toy@2")).finish()
    with pytest.raises(ValueError, match=r"cache has target 'toy@1', but .*other has 'toy@2'"):
        main(["merge", str(cache.folder), str(other.folder), "--out", str(tmp_path / "both")])
    for arguments, said in (
        (["merge", str(cache.folder), "--out", str(tmp_path / "both")], "give at least two"),
        (["merge", str(cache.folder), str(cache.folder)], "merge needs --out"),
        (["info", str(cache.folder), str(other.folder)], "info takes one folder, not 2"),
    ):
        with pytest.raises(ValueError, match=said):
            main(arguments)
    assert not (tmp_path / "both").exists()


def test_pairs_are_shifted_by_one():
    """P = 2 slots, T = 4 tokens, one branch; hidden state i is the number i."""
    batch = {
        "hidden": torch.arange(6.0).expand(2, 1, 6)[..., None],
        "token_ids": torch.tensor([[[-1, -1, 10, 11, 12, 13]], [[-1, -1, 20, 21, 22, 23]]]),
        "valid": torch.tensor([[[True] * 6], [[False] + [True] * 5]]),
        "context": torch.arange(100.0, 105.0).expand(2, 1, 5)[..., None],
    }
    found = {name: value[:, 0].squeeze(-1).tolist() for name, value in pairs(batch).items()}
    #                           pair         0      1     2     3     4
    assert found["hidden"][0] == [0, 1, 2, 3, 4]
    assert found["token_ids"][0] == [-1, 10, 11, 12, 13]
    assert found["target_hidden"][0] == [1, 2, 3, 4, 5]
    assert found["loss"] == [[False, True, True, True, True]] * 2  # the first draft, (slot 1, token 10), has a loss
    assert found["context"][0] == [0, 101, 102, 103, 104]  # a caption slot has none, row 0 belongs to the last of them
    assert found["seen"] == [[True] * 5, [False, True, True, True, True]]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_batch_holds_the_cached_rows_left_padded(cache, in_memory):
    module = FeatureModule(str(cache.folder), batch_size=3, held_out=0.2, in_memory=in_memory)
    module.setup("fit")
    seen = []
    for batch in [*module.train_dataloader(), *module.val_dataloader()]:
        assert batch["hidden"].shape == (len(batch["captions"]), 2, 8, 4)
        for b, caption in enumerate(batch["captions"]):
            index = int(caption.split()[1])
            seen.append(index)
            for g in range(2):
                held = batch["valid"][b, g]
                assert held[2:].all() and held.sum() == 6 + index % 3
                assert torch.equal(batch["hidden"][b, g][held], sample(index).hidden_states[g].float())
                assert torch.equal(batch["token_ids"][b, g][held], sample(index).token_ids[g])
                assert (batch["token_ids"][b, g][~held] == -1).all() and not batch["hidden"][b, g][~held].any()
    assert sorted(seen[-2:]) == [8, 9] and len(set(seen)) == len(seen) == 8  # 2 batches of 3, and the held-out two


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_order_is_a_function_of_seed_and_epoch(world_size):
    def epoch(number, seed=0):
        samplers = [EpochSampler(11, seed, rank, world_size) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(number)
        return [list(sampler) for sampler in samplers]

    assert epoch(3) == epoch(3) != epoch(4)
    assert epoch(3) != epoch(3, seed=1)
    shares = epoch(5)
    assert {len(share) for share in shares} == {11 // world_size}
    assert len({index for share in shares for index in share}) == 11 // world_size * world_size


def test_an_epoch_is_whole_optimizer_steps(cache):
    """10 samples in batches of 2, 2 batches a step: two steps, not two and a half."""
    module = FeatureModule(str(cache.folder), batch_size=2, held_out=0)
    module.trainer = Mock(num_devices=1, world_size=1, global_rank=0, accumulate_grad_batches=2)
    module.setup("fit")
    assert len(list(module.train_dataloader())) == len(module.train_dataloader()) == 4
    module.trainer.accumulate_grad_batches = 6
    with pytest.raises(ValueError, match="make no batch of 2, 6 of them a step; lower batch_size"):
        module.setup("fit")


@pytest.mark.parametrize(("workers", "in_memory"), [(0, True), (0, False), (2, False)])
def test_a_state_that_is_not_finite_is_told_in_one_line(cache, monkeypatch, workers, in_memory):
    """In memory before the first step; else when its batch is read, by a worker process too."""
    read = FeatureCache.__getitem__
    monkeypatch.setattr(FeatureCache, "__getitem__", lambda self, index: broken(index, read(self, index)))
    module = FeatureModule(str(cache.folder), 2, held_out=0, in_memory=in_memory, workers=workers)
    told = pytest.raises(ValueError, match=r"^\S+: sample 5 \(.*\) has hidden states that are not finite; coolsd")
    if in_memory:
        with told:
            module.setup("fit")
        return
    module.setup("fit")
    with told:
        list(module.train_dataloader())


def test_a_cache_without_samples_is_refused(cache, monkeypatch):
    monkeypatch.setattr(FeatureCache, "__len__", lambda self: 0)
    with pytest.raises(ValueError, match="holds no sample"):
        FeatureModule(str(cache.folder)).setup("fit")


@pytest.mark.parametrize("branches", [1, 2])
def test_a_head_that_cannot_be_trained_on_a_cache_is_refused(tmp_path, branches):
    folder = tmp_path / "cache"
    change = lambda i, s: replace(s, hidden_states=s.hidden_states[:branches], token_ids=s.token_ids[:branches])  # noqa: E731
    write(folder, replace(SETTINGS, branches=branches), change=change).finish()
    data = FeatureModule(str(folder))
    trainer = Mock(datamodule=data, strategy=Mock(zero_stage_3=False))
    module = DraftTraining(guidance={1: 1.5, 2: 1.0}[branches])
    module.trainer = trainer
    with pytest.raises(ValueError, match=rf"needs {3 - branches} branches.* has {branches}; set --model.guidance"):
        module.configure_model()
    trainer.strategy.zero_stage_3, trainer.callbacks = True, [EMAWeightAveraging()]
    with pytest.raises(ValueError, match="stage 2, or ddp"):
        module.configure_model()


def test_measured_captions_were_held_out(cache):
    module = FeatureModule(str(cache.folder), batch_size=1, held_out=0.2, limit=9)
    module.setup("fit")
    assert module.held_out_captions(1) == [sample(8).caption]
    assert module.held_out_captions(16) == [sample(8).caption, sample(7).caption]
    none = FeatureModule(str(cache.folder), batch_size=1, held_out=0)
    none.setup("fit")
    with pytest.raises(ValueError, match="hold out no sample"):
        AcceptedLength("target", 4, Sampling()).setup(Mock(datamodule=none), Mock(), "fit")


def test_memory_is_shared_by_the_processes_of_a_machine(cache, monkeypatch):
    monkeypatch.setattr("data.loader.free_memory", lambda device: 4 * 10 * SETTINGS.bytes_per_sample)
    for processes, fits in ((1, True), (2, True), (3, False)):
        module = FeatureModule(str(cache.folder))
        module.trainer = Mock(num_devices=processes, world_size=1, accumulate_grad_batches=1)
        module.setup("fit")
        assert (module._rows[True].memory is not None) == fits


class Recorder(L.LightningModule):
    """Learns nothing, notes which captions each epoch brought in which order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.seen.setdefault(self.current_epoch, []).extend(batch["captions"])
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [5, 7, 10])  # 5 batches an epoch: after the first, amid the second, after the second
def test_a_resumed_run_continues_where_it_stopped(cache, tmp_path, workers, steps):
    def run(steps, resume=None):
        module, data = Recorder(), FeatureModule(str(cache.folder), batch_size=2, held_out=0, workers=workers)
        trainer = L.Trainer(
            accelerator="cpu", max_steps=steps, default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
            callbacks=[
                CheckpointsExist(),  # writes the last step, which is no multiple of 4
                ModelCheckpoint(tmp_path / str(steps), save_last=True, every_n_train_steps=4),
            ],
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=resume)
        return module.seen

    straight = run(15)
    begun = run(steps)
    resumed = run(15, tmp_path / str(steps) / "last.ckpt")
    assert {epoch: begun.get(epoch, []) + resumed.get(epoch, []) for epoch in range(3)} == straight
    assert straight[0] != straight[1] != straight[2] and sorted(straight[0]) == sorted(straight[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("unfinished", [[], [0, 1, 2], [2], [0, 2]])
def test_every_sample_is_extracted_once_and_all_processes_pass_equally_often(world_size, unfinished):
    plans = [plan(unfinished, SETTINGS, 3, rank, world_size) for rank in range(world_size)]
    assert len({len(passes) for passes in plans}) == 1
    real = [one for passes in plans for one in passes if one.shard is not None]
    extracted = sorted(index for one in real for index in one.indices)
    assert extracted == [index for shard in unfinished for index in SETTINGS.samples_of(shard)]
    assert all(set(one.indices) <= set(SETTINGS.samples_of(one.shard)) for one in real)
    assert sorted(one.shard for one in real if one.last) == unfinished


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, toy_copy):
    """A tiny target for 64-pixel images, with its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    target, _ = toy_copy(codes=5, grid=(4, 4))
    target.save(folder / "target")
    torch.manual_seed(0)
    shape = {"z_channels": 8, "channels": 8, "channel_multipliers": (1,), "num_res_blocks": 1, "norm_groups": 4}
    vq = LlamaGenVQConfig(64, 5, 4, patch_size=16, **shape)
    LlamaGenVQ(vq).save(folder / "tokenizer")
    return folder / "target"


def arguments(checkpoint, folder, *more):
    common = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--data.limit", "10"]
    exact = ["--model.dtype", "float32", "--model.cache_dtype", "float32", "--model.samples_per_shard", "4"]
    where = ["--model.target", str(checkpoint), "--out", str(folder), "--data.batch_size", "3"]
    return [*common, *exact, *where, *more]


@pytest.fixture(scope="module")
def extracted(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extracted") / "cache"
    extract(arguments(checkpoint, folder))
    return folder


def test_a_recipe_names_its_cache_not_out(checkpoint, tmp_path, capfd):
    (tmp_path / "recipe.yaml").write_text(f"out: {tmp_path / 'run'}")
    words = arguments(checkpoint, tmp_path / "cache", "--config", str(tmp_path / "recipe.yaml"))
    assert cli.main(["extract", *words]) == 2
    assert "name its folder as model.cache" in capfd.readouterr().err
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_extraction_stores_what_a_forced_pass_sees(checkpoint, extracted):
    cache, target = FeatureCache(extracted), load_target(checkpoint, "cpu", "float32")
    cache.verify()
    assert cache.settings.target == target.fingerprint and cache.settings.branches == 2
    data = CaptionedImages(limit=10)
    for index in (0, 7, 9):
        (image, caption), found = data.selection.read(index), cache[index]
        assert found.caption == caption
        prompt = target.encode([found.caption], guidance=True)
        tokens = target.encode_images(image[None])
        output = target.forced(prompt, tokens)
        for g in range(2):
            held = torch.cat([prompt.mask[0, g], torch.ones(16, dtype=torch.bool)])
            torch.testing.assert_close(found.hidden_states[g], output.hidden_states[0, g][held], atol=1e-4, rtol=1e-4)
            assert torch.equal(found.token_ids[g][-16:].long(), tokens[0])
        torch.testing.assert_close(found.context, prompt.inputs["context"][0], atol=1e-4, rtol=1e-4)
    logits = (
        cache[0].hidden_states[1][-17:-1] @ cache.ends()["lm_head"].T
    )  # states and ends suffice for the target's law
    prompt = target.encode([cache[0].caption], guidance=True)
    forced = target.forced(prompt, cache[0].token_ids[1][-16:].long()[None]).logits[0, 1]
    torch.testing.assert_close(logits, forced, atol=1e-4, rtol=1e-4)


def test_an_interrupted_extraction_resumes_to_equal_shards(checkpoint, extracted, tmp_path, capsys):
    with pytest.raises(ValueError, match="lacks 2 of 3 shards"):
        extract(arguments(checkpoint, tmp_path / "cache", "--trainer.limit_predict_batches", "3"))
    begun = (tmp_path / "cache" / "shard-00000.safetensors").stat().st_mtime_ns
    extract(arguments(checkpoint, tmp_path / "cache"))
    assert hashes(tmp_path / "cache") == hashes(extracted)
    assert (tmp_path / "cache" / "shard-00000.safetensors").stat().st_mtime_ns == begun  # not written again
    extract(arguments(checkpoint, tmp_path / "cache"))  # nothing left to do
    with pytest.raises(ValueError, match="dtype = 'float32', not 'bfloat16'"):
        extract(arguments(checkpoint, tmp_path / "cache", "--model.cache_dtype", "bfloat16"))


def test_the_recipe_extracts(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    where = ["--model.init_args.cache", str(tmp_path / "cache"), "--model.init_args.target", str(checkpoint)]
    extract(["--config", "recipes/emoji/extract.yaml", *where, "--data.init_args.limit", "5"])
    cache = FeatureCache(tmp_path / "cache")
    cache.verify()
    assert len(cache) == 5 and cache.settings.branches == 2 and cache.settings.dtype == "bfloat16"


def test_the_target_can_draw_the_images_itself(checkpoint, tmp_path):
    from coolsd.decode import generate
    from coolsd.sampling import Sampling

    extract(arguments(checkpoint, tmp_path, "--model.source", "self-distill", "--model.sampling.guidance", "2"))
    cache, target = FeatureCache(tmp_path), load_target(checkpoint, "cpu", "float32")
    drawn = generate(target, [cache[6].caption], sampling=Sampling(guidance=2.0), rows=[6], decode_images=False)
    assert torch.equal(cache[6].token_ids[0][-16:].long(), drawn.tokens[0])


def test_a_dry_run_says_the_size_and_writes_nothing(checkpoint, tmp_path, capfd):
    with pytest.raises(SystemExit) as left:
        extract(arguments(checkpoint, tmp_path / "cache", "--dry-run"))
    assert not left.value.code and not list(tmp_path.iterdir())
    assert "10 samples of up to 0.0" in capfd.readouterr().out


def test_a_share_of_the_captions_is_null(checkpoint, tmp_path):
    more = ["--model.guidance", "false", "--model.null_fraction", "0.4"]
    extract(arguments(checkpoint, tmp_path, *more))
    cache, target = FeatureCache(tmp_path), load_target(checkpoint, "cpu", "float32")
    assert cache.settings.branches == 1 and cache.settings.settings["null_fraction"] == 0.4
    branches = []
    for index in range(10):
        found = cache[index]
        prompt = target.encode([found.caption], guidance=True)
        output = target.forced(prompt, found.token_ids[0][-16:].long()[None]).hidden_states[0, :, -16:]
        near = [torch.allclose(found.hidden_states[0][-16:], output[g], atol=1e-4) for g in range(2)]
        assert sum(near) == 1
        branches.append(near.index(True))
    chance = counter_uniforms(0, torch.arange(10), 0, 1, 1)[0, :, 0]
    assert branches == (chance < 0.4).long().tolist() and 0 < sum(branches) < 10
    with pytest.raises(ValueError, match="null_fraction goes with guidance false"):
        extract(arguments(checkpoint, tmp_path / "x", "--model.null_fraction", "0.1"))


@pytest.mark.parametrize(
    ("states", "more"),
    [
        ({}, []),
        ({"layers": [1, 2]}, ["--model.layers", "[1,2]"]),
        ({"guidance": False, "null_fraction": 0.4}, ["--model.guidance", "false", "--model.null_fraction", "0.4"]),
        ({"source": "self-distill", "draw_seed": 3}, ["--model.source", "self-distill", "--model.seed", "3"]),
    ],
)
def test_online_features_are_those_of_a_cache(checkpoint, tmp_path, states, more):
    extract(arguments(checkpoint, tmp_path, *more))
    same = {"batch_size": 3, "held_out": 0.2, "seed": 5}
    cached = FeatureModule(str(tmp_path), **same)
    online = OnlineFeatures(target=str(checkpoint), dtype="float32", limit=10, **same, **states)
    for module in (cached, online):
        module.setup("fit")
    assert online.held_out_captions(2) == cached.held_out_captions(2)
    for name, tensor in cached.cache.ends().items():
        assert torch.equal(online.cache.ends()[name].to(tensor.dtype), tensor)
    ours, theirs = online.cache.settings, cached.cache.settings
    assert replace(ours, samples_per_shard=theirs.samples_per_shard) == theirs
    for loader in ("train_dataloader", "val_dataloader"):
        batches = list(zip(getattr(cached, loader)(), getattr(online, loader)(), strict=True))
        assert batches
        for one, other in batches:
            assert one.keys() == other.keys() and one["captions"] == other["captions"]
            for name in one.keys() - {"captions"}:
                apart = (other[name].float() - one[name].float()).norm()
                assert one[name].shape == other[name].shape and apart <= 1e-5 * one[name].float().norm()


def test_a_head_of_several_layers_trains_on_their_states(checkpoint, tmp_path):
    extract(arguments(checkpoint, tmp_path / "cache", "--model.layers", "[1,2]"))
    cache, target = FeatureCache(tmp_path / "cache"), load_target(checkpoint, "cpu", "float32")
    prompt, found = target.encode([cache[3].caption], True), cache[3]
    target.layers = (1, 2)
    output = target.forced(prompt, found.token_ids[0][-16:].long()[None])
    joined = torch.cat([output.layers[layer][0, 1] for layer in (1, 2)], -1)[-17:]
    torch.testing.assert_close(found.layers[1][-17:], joined, atol=1e-4, rtol=1e-4)
    command = ["fit", "--model", "training.draft.DraftTraining", "--data", "data.loader.FeatureModule"]
    command += ["--data.cache", str(tmp_path / "cache"), "--data.batch_size", "2", "--trainer.max_steps", "3"]
    command += ["--model.guidance", "2", "--model.rollout", "2", "--model.feature_weight", "0", "--trainer.accelerator"]
    assert cli.main([*command, "cpu", "--out", str(tmp_path / "run"), "--trainer.enable_progress_bar", "false"]) == 0
    head = load_head(tmp_path / "run" / "export" / "draft", target)
    assert isinstance(head, MultiLayerHead) and head.config.layers == (1, 2)


def test_online_features_leave_out_what_a_cache_leaves_out(checkpoint, tmp_path):
    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            if index % 4 == 1:
                raise BadItem("empty caption", "", f"item {index}")
            return {"image": torch.full((3, 64, 64), 20 * index, dtype=torch.uint8), "caption": f"a b {index}"}

    online = OnlineFeatures(Words(), str(checkpoint), dtype="float32", batch_size=2)
    online.setup("fit")
    kept = [index for index in Selection(Words(), None).chosen if index % 4 != 1]
    assert [online.cache[i].caption for i in range(len(online.cache))] == [f"a b {index}" for index in kept]


# -------------------------------------------------------------------------------------------- scaled storage


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.01), ("float8", 0.04)])
def test_scaled_states_come_back_within_their_error(tmp_path, rng, dtype, error):
    settings = replace(SETTINGS, dtype=dtype, hidden_size=64, context=True)
    channels = torch.logspace(-2, 2, 64)  # some channels of a transformer are far larger than others

    def states(index, found):
        sizes = (0.1, 10.0)  # as tokens may be
        hidden = tuple(
            size * channels * torch.randn(len(ids), 64, generator=rng)
            for size, ids in zip(sizes, found.token_ids, strict=True)
        )
        context = channels * torch.randn(2, settings.image_tokens + 1, 64, generator=rng)
        made.append(replace(found, hidden_states=hidden, context=context))
        return made[-1]

    made = []
    cache = write(tmp_path, settings, change=states).finish()
    cache.verify()
    apart = []
    for index, original in enumerate(made):
        found = cache[index]
        assert {states.dtype for states in (*found.hidden_states, found.context)} == {torch.bfloat16}
        for ours, theirs in zip(found.hidden_states, original.hidden_states, strict=True):
            apart.append((ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1))
        assert (found.context.float() - original.context).norm() < error * original.context.norm()
    mean = float(torch.cat(apart).mean())
    assert 0.1 * error < mean < error and abs(cache.relative_error - mean) < 0.2 * error
    assert cache.bytes < 0.75 * write(tmp_path / "b", replace(settings, dtype="bfloat16"), change=states).finish().bytes


def test_a_state_of_zeros_stays_zero(tmp_path):
    zeros = lambda index, found: replace(found, hidden_states=tuple(0 * h for h in found.hidden_states))  # noqa: E731
    cache = write(tmp_path, replace(SETTINGS, dtype="int8"), change=zeros).finish()
    assert not any(states.any() for states in cache[3].hidden_states)


# ---------------------------------------------------------------------------------------------- many processes


def extract_quietly(command):
    torch.set_num_threads(1)
    extract(command)


def write_what_is_missing(folder):
    torch.set_num_threads(1)
    writer = FeatureCacheWriter(folder, replace(SETTINGS, samples=201, samples_per_shard=5))
    for shard in range(writer.settings.shards):
        if not writer.is_finished(shard):
            writer.write_shard(shard, [sample(i) for i in writer.settings.samples_of(shard)])
    writer.write_ends(ENDS)
    writer.finish()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["writer", "extraction"])
def test_what_is_killed_again_and_again_ends_as_if_it_never_was(checkpoint, tmp_path, what):
    """Kills at random moments of 41 shards, each of which goes on where the last one died, then a whole run: 30 of the
    writing alone, 5 of an extraction."""
    context = multiprocessing.get_context("forkserver")  # children of a process that has imported everything already
    context.set_forkserver_preload(["tests.test_features", "lightning"])
    many = ["--model.samples_per_shard", "5", "--data.batch_size", "1", "--data.limit", "201"]

    def started(folder):
        work, of = (write_what_is_missing, folder), (extract_quietly, arguments(checkpoint, folder, *many))
        function, argument = work if what == "writer" else of
        process = context.Process(target=function, args=(argument,))
        process.start()
        return process

    chance, alive, readable, kills = random.Random(0), 0, 0, 30 if what == "writer" else 5
    for kill in range(kills):
        process = started(tmp_path / "cache")
        goal = len(hashes(tmp_path / "cache")) + (chance.randint(0, 3) if what == "extraction" else kill % 2)
        while process.is_alive() and (
            len(hashes(tmp_path / "cache")) < goal or not (tmp_path / "cache" / "settings.json").exists()
        ):
            process.join(0.001)
        process.join(chance.uniform(0, 0.1 if what == "extraction" else 0.005))  # anywhere within a shard
        alive += process.is_alive()
        process.kill()
        process.join()
        for path in (tmp_path / "cache").glob("shard-*.sha256"):  # a reader amid it: what counts is whole
            digest, name = path.read_text().split()
            assert sha256(path.with_name(name)) == digest
            readable += 1
    for folder in ("cache", "straight"):
        process = started(tmp_path / folder)
        process.join()
    assert alive > kills // 2 and readable > kills
    assert hashes(tmp_path / "cache") == hashes(tmp_path / "straight") and len(hashes(tmp_path / "cache")) == 41
    assert not list((tmp_path / "cache").glob(".*.part"))


@pytest.mark.slow
def test_processes_extract_equal_shards_however_many_and_by_whatever_strategy(checkpoint, tmp_path):
    """With one thread each: float32 sums depend on how many threads share them. 65 samples: an odd number of passes."""
    overlay = yaml.safe_load((ROOT / "recipes" / "strategies" / "deepspeed_zero3_offload.yaml").read_text())
    (tmp_path / "zero3.json").write_text(json.dumps(overlay["trainer"]["strategy"]["init_args"]["config"]))
    zero = ["training.strategies.DeepSpeedCPUStrategy", "--trainer.strategy.config", str(tmp_path / "zero3.json")]
    context = multiprocessing.get_context("forkserver")
    begun = ("--trainer.limit_predict_batches", "9")
    for name, more in (("one", ()), ("begun", begun)):
        words = [*arguments(checkpoint, tmp_path / name, *more), "--data.limit", "65"]
        process = context.Process(target=extract_quietly, args=(words,))
        process.start()
        process.join()
        assert (process.exitcode == 0) == (not more)
    assert 0 < len(hashes(tmp_path / "begun")) < len(hashes(tmp_path / "one")) == 17
    ddp = subprocess.run([sys.executable, *extraction(checkpoint, tmp_path / "ddp", 2, ["ddp"])], cwd=ROOT,
                         capture_output=True, text=True, timeout=900, env=one_thread())  # fmt: skip
    assert ddp.returncode == 0, ddp.stderr[-3000:]
    # the two nodes go on, with ZeRO-3, where one process without it stopped
    assert in_two_nodes(extraction(checkpoint, tmp_path / "begun", 1, zero, "--trainer.num_nodes", "2")) == [0, 0]
    for name in ("ddp", "begun"):
        FeatureCache(tmp_path / name).verify()
        assert hashes(tmp_path / name) == hashes(tmp_path / "one")


def in_two_nodes(command):
    """Exit codes of the command under torchrun as two nodes of one process each, here both on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", port, "--node_rank"]
    nodes = [subprocess.Popen([*launcher, rank, *command], cwd=ROOT, env=one_thread()) for rank in "01"]
    try:
        return [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def extraction(checkpoint, folder, devices, strategy, *more):
    """What follows `python` to extract 65 samples."""
    command = ["-m", "coolsd.cli", "extract", *arguments(checkpoint, folder), "--trainer.devices", str(devices)]
    return [*command, "--trainer.strategy", *strategy, "--data.limit", "65", *more]


def one_thread():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_throughput_is_told_as_ratios(checkpoint, capsys):
    found = throughput(str(checkpoint), samples=24, extraction_batch=4, training_batch=2, workers=1, dtype="float32")
    said = capsys.readouterr().out
    assert all(value > 0 and name in said for name, value in found.items())
    assert found["extraction_over_bare"] < found["extraction_over_bare_and_encoding"] < 1.5
    assert 0 < found["step_over_bare"] < 1.5


def test_a_large_cache_opens_by_its_manifest_alone(tmp_path):
    """100,000 samples in 1,563 shards: what is read on opening does not grow with what is in them."""
    settings = replace(SETTINGS, samples=100_000, samples_per_shard=64, image_tokens=1, prompt_slots=1, branches=1)
    one = CachedSample("", (torch.zeros(2, 4),), (torch.tensor([-1, 0]),))
    writer = FeatureCacheWriter(tmp_path, settings)
    writer.write_shard(0, [one] * 64)
    writer.write_shard(settings.shards - 1, [one] * 32)
    first, note = tmp_path / "shard-00000.safetensors", (tmp_path / "shard-00000.safetensors.sha256").read_text()
    for shard in range(1, settings.shards - 1):
        path = tmp_path / f"shard-{shard:05d}.safetensors"
        os.link(first, path)
        path.with_name(f"{path.name}.sha256").write_text(note.replace(first.name, path.name))
    writer.write_ends(ENDS)
    cache = writer.finish()
    tracemalloc.start()
    cache = FeatureCache(tmp_path)
    assert len(cache) == 100_000 and tracemalloc.get_traced_memory()[1] < 20e6 and not cache._open
    tracemalloc.stop()
    for index in range(0, 100_000, 97):  # more shards than are kept open at once
        assert torch.equal(cache[index].hidden_states[0], torch.zeros(2, 4).bfloat16())
    assert len(cache._open) == 512
