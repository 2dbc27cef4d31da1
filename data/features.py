"""FeatureCache: a target's hidden states on disk, for training a draft head without the target.

Knows files, shards and hashes; knows no model and no image.  A cache is a folder:

    manifest.json              what was extracted, from what, and the shards with their sha256; written last
    settings.json              the same without the shards; written first, so that a resumed run can compare
    ends.safetensors           what the head needs of the target: embedding, norm, lm_head, rotary table, ...
    shard-00000.safetensors    items [0, S), and beside it shard-00000.safetensors.sha256 (for `sha256sum -c`)
    skipped.jsonl              items that could not be used, with the reason

A shard holds one row per (sample, branch), samples in order, branches inside a sample, no padding:

    hidden_states [tokens, H]   | caption slots | image tokens |   after the target's final norm
    token_ids     [tokens]      | -1 -1 -1 ...  | 17 4 99 ...  |
    offsets       [samples * G + 1], caption_bytes [bytes], caption_offsets [samples + 1]
    context       [samples * G, T + 1, H], where the settings say so: see coolsd.interfaces.Prompt
    layers        [tokens, k H], where the settings name k layers of the target: what came out of them, side by side
    skipped       [bytes], the lines of this shard's skipped items

int8 and float8 hold a state x as codes; read back, x is a bfloat16 again:

    x[t, c] = code[t, c] * scale[t] * channels[c]     NAME_scale float32 [tokens], NAME_channels float32 [H]
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coolsd.checkpoint import read_json, sha256, write_whole

SCHEMA = 1
LARGEST_MANIFEST = 1 << 28  # bytes
OPEN = 512  # shards that a reader keeps mapped: a system lets a process map some thousand files
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
PEAK = {"int8": 127.0, "float8": 448.0}  # largest code of the scaled ones
LARGEST = 1 << 40  # of any count in a manifest; a larger one is a broken or hostile file


@dataclass(frozen=True)
class CacheSettings:
    """All that decides the bytes of a cache.  Counts are >= 1.

    target, dataset: fingerprints. settings: how it was extracted (source, sampling, ...), JSON values.
    samples: items of the dataset, with those that could not be used. layers: of the target, numbered from 1.
    prompt_slots P, image_tokens T, codebook_size V, hidden_size H, branches G as in coolsd.interfaces.
    """

    target: str
    dataset: str
    hidden_size: int
    prompt_slots: int
    image_tokens: int
    codebook_size: int
    branches: int
    samples: int
    samples_per_shard: int
    dtype: str = "bfloat16"
    context: bool = False
    layers: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", "dataset"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"feature cache: {name} must be a string, not {getattr(self, name)!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < LARGEST:
                raise ValueError(f"feature cache: {name} is {value!r}, but must be an integer >= 1")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"feature cache: dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if not isinstance(self.context, bool):
            raise ValueError(f"feature cache: context is {self.context!r}, but must be true or false")
        numbers = self.layers if isinstance(self.layers, (list, tuple)) else [None]
        if len(numbers) > 16 or not all(type(layer) is int and 1 <= layer < LARGEST for layer in numbers):
            raise ValueError(f"feature cache: layers is {self.layers!r}, but must be at most 16 integers >= 1")
        object.__setattr__(self, "layers", tuple(numbers))
        if not isinstance(self.settings, dict):
            raise ValueError(f"feature cache: settings is {self.settings!r}, but must be an object")

    @property
    def shards(self) -> int:
        return -(-self.samples // self.samples_per_shard)

    @property
    def bytes_per_sample(self) -> int:
        """Upper bound (every caption slot in use), captions and offsets aside."""
        state = self.hidden_size * DTYPES[self.dtype].itemsize + (4 if self.dtype in PEAK else 0)
        return self._bytes(state)

    @property
    def memory_per_sample(self) -> int:
        """The same read into memory."""
        return self._bytes(self.hidden_size * (2 if self.dtype in PEAK else DTYPES[self.dtype].itemsize))

    def _bytes(self, state: int) -> int:
        slots = self.prompt_slots + self.image_tokens
        row = slots * ((1 + len(self.layers)) * state + 4) + self.context * (self.image_tokens + 1) * state
        return self.branches * row

    def samples_of(self, shard: int) -> range:
        return range(shard * self.samples_per_shard, min((shard + 1) * self.samples_per_shard, self.samples))


_COUNTS = tuple(f.name for f in fields(CacheSettings) if f.type == "int")


@dataclass(frozen=True)
class CachedSample:
    """One captioned image: for each of the G branches hidden_states [n, H] and token_ids [n] (-1 = caption slot).

    context: [G, T + 1, H] or None. layers: for each branch [n, k H], or none.
    """

    caption: str
    hidden_states: tuple[Tensor, ...]
    token_ids: tuple[Tensor, ...]
    context: Tensor | None = None
    layers: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """An item of the dataset that could not be used; item: its name, reason: one of few, detail: more about it."""

    index: int
    item: str
    reason: str
    detail: str = ""


class FeatureCacheWriter:
    """Begins a cache, or continues an interrupted one.  Several processes may write one, each its own shards."""

    def __init__(self, folder: str | Path, settings: CacheSettings) -> None:
        """Raises ValueError where the folder was begun with other settings, or the disk is too small."""
        self.folder, self.settings = Path(folder), settings
        self._lock: IO[str] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = self.folder / "settings.json"
        ours = json.loads(_json({"schema": SCHEMA, **asdict(settings)}))
        if begun.exists():
            _refuse_other_settings(self.folder, read_json(begun, LARGEST_MANIFEST), ours)
        elif any(path.name != begun.name and path.suffix not in (".part", ".lock") for path in self.folder.iterdir()):
            raise ValueError(f"{self.folder} holds other files and is no feature cache; choose an empty folder")
        self._check_disk()
        if not begun.exists():
            _write(begun, _json(ours))

    @property
    def bytes_written(self) -> int:
        """In shards, those of other processes included."""
        return sum(path.stat().st_size for path in self.folder.glob("shard-*.safetensors"))

    def _check_disk(self) -> None:
        there = [re.fullmatch(r"shard-(\d+)\.safetensors", path.name) for path in self.folder.glob("shard-*")]
        samples = self.settings.samples - sum(len(self.settings.samples_of(int(name[1]))) for name in there if name)
        need = int(1.05 * samples * self.settings.bytes_per_sample)
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise ValueError(
                f"the cache needs up to {_size(need)} in {self.folder}, but {_size(free)} are free; "
                f"extract fewer than {self.settings.samples} samples, or choose another folder"
            )

    def lock(self) -> None:
        """Refuse a second `extract` in this folder until `release`; one process of a run calls it."""
        import fcntl  # not on Windows

        file = (self.folder / "extract.lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"process {file.read().strip()} is extracting to {self.folder}; wait for it") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._lock = file

    def release(self) -> None:
        """Let go of `lock`; harmless without it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_finished(self, shard: int) -> bool:
        """Whether the shard is there whole: its hash file stands and matches its bytes."""
        path = self.folder / shard_name(shard)
        note = _hash_path(path)
        return path.exists() and note.exists() and note.read_text().split(" ")[0] == sha256(path)

    def write_ends(self, ends: Mapping[str, Tensor]) -> None:
        """The target's tensors that a head needs, as target.ends() gives them."""
        _check_ends(ends, self.settings, self.folder / "ends.safetensors")
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in ends.items()}  # may share memory
        _write(self.folder / "ends.safetensors", save(own))

    def write_shard(self, shard: int, samples: Sequence[CachedSample], skipped: Sequence[Skipped] = ()) -> None:
        """All samples of the shard, in order, to a temporary name, then fsync and rename; then the hash file.

        Raises ValueError where a sample has the wrong shape or a number that is not finite.
        """
        settings, left_out = self.settings, {one.index for one in skipped}
        indices = [index for index in settings.samples_of(shard) if index not in left_out]
        if len(samples) != len(indices):
            raise ValueError(f"shard {shard} takes {len(indices)} samples, not {len(samples)}")
        for index, sample in zip(indices, samples, strict=True):
            check_sample(index, sample, settings)
        rows = [row for sample in samples for row in sample.hidden_states]
        captions = [sample.caption.encode(errors="replace") for sample in samples]
        states = {"hidden_states": _joined(rows, settings.hidden_size)}
        if settings.context:
            contexts = [sample.context for sample in samples if sample.context is not None]
            states["context"] = _joined(contexts, settings.image_tokens + 1, settings.hidden_size)
        if settings.layers:
            layers = [row for sample in samples for row in sample.layers]
            states["layers"] = _joined(layers, len(settings.layers) * settings.hidden_size)
        ids = [row for sample in samples for row in sample.token_ids]
        tensors = {
            "token_ids": torch.cat([torch.zeros(0, dtype=torch.long), *ids]).to("cpu", torch.int32),
            "offsets": _offsets([len(row) for row in rows]),
            "caption_bytes": _bytes_tensor(b"".join(captions)),
            "caption_offsets": _offsets([len(caption) for caption in captions]),
        }
        if skipped:
            tensors["skipped"] = _bytes_tensor(b"".join(_line(asdict(one)) for one in skipped))
        for name, values in states.items():
            tensors |= _stored(name, values.to("cpu"), settings.dtype)
            if settings.dtype == "float16" and not tensors[name].isfinite().all():
                raise ValueError(f"shard {shard}: {name} overflow float16; extract with --model.cache_dtype bfloat16")
        path = self.folder / shard_name(shard)
        _hash_path(path).unlink(missing_ok=True)
        content = save(tensors)
        try:
            _write(path, content)
            _write(_hash_path(path), f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ValueError(
                f"no space for {path} of {_size(len(content))}; make room and run the same command again: it goes on "
                "with this shard"
            ) from None

    def check_skipped(self, skipped: Sequence[Skipped], most: float) -> None:
        """Raises ValueError where this is more than the fraction `most` of all items, and lists them."""
        self._check_lines([_line(asdict(one)) for one in skipped], most)

    def _check_lines(self, lines: Sequence[bytes], most: float) -> None:
        if len(lines) > most * self.settings.samples:
            _write(self.folder / "skipped.jsonl", b"".join(lines))
            raise ValueError(
                f"{len(lines)} of {self.settings.samples} items cannot be used: {_listed(_reasons(lines))}; see "
                f"{self.folder / 'skipped.jsonl'}; raise --max-bad-fraction above {most:g} to go on without them"
            )

    def finish(self, max_bad_fraction: float = 1.0, earlier_error: float = 0.0) -> FeatureCache:
        """Write the manifest, once all shards and the ends are there; one process calls it, last of all.

        earlier_error: relative error of what was written here, against its own original. Raises ValueError where more
        than a fraction of all items was skipped.
        """
        missing = [i for i in range(self.settings.shards) if not _hash_path(self.folder / shard_name(i)).exists()]
        if missing:
            raise ValueError(f"{self.folder} lacks {len(missing)} of {self.settings.shards} shards; run extract again")
        paths = [self.folder / shard_name(i) for i in range(self.settings.shards)]
        ends = self.folder / "ends.safetensors"
        kept, lines, errors = [], [], []
        for path in paths:
            with _opened(path) as file:
                kept.append(file.get_slice("caption_offsets").get_shape()[0] - 1)
                names = file.keys()
                skipped = bytes(file.get_tensor("skipped").tolist()) if "skipped" in names else b""
                lines += skipped.splitlines(keepends=True)
                errors += file.get_tensor("error").tolist() if "error" in names and kept[-1] else []
        if not sum(kept):
            raise ValueError(f"none of {self.settings.samples} items could be used: {_listed(_reasons(lines))}")
        self._check_lines(lines, max_bad_fraction)
        (self.folder / "skipped.jsonl").unlink(missing_ok=True)
        if lines:
            _write(self.folder / "skipped.jsonl", b"".join(lines))
        manifest = {
            "schema": SCHEMA,
            **asdict(self.settings),
            "ends": {"file": ends.name, "bytes": ends.stat().st_size, "sha256": sha256(ends)},
            "skipped": _reasons(lines),
            "shards": [
                {"file": path.name, "samples": samples, "bytes": path.stat().st_size,
                 "sha256": _hash_path(path).read_text().split(" ")[0]}
                for path, samples in zip(paths, kept, strict=True)
            ],
        }  # fmt: skip
        if errors:  # of int8 and float8: mean of |x - what is read| / |x| over the tokens of a shard, then over shards
            manifest["relative_error"] = math.hypot(sum(errors) / len(errors), earlier_error)
        _write(self.folder / "manifest.json", _json(manifest))
        for left_over in self.folder.glob(".*.part"):
            left_over.unlink()
        return FeatureCache(self.folder)


class FeatureCache:
    """A finished cache, read through memory maps.  Opening compares names and sizes; `verify` rehashes."""

    def __init__(self, folder: str | Path) -> None:
        """Raises FileNotFoundError without a manifest, ValueError where it is malformed or does not fit the files."""
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.exists():
            begun = (self.folder / "settings.json").exists()
            why = "an unfinished feature cache; run extract again, it resumes" if begun else "no feature cache"
            raise FileNotFoundError(f"{self.folder} is {why} (no manifest.json)")
        manifest = read_json(path, LARGEST_MANIFEST)
        self.settings = _settings(manifest, path)
        shards = manifest.get("shards")
        if not isinstance(shards, list) or len(shards) != self.settings.shards:
            found = len(shards) if isinstance(shards, list) else "no"
            raise ValueError(f"{path} lists {found} shards, but its samples make {self.settings.shards}; extract again")
        files = [*shards, manifest.get("ends")]
        names = [*(shard_name(i) for i in range(len(shards))), "ends.safetensors"]
        self._files = [_checked_file(self.folder, entry, name) for entry, name in zip(files, names, strict=True)]
        self._starts = list(accumulate((_kept(path, i, entry, self.settings) for i, entry in enumerate(shards)),
                                       initial=0))  # fmt: skip
        self.skipped, self.relative_error = manifest.get("skipped", {}), manifest.get("relative_error")
        if not isinstance(self.skipped, dict) or not all(type(count) is int for count in self.skipped.values()):
            raise ValueError(
                f"{path} has skipped {str(self.skipped)[:80]}, but must have counts by reason; extract again"
            )
        error = self.relative_error
        if error is not None and not (type(error) in (int, float) and 0 <= error < 1e9):  # no NaN, either
            raise ValueError(
                f"{path} has relative_error {str(self.relative_error)[:80]}, but must have a number; extract again"
            )
        self._open: dict[int, _Shard] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> CachedSample:
        """Raises ValueError, naming the file, where a shard's content is malformed."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a feature cache with {len(self)} samples")
        shard = bisect_right(self._starts, index) - 1
        if shard not in self._open:
            while len(self._open) >= OPEN:
                self._open.pop(next(iter(self._open)))
            samples = self._starts[shard + 1] - self._starts[shard]
            self._open[shard] = _Shard(self._files[shard][0], self.settings, samples)
        return self._open[shard].sample(index - self._starts[shard])

    def read(self, indices: Sequence[int]) -> list[CachedSample]:
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # maps stay behind when a loader's worker process takes a copy

    @property
    def bytes(self) -> int:
        return sum(size for _, size, _ in self._files)

    def ends(self) -> dict[str, Tensor]:
        """The target's embedding [V, H], norm, lm_head [V, H] and whatever else target.ends() gave."""
        path = self._files[-1][0]
        with _opened(path) as file:
            ends = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_ends(ends, self.settings, path)
        return ends

    def verify(self) -> None:
        """Rehash every file and read every row; raises ValueError naming the first bad file."""
        for path, _, expected in self._files:
            if sha256(path) != expected:
                raise ValueError(f"{path} does not match its sha256; delete it with its .sha256 file and extract again")
        self.ends()
        for index in range(len(self)):
            check_sample(index, self[index], self.settings)


class _Shard:
    """One open shard file."""

    def __init__(self, path: Path, settings: CacheSettings, samples: int) -> None:
        self.path, self.settings = path, settings
        self.file = _opened(path)
        rows, longest = samples * settings.branches, settings.prompt_slots + settings.image_tokens
        self._expect("offsets", "I64", [rows + 1])
        self._expect("caption_offsets", "I64", [samples + 1])
        self.offsets = self.file.get_tensor("offsets").tolist()
        self.caption_offsets = self.file.get_tensor("caption_offsets").tolist()
        self._ascending("offsets", self.offsets, settings.image_tokens + 1, longest)
        self._ascending("caption_offsets", self.caption_offsets, 0, LARGEST)
        self._expect("token_ids", "I32", [self.offsets[-1]])
        self._expect("caption_bytes", "U8", [self.caption_offsets[-1]])
        self.hidden_states = self._states("hidden_states", [self.offsets[-1], settings.hidden_size])
        self.context = None
        if settings.context:
            self.context = self._states("context", [rows, settings.image_tokens + 1, settings.hidden_size])
        self.layers = None
        if settings.layers:
            self.layers = self._states("layers", [self.offsets[-1], len(settings.layers) * settings.hidden_size])
        self.token_ids = self.file.get_tensor("token_ids")
        if len(self.token_ids) and not (
            int(self.token_ids.min()) >= -1 and int(self.token_ids.max()) < settings.codebook_size
        ):
            raise ValueError(f"{path}: token_ids leave -1 .. {settings.codebook_size - 1}; extract this shard again")

    def _states(self, name: str, shape: list[int]) -> Callable[[slice], Tensor]:
        """Reads a slice of the rows of a tensor, as floating-point numbers."""
        dtype = self.settings.dtype
        self._expect(name, _SAFETENSORS_NAMES[dtype], shape)
        codes = self.file.get_slice(name)
        if dtype not in PEAK:
            return codes.__getitem__
        self._expect(f"{name}_scale", "F32", shape[:-1])
        self._expect(f"{name}_channels", "F32", shape[-1:])
        scale, channels = (self.file.get_tensor(f"{name}_{part}") for part in ("scale", "channels"))
        return lambda rows: (codes[rows].float() * scale[rows][..., None] * channels).bfloat16()

    def sample(self, index: int) -> CachedSample:
        branches = self.settings.branches
        bounds = self.offsets[index * branches : (index + 1) * branches + 1]
        spans = [slice(start, stop) for start, stop in pairwise(bounds)]
        text = self.file.get_slice("caption_bytes")[self.caption_offsets[index] : self.caption_offsets[index + 1]]
        return CachedSample(
            bytes(text.tolist()).decode(errors="replace"),
            tuple(self.hidden_states(span) for span in spans),
            tuple(self.token_ids[span] for span in spans),
            None if self.context is None else self.context(slice(index * branches, (index + 1) * branches)),
            () if self.layers is None else tuple(self.layers(span) for span in spans),
        )

    def _expect(self, name: str, dtype: str, shape: list[int]) -> None:
        if name not in self.file.keys():  # noqa: SIM118
            raise ValueError(f"{self.path} lacks the tensor {name}; extract this shard again")
        found = self.file.get_slice(name)
        if found.get_dtype() != dtype or found.get_shape() != shape:
            raise ValueError(
                f"{self.path}: {name} is {found.get_dtype()} {found.get_shape()}, but the manifest says {dtype} {shape}"
            )

    def _ascending(self, name: str, offsets: list[int], least: int, most: int) -> None:
        steps = [b - a for a, b in pairwise(offsets)]
        if offsets[0] != 0 or not all(least <= step <= most for step in steps):
            raise ValueError(f"{self.path}: {name} must rise from 0 by {least} to {most}; extract this shard again")


_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8", "float8": "F8_E4M3"}


def _stored(name: str, values: Tensor, dtype: str) -> dict[str, Tensor]:
    """Tensors that hold `values` [..., H] in a shard. The scaled dtypes divide by the spread of each channel in this
    shard, then by the largest number of each token; their mean relative error of a token is kept, too."""
    if dtype not in PEAK:
        return {name: values.to(DTYPES[dtype])}
    values = values.float()
    spread = values.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    channels = (values / spread).flatten(0, -2).pow(2).mean(0).sqrt()
    channels = torch.where(channels > 0, channels, 1.0)  # nan of no rows, too
    scale = ((values / channels).abs().amax(-1, keepdim=True) / PEAK[dtype]).clamp(min=1e-30)
    codes = values / channels / scale
    codes = (codes.round() if dtype == "int8" else codes).to(DTYPES[dtype])
    again = codes.float() * scale * channels
    error = (again - values).norm(dim=-1) / values.norm(dim=-1).clamp(min=1e-30)
    found = {name: codes, f"{name}_scale": scale[..., 0].contiguous(), f"{name}_channels": channels}
    return {**found, "error": error.mean()[None]} if name == "hidden_states" else found


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def merge(folders: Sequence[str | Path], out: str | Path) -> FeatureCache:
    """One cache of the samples of several, mixed, each as far from the end as in its own: the last ones, which training
    holds out, are the last of each, so a head that was trained on one of them goes on to be measured on samples that it
    has not met (but for rounding, one of each cache). Resumes like an extraction.

    Raises ValueError where they differ in the target or in the shape of their samples.
    """
    caches = [FeatureCache(folder) for folder in folders]
    if len(caches) < 2:
        raise ValueError(f"{len(caches)} feature cache to merge; give at least two")
    first = caches[0].settings
    for cache in caches[1:]:
        for name in ("target", "hidden_size", "prompt_slots", "image_tokens", "codebook_size", "branches", "dtype",
                     "context", "layers"):  # fmt: skip
            one, other = getattr(first, name), getattr(cache.settings, name)
            if one != other:
                raise ValueError(f"{caches[0].folder} has {name} {one!r}, but {cache.folder} has {other!r}")
    origins = [
        {"dataset": cache.settings.dataset, "samples": len(cache), **cache.settings.settings} for cache in caches
    ]
    order = "each as far from the end as in its own"  # others came before it
    name = hashlib.sha256(json.dumps([*origins, order], sort_keys=True).encode()).hexdigest()[:12]
    places = [(cache, index) for cache in caches for index in range(len(cache))]
    places.sort(key=lambda place: (place[1] + 0.5) / len(place[0]))
    settings = replace(
        first, dataset=f"merge@{name}", samples=len(places), settings={"merged": origins, "order": order}
    )
    writer = FeatureCacheWriter(out, settings)
    writer.lock()
    try:
        for shard in range(settings.shards):
            if not writer.is_finished(shard):
                chosen = [places[i] for i in settings.samples_of(shard)]
                writer.write_shard(shard, [cache[index] for cache, index in chosen])
        writer.write_ends(caches[0].ends())
        return writer.finish(earlier_error=max(cache.relative_error or 0.0 for cache in caches))
    finally:
        writer.release()


def main(args: list[str]) -> None:
    """`coolsd cache info FOLDER`, `... verify FOLDER` and `... merge FOLDER FOLDER ... --out FOLDER`."""
    from coolsd.cli import argument_parser

    parser = argument_parser("cache", main.__doc__ or "")
    what = "print what it holds, check every byte, or mix the samples of several"
    parser.add_argument("action", choices=("info", "verify", "merge"), help=what)
    parser.add_argument("folders", type=str, nargs="+", help="folders that `coolsd extract` wrote")
    parser.add_argument("--out", type=str, help="folder that merge writes")
    options = parser.parse_args(args)
    if options.action == "merge":
        if options.out is None:
            raise ValueError("merge needs --out, the folder to write")
        cache = merge(options.folders, options.out)
    elif len(options.folders) > 1:
        raise ValueError(f"{options.action} takes one folder, not {len(options.folders)}")
    else:
        cache = FeatureCache(options.folders[0])
    for name, value in asdict(cache.settings).items():
        print(f"{name:<18} {json.dumps(value) if isinstance(value, dict) else value}")
    print(f"{'size':<18} {_size(cache.bytes)} in {cache.settings.shards} shards")
    if cache.skipped:
        print(f"{'kept':<18} {len(cache)}; skipped: {_listed(cache.skipped)}, see skipped.jsonl")
    if cache.relative_error is not None:
        print(f"{'relative error':<18} {cache.relative_error:.4f} of a token's hidden state, on average")
    if options.action == "verify":
        cache.verify()
        print(f"{'verified':<18} every file matches its sha256, every row is well formed and finite")


def check_sample(index: int, sample: CachedSample, settings: CacheSettings) -> None:
    """Raises ValueError, naming the sample, where it is not of the cache's shape, or not finite."""
    least, most = settings.image_tokens + 1, settings.prompt_slots + settings.image_tokens
    if len(sample.hidden_states) != settings.branches or len(sample.token_ids) != settings.branches:
        raise ValueError(f"sample {index} has {len(sample.hidden_states)} branches, but the cache {settings.branches}")
    expected = (settings.branches, settings.image_tokens + 1, settings.hidden_size) if settings.context else None
    found = None if sample.context is None else tuple(sample.context.shape)
    if found != expected:
        raise ValueError(f"sample {index} has a context {found}, but the cache takes {expected}")
    if sample.context is not None and not sample.context.isfinite().all():
        raise ValueError(f"sample {index} ({sample.caption[:60]!r}) has a context that is not finite")
    wanted = [(len(ids), len(settings.layers) * settings.hidden_size) for ids in sample.token_ids if settings.layers]
    if [tuple(states.shape) for states in sample.layers] != wanted:
        raise ValueError(f"sample {index} has layers of another shape than {wanted}")
    if not all(states.isfinite().all() for states in sample.layers):
        raise ValueError(f"sample {index} ({sample.caption[:60]!r}) has layers that are not finite")
    for hidden, tokens in zip(sample.hidden_states, sample.token_ids, strict=True):
        if hidden.shape[0] != len(tokens) or hidden.shape[1:] != (settings.hidden_size,):
            raise ValueError(
                f"sample {index} has hidden states {list(hidden.shape)} for {len(tokens)} tokens, "
                f"but the cache takes [{len(tokens)}, {settings.hidden_size}]"
            )
        if not least <= len(tokens) <= most:
            raise ValueError(f"sample {index} has {len(tokens)} slots, but a row has {least} to {most}")
        if not hidden.isfinite().all():
            raise ValueError(f"sample {index} ({sample.caption[:60]!r}) has hidden states that are not finite")
        caption, image = tokens[: -settings.image_tokens], tokens[-settings.image_tokens :]
        if (caption != -1).any() or (image < 0).any() or (image >= settings.codebook_size).any():
            raise ValueError(
                f"sample {index} must hold -1 for caption slots, then {settings.image_tokens} tokens "
                f"of 0 .. {settings.codebook_size - 1}"
            )


def _check_ends(ends: Mapping[str, Tensor], settings: CacheSettings, path: Path) -> None:
    expected = (settings.codebook_size, settings.hidden_size)
    for name in ("embedding", "lm_head"):
        if name not in ends or ends[name].shape != expected:
            found = list(ends[name].shape) if name in ends else "missing"
            raise ValueError(f"{path}: {name} is {found}, but must be {list(expected)}")
        if not ends[name].isfinite().all():
            raise ValueError(f"{path}: {name} is not finite; extract again from a sound target")
    if "rope" not in ends or ends["rope"].ndim != 3:
        raise ValueError(f"{path} has no table of positions called rope; extract again")


def _refuse_other_settings(folder: Path, begun: dict[str, Any], ours: dict[str, Any]) -> None:
    pairs = {name: (begun.get(name), value) for name, value in ours.items() if name != "settings"}
    theirs = begun.get("settings") if isinstance(begun.get("settings"), dict) else {}
    for name in {**theirs, **ours["settings"]}:
        pairs[f"settings.{name}"] = (theirs.get(name), ours["settings"].get(name))
    for name, (old, new) in pairs.items():
        if old != new:
            raise ValueError(
                f"{folder} was begun with {name} = {old!r}, not {new!r}; choose another folder, or delete this one"
            )


def _settings(manifest: dict[str, Any], path: Path) -> CacheSettings:
    if manifest.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {manifest.get('schema')!r}, but this version reads {SCHEMA}; extract again"
        )
    names = [f.name for f in fields(CacheSettings)]
    missing = [name for name in names if name not in manifest]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; extract again")
    return CacheSettings(**{name: manifest[name] for name in names})


def _checked_file(folder: Path, entry: Any, name: str) -> tuple[Path, int, str]:
    """(path, bytes, sha256) of a manifest's entry, which may name nothing but the file expected there."""
    if not isinstance(entry, dict) or entry.get("file") != name:
        found = entry.get("file") if isinstance(entry, dict) else entry
        raise ValueError(f"{folder / 'manifest.json'} names the file {found!r} where {name} belongs; extract again")
    size, digest, path = entry.get("bytes"), entry.get("sha256"), folder / name
    if type(size) is not int or not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{folder / 'manifest.json'}: the entry of {name} needs bytes and a sha256; extract again")
    if path.is_symlink() and folder.resolve() not in path.resolve().parents:
        raise ValueError(f"{path} is a link out of the cache; copy the file there instead")
    if not path.exists():
        raise FileNotFoundError(f"{path} is in the manifest, but missing; extract again, it resumes")
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, but the manifest says {size}; extract it again")
    return path, size, digest


def _kept(manifest: Path, shard: int, entry: dict[str, Any], settings: CacheSettings) -> int:
    """Samples in a shard by its entry: all of its items, where it does not say."""
    most = len(settings.samples_of(shard))
    samples = entry.get("samples", most)
    if type(samples) is not int or not 0 <= samples <= most:
        raise ValueError(f"{manifest}: shard {shard} has samples {samples!r}, but may have 0 to {most}; extract again")
    return samples


def _reasons(lines: Sequence[bytes]) -> dict[str, int]:
    """How many skipped items there are of each reason, most first."""
    return dict(Counter(json.loads(line)["reason"] for line in lines).most_common())


def _listed(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n"


def _bytes_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file ({error}); extract it again") from error


def _joined(rows: Sequence[Tensor], *width: int) -> Tensor:
    """Behind one another, in their own dtype; of none, none so wide."""
    return torch.cat(list(rows)) if rows else torch.zeros(0, *width)


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _hash_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda part: part.write_bytes(content) and None)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
