"""Captioned images from disk or hub, as a target sees them.  Hugging Face `datasets` finds and reads the rows.

Knows files, captions and pixels; knows no token and no target.  What `source` may be:

    folder of images, and `annotations`      MS-COCO's captions_*.json
    folder of `Dataset.save_to_disk`
    folder with metadata.csv|jsonl|parquet   an `imagefolder`, the files in subfolders too
    folder of name.jpg + name.txt            captions in text files beside the images (as LANTERN has them), likewise
    *.tar, *.parquet, *.arrow                files, a folder of them, or a pattern; tar = webdataset
    anything else                            a name on the hub, streamed or not

The first that fits, in this order.

Files of others are hostile: decoded by a few formats only, up to a number of pixels, and never outside `source`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch.utils.data import Dataset

from data.states import BadItem

Image.init()
KNOWN = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none that runs another program
FORMATS = tuple(name for name in KNOWN if name in Image.OPEN)
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif"}
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILES = {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}
IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "img")
CAPTION_COLUMNS = ("caption", "captions", "text", "txt", "sentences", "prompt")
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
SPLITS = {"train": "train", "training": "train", "val": "validation", "valid": "validation", "dev": "validation",
          "validation": "validation", "test": "test", "testing": "test"}  # fmt: skip
LARGEST_FILE, LARGEST_CAPTION = 1 << 30, 1 << 20  # bytes of an image, and of a caption beside one


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The largest square in the middle, size x size pixels: halved by boxes while twice as large, then bicubic.

    As LlamaGen and, before it, ADM (Dhariwal and Nichol 2021) prepare their training images.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def read_image(content: bytes, max_pixels: int) -> Image.Image:
    """An encoded image -> RGB: upright by its EXIF orientation, first frame, transparency on white, 16 bits as 8.

    Raises BadItem.
    """
    if not content:
        raise BadItem("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pixels, which are counted here
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadItem("not an image") from None
    except Image.DecompressionBombError as error:
        raise BadItem("too many pixels", str(error)) from None
    except Exception as error:  # a decoder's own
        raise BadItem("broken image", str(error)) from None
    if image.width * image.height > max_pixels:
        raise BadItem("too many pixels", f"{image.width} x {image.height}, more than {max_pixels}")
    longest = max(image.size) / min(image.size)
    if longest > 20:
        raise BadItem("too long", f"{image.width} x {image.height}: of a square in the middle little would be seen")
    try:
        image.seek(0)
        image.load()
        return _plain(image)
    except BadItem:
        raise
    except Exception as error:
        reason = "truncated image" if "truncated" in str(error) else "broken image"
        raise BadItem(reason, str(error)) from None


def _plain(image: Image.Image) -> Image.Image:
    """A loaded image of any mode -> RGB."""
    with contextlib.suppress(Exception):  # a broken EXIF block says nothing about the orientation
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise BadItem("unknown pixel range", f"mode {image.mode} has no white")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def read_caption(value: Any) -> str:
    """A caption as text, without white space around it. Raises BadItem."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadItem("caption is not UTF-8", str(error)) from None
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadItem("empty caption")
    if not isinstance(value, str):
        raise BadItem("caption is no text", type(value).__name__)
    return value.strip()


class ImageCaptionPairs(Dataset):
    """Map-style: {"image": uint8 [3, size, size], "caption": str}; an item that cannot be used raises BadItem.

    Args:
        source: Folder, file, pattern or hub name, see the module.
        size: Pixels a side, the target's; images are cropped to the square in their middle.
        columns: Names of the image and of the caption column, as [jpg, json.caption]; a dot looks into a structure.
            null finds the usual ones.
        captions: Of an image with several: "one" takes its first, "all" makes an item of each (which a training may
            hold out apart from one another).
        annotations: MS-COCO's captions_*.json for a folder of images.
        split: Of a source that has several, by the names of its files or folders.
        streaming: Read a hub's or files' rows in their order as they come, without a copy on disk; needs `limit`.
        limit: Only the first so many rows.
        max_pixels: A larger image is left out: it would take gigabytes of memory.
    """

    def __init__(
        self,
        source: str,
        size: int = 256,
        columns: tuple[str, str] | None = None,
        captions: Literal["one", "all"] = "one",
        annotations: str | None = None,
        split: str = "train",
        streaming: bool = False,
        limit: int | None = None,
        max_pixels: int = 64_000_000,
    ) -> None:
        for name, value in (("size", size), ("max_pixels", max_pixels), ("limit", limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be >= 1")
        if captions not in ("one", "all"):
            raise ValueError(f"captions is {captions!r}; choose one or all")
        if streaming and (limit is None or captions == "all"):
            raise ValueError('streaming needs a limit, the number of rows, and captions "one": a stream has no length')
        self.source, self.size, self.split, self.max_pixels = source, size, split, max_pixels
        self.folder = Path(source) if Path(source).is_dir() else None
        if annotations is not None and self.folder is None:
            raise ValueError(f"annotations go with a folder of images, but {source} is none")
        self.roots = [self.folder] if self.folder else [] if _local(source) else [Path(datasets.config.HF_CACHE_HOME)]
        self.ordered = streaming  # a stream gives its rows in no other order
        self.rows, found = _open(source, annotations, split, streaming)
        self.image_column, self.caption_column = columns or (None, None)
        names = list(self.rows.column_names or found)
        if columns is None:
            self.image_column = _pick("image", IMAGE_COLUMNS, names, source)
            self.caption_column = _pick("caption", CAPTION_COLUMNS, names, source)
        for name in (self.image_column, self.caption_column):
            if name.partition(".")[0] not in names:
                raise ValueError(f"{source} has no column {name!r}; its columns are {', '.join(names)}")
        used = dict.fromkeys(name.partition(".")[0] for name in (self.image_column, self.caption_column, "__key__"))
        self.rows = self.rows.select_columns([name for name in used if name in names])  # others are never decoded
        if isinstance((self.rows.features or {}).get(self.image_column), datasets.Image):
            self.rows = self.rows.cast_column(self.image_column, datasets.Image(decode=False))
        self._stream: Iterator[Any] | None = None
        self._next = 0
        self.items: list[tuple[int, int]] | range = range(limit or 0)
        if not streaming:
            first = range(min(len(self.rows), limit or len(self.rows)))
            several = self._captions_of_all(first) if captions == "all" else None
            self.items = first if several is None else [(row, k) for row in first for k in range(several[row])]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, number = self._row(index)
        item = _name(row, self.image_column, index)
        try:
            words = read_caption(_chosen(_look(row, self.caption_column), number))
            image = read_image(self._content(_look(row, self.image_column)), self.max_pixels)
        except BadItem as bad:
            raise BadItem(bad.reason, bad.detail, item) from None
        pixels = torch.from_numpy(np.array(center_crop(image, self.size)))
        return {"image": pixels.permute(2, 0, 1).contiguous(), "caption": words}

    def caption(self, index: int) -> str:
        """The caption alone, for a target that draws the image itself."""
        row, number = self._row(index, images=False)
        try:
            return read_caption(_chosen(_look(row, self.caption_column), number))
        except BadItem as bad:
            raise BadItem(bad.reason, bad.detail, f"item {index}") from None

    @property
    def fingerprint(self) -> str:
        """Of all captions, of 16 images spread over them and of the size; of a stream, its name and how many rows."""
        digest = hashlib.sha256(json.dumps([self.size, len(self)]).encode())
        if self.ordered:
            digest.update(json.dumps([self.source, self.split, self.caption_column]).encode())
        else:
            for index in range(len(self)):
                try:
                    digest.update(self.caption(index).encode(errors="replace") + b"\0")
                except BadItem as bad:
                    digest.update(bad.reason.encode() + b"\0")
            for index in sorted({i * (len(self) - 1) // 15 for i in range(16)}) if len(self) else ():
                with contextlib.suppress(BadItem):
                    row, _ = self._row(index)
                    digest.update(self._content(_look(row, self.image_column)))
        return f"{Path(self.source).name}[{len(self)}]@{digest.hexdigest()[:12]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None, "_next": 0}  # each worker process reads a stream of its own

    def _captions_of_all(self, used: range) -> list[int]:
        column = self.rows.select_columns([self.caption_column.partition(".")[0]])
        values = (_look(column[row], self.caption_column) for row in used)
        return [max(1, len(value)) if isinstance(value, (list, tuple)) else 1 for value in values]

    def _row(self, index: int, images: bool = True) -> tuple[Mapping[str, Any], int]:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {self.source}, which has {len(self)}")
        if self.ordered:
            return self._streamed(index), 0
        place = self.items[index]
        row, number = (place, 0) if isinstance(place, int) else place
        if images:
            return self.rows[row], number
        if not hasattr(self, "_texts"):
            self._texts = self.rows.select_columns([self.caption_column.partition(".")[0]])
        return self._texts[row], number

    def _streamed(self, index: int) -> Mapping[str, Any]:
        """Row `index` of a stream: read on to it, from the start where it has passed."""
        try:
            if self._stream is None or index < self._next:
                self._stream, self._next = iter(self.rows.skip(index)), index
            for row in self._stream:
                self._next += 1
                if self._next > index:
                    return row
        except Exception as error:  # a generator that raised is over: the rest of the stream cannot be had
            raise ValueError(f"{self.source} broke off at row {self._next}: {_why(error)}") from None
        raise BadItem("end of the stream", f"it has {self._next} rows", f"item {index}")

    def _content(self, value: Any) -> bytes:
        """The encoded image of a cell: bytes, or a path inside the source (of a hub name: inside the hub's cache)."""
        if isinstance(value, Mapping):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or "\0" in value:
            raise BadItem("missing image", f"the cell holds {type(value).__name__}")
        if not self.roots:
            raise BadItem("missing image", "the cell holds a path, which is only followed inside a folder")
        path = self.roots[0] / value
        try:
            if not path.resolve().is_relative_to(self.roots[0].resolve()):
                raise BadItem("path outside the folder", value)
        except (OSError, RuntimeError) as error:
            raise BadItem("missing image", str(error)) from None
        return _read(path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise BadItem("too large a file", f"{path.stat().st_size} bytes")
        return path.read_bytes()
    except OSError as error:
        if error.errno not in ABSENT:  # the machine's trouble, not the file's: it may be there next time
            raise
        raise BadItem("missing image", error.strerror or str(error)) from None


def _look(row: Mapping[str, Any], column: str) -> Any:
    """row["json"]["caption"] for "json.caption"; None where something on the way is missing."""
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _chosen(value: Any, number: int) -> Any:
    """Caption `number` of several, or the only one."""
    if isinstance(value, (list, tuple)):
        return value[number] if number < len(value) else None
    return value


def _name(row: Mapping[str, Any], column: str, index: int) -> str:
    value = row.get("__key__") or _look(row, column)
    path = value.get("path") if isinstance(value, Mapping) else value
    return Path(path).name if isinstance(path, str) else f"item {index}"


def _pick(what: str, usual: Sequence[str], names: Sequence[str], source: str) -> str:
    found = next((name for name in usual if name in names), None)
    if found is None:
        raise ValueError(
            f"{source} has no {what} column of a usual name ({', '.join(usual)}); its columns are "
            f"{', '.join(names) or 'none'}; name the two by columns, as [image, caption]"
        )
    return found


def _local(source: str) -> bool:
    """Whether this is a place on this machine, and no name to ask the hub for."""
    path = Path(source)
    return path.exists() or "*" in source or source.startswith((".", "/", "~")) or (
        len(path.parts) > 1 and path.parent.is_dir()
    )  # fmt: skip


def _open(source: str, annotations: str | None, split: str, streaming: bool) -> tuple[Any, list[str]]:
    """(the rows, their column names where the rows do not say)."""
    path = Path(source)
    if annotations is not None:
        return _coco(path, Path(annotations)), []
    if path.is_dir():
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _saved(path, split), []
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if metadata := [file for file in files if file.name in METADATA]:
            return _imagefolder(path, _of_split(path, metadata, split)), []
        if any(file.suffix.lower() in ENDINGS and file.with_suffix(".txt").is_file() for file in files):
            return _beside(path, [file for file in files if file.suffix.lower() in ENDINGS]), []
        for ending, builder in FILES.items():
            if found := [file for file in files if file.suffix.lower() == ending and file.stat().st_size]:
                chosen = [glob.escape(str(file)) for file in _of_split(path, found, split)]
                return _loaded(source, split, streaming, path=builder, data_files={split: chosen})
        images = sum(file.suffix.lower() in ENDINGS for file in files)
        raise ValueError(
            f"{source} holds {images} images, but no captions: neither {', '.join(METADATA)} nor text files beside the "
            f"images, nor {', '.join(FILES)} files; for MS-COCO name its JSON by annotations"
        )
    ending = path.suffix.lower()
    if ending in FILES and _local(source):
        pattern = glob.escape(source) if path.exists() else source
        return _loaded(source, split, streaming, path=FILES[ending], data_files={split: pattern})
    if _local(source):
        raise ValueError(f"{source} is no folder and no file of {', '.join(FILES)}")
    return _loaded(source, split, streaming, path=source)


def _of_split(folder: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Those of the wanted split, where names of files or folders tell several splits apart; else all."""
    named: dict[Path, str | None] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(folder)).lower())
        named[file] = next((SPLITS[word] for word in words if word in SPLITS), None)
    kinds = set(named.values())
    if len(kinds) < 2:
        return list(files)
    chosen = [file for file, kind in named.items() if kind == SPLITS.get(split, split)]
    if not chosen:
        raise ValueError(f"{folder} has no split {split!r}; its files are of {', '.join(sorted(map(str, kinds)))}")
    return chosen


def _why(error: BaseException) -> str:
    """The first line of an error's cause, for `datasets` wraps what matters."""
    cause = error.__cause__ or error.__context__ or error
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__


def _loaded(source: str, split: str, streaming: bool, **how: Any) -> tuple[Any, list[str]]:
    """By `datasets.load_dataset`; its many errors become one sentence."""
    try:
        rows = datasets.load_dataset(**how, split=split, streaming=streaming)
        names = rows.column_names
        if not names:  # a stream that does not know: look at a row, images undecoded
            names = list(next(iter(rows.decode(False)), {}))
    except Exception as error:
        raise ValueError(f"{source} cannot be read as captioned images (split {split!r}): {_why(error)}") from None
    return rows, list(names)


def _saved(folder: Path, split: str) -> datasets.Dataset:
    """A folder of `save_to_disk`, of one split or of several."""
    try:
        if (folder / "dataset_dict.json").is_file():
            known = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            if split not in known:
                raise ValueError(f"no split {split!r}; it has {', '.join(map(str, known))}")
            folder = folder / split
        for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]:
            if not (folder / entry["filename"]).resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"its file {entry['filename']!r} lies outside")
        return datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"{folder} cannot be read as a saved dataset: {error}") from None


def _imagefolder(folder: Path, metadata: Sequence[Path]) -> datasets.Dataset:
    """Rows of metadata files; their column file_name becomes `image`, a path below the folder."""
    parts = []
    for path in metadata:
        builder = {"jsonl": "json"}.get(path.suffix[1:], path.suffix[1:])
        rows, names = _loaded(str(path), "train", False, path=builder, data_files=glob.escape(str(path)))
        if "file_name" not in names:
            raise ValueError(f"{path} has no column file_name; its columns are {', '.join(names)}")
        below = path.parent.relative_to(folder)
        files = [None if name is None else str(below / str(name)) for name in rows["file_name"]]
        parts.append(rows.remove_columns("file_name").add_column("image", files))
    return datasets.concatenate_datasets(parts)


def _beside(folder: Path, images: Sequence[Path]) -> datasets.Dataset:
    """Images with a text file of the same name beside them; an image without one has an empty caption."""
    names = [str(path.relative_to(folder)) for path in images]
    strange = [name for name in names if not _encodes(name)]
    if strange:
        warnings.warn(f"{len(strange)} files of {folder} are left out: their names are not UTF-8", stacklevel=2)
    captions = []
    for path in images:
        text = path.with_suffix(".txt")
        inside = text.is_file() and text.resolve().is_relative_to(folder.resolve())
        captions.append(_start(text, LARGEST_CAPTION) if inside else b"")
    rows = [(name, words) for name, words in zip(names, captions, strict=True) if _encodes(name)]
    return datasets.Dataset.from_dict({"image": [name for name, _ in rows], "caption": [words for _, words in rows]})


def _start(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _coco(folder: Path, annotations: Path) -> datasets.Dataset:
    """Images in the order of the file, each with its list of captions."""
    try:
        found = json.loads(annotations.read_bytes())
        names = {entry["id"]: entry["file_name"] for entry in found["images"]}
        captions: dict[Any, list[str]] = {number: [] for number in names}
        for entry in found["annotations"]:
            captions[entry["image_id"]].append(entry["caption"])
        if not all(isinstance(name, str) for name in names.values()):
            raise TypeError("a file_name is no text")
        rows = {"image": list(names.values()), "caption": list(captions.values())}
        return datasets.Dataset.from_dict(rows)
    except OSError as error:
        raise ValueError(f"annotations {annotations}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"{annotations} is no caption file of MS-COCO: {type(error).__name__} {error}") from None
