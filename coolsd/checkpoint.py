"""Checkpoint folders: config.json + model.safetensors + fingerprint.json. The same for targets, tokenizers and heads.

Knows files; knows no model. Reads what strangers wrote: JSON and safetensors only, names and shapes checked. A
Hugging Face folder keeps its shards as they are (`Shards`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"
CONFIG_BYTES = 1 << 20
INDEX = "model.safetensors.index.json"
INDEX_BYTES = 1 << 24
Module = TypeVar("Module", bound=nn.Module)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then put it in place: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask allows; safetensors leaves files to their owner only
        write(temporary)
        temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, lambda part: part.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", "utf-8"))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest begins with Python 3.11
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_folder(name: str | Path) -> Path:
    """A checkpoint folder by path, or by its name under checkpoints/ ("emoji/target")."""
    for folder in (Path(name), CHECKPOINTS / name):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(
        f"no checkpoint at {str(name)!r}: expected a folder with config.json, or a name under checkpoints/"
    )


def save_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], extra: Mapping[str, str] | None = None
) -> str:
    """Write a folder (extra = further text files by name) and return its fingerprint. Old files are replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    write_whole(folder / "model.safetensors", lambda part: save_file(plain, part))
    for name, text in (extra or {}).items():
        write_whole(folder / name, lambda part, text=text: part.write_text(text, "utf-8"))  # type: ignore[misc]
    write_json(folder / "config.json", dict(config))
    return write_fingerprint(folder, ["config.json", "model.safetensors", *(extra or {})])


def write_fingerprint(folder: Path, names: Sequence[str]) -> str:
    """Hash these files of a checkpoint folder into its fingerprint.json; returns the fingerprint."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    write_json(folder / "fingerprint.json", files)
    return fingerprint(folder)


def fingerprint(folder: Path, verify: bool = False) -> str:
    """Short hash that names a checkpoint: 12 hexadecimal digits over the hashes of all its files.

    Compares names and sizes with fingerprint.json (verify: rehashes too). Raises ValueError where they differ.
    """
    path = folder / "fingerprint.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no fingerprint.json; it is written by training and convert")
    files = read_json(path)
    for name, entry in files.items():
        if Path(name).name != name:
            raise ValueError(f"{path} names {name!r}, which is not a plain file name")
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or "bytes" not in entry:
            raise ValueError(f"{path} has no size and hash of {name}; copy the checkpoint again")
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"] or (verify and sha256(file) != entry["sha256"]):
            raise ValueError(f"{file} is not the file its fingerprint.json was made for; copy the checkpoint again")
    return hashlib.sha256(json.dumps({n: e["sha256"] for n, e in sorted(files.items())}).encode()).hexdigest()[:12]


def same_weights(one: str | None, other: str | None) -> bool:
    """Whether two names "folder@fingerprint" name the same files; the folder may have been moved or renamed."""
    return one is not None and other is not None and one.rpartition("@")[2] == other.rpartition("@")[2]


def read_json(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.stat().st_size > most:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than the {most} that such a file may have")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # of text, syntax, a number of thousands of digits; of depth
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file, of a Hugging Face index. Raises ValueError where a file is none of the index's folder."""
    names = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names; download it again")
    for name in sorted(set(names.values())):
        if Path(name).name != name or name.startswith("."):
            raise ValueError(f"{index} names {name!r}, which is not a plain file name")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names {name}, which is not there; download it into {index.parent}")
    return names


class Shards:
    """Tensors of a Hugging Face folder, read one at a time: from model.safetensors, or the files its index names.

    files: tensor name -> file. Raises ValueError where the index names what is not there, or not in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, index = folder, folder / INDEX
        if index.is_file():
            names = weight_map(index)
        elif (folder / "model.safetensors").is_file():
            names = dict.fromkeys(self._open("model.safetensors", lambda file: list(file.keys())), "model.safetensors")
        else:
            raise ValueError(f"{folder} has neither {INDEX} nor model.safetensors; give a folder of safetensors")
        self.files: dict[str, str] = names

    def _open(self, name: str, use: Callable[[Any], Any]) -> Any:
        try:
            # opened anew each time: what was read of a mapped file counts as memory until it is closed
            with safe_open(self.folder / name, "pt") as file:
                return use(file)
        except SafetensorError as error:
            raise ValueError(f"{self.folder / name} is not whole ({error}); download it again") from None

    def _file(self, name: str) -> str:
        if name not in self.files:
            raise ValueError(f"{self.folder} lacks {name}")
        return self.files[name]

    def read(self, name: str) -> Tensor:
        """A tensor; its numbers stay in the mapped file, page by page as they are needed."""
        return self._weight(name, lambda file: file.get_tensor(name))

    def _weight(self, name: str, use: Callable[[Any], Tensor]) -> Tensor:
        if (tensor := self._open(self._file(name), use)).dtype not in FLOATS:  # quantised: no weights by themselves
            raise ValueError(f"{self.folder}: {name} is {tensor.dtype}, but must be floats of 16 to 64 bits")
        return tensor

    def shape(self, name: str) -> list[int]:
        return self._open(self._file(name), lambda file: file.get_slice(name).get_shape())

    def outline(self, name: str) -> Tensor:
        """The same on the meta device: shape and dtype, no numbers."""
        return self._weight(name, lambda file: file.get_tensor(name).to("meta"))


def numbers_stored(folder: Path) -> int:
    """How many weights a checkpoint folder has, by its files' headers alone."""
    shards = Shards(folder)
    return sum(math.prod(shards.shape(name)) for name in shards.files)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return read_safetensors(folder / "model.safetensors")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def load_made(make: Callable[[], Module], tensors: Mapping[str, Tensor], source: str | Path) -> Module:
    """make() with these weights. Made without memory first, as its config may be a stranger's and tell of any size.

    Raises ValueError where names or shapes of the tensors are not those of its weights.
    """
    with torch.device("meta"), as_told(source):
        check_fits(make(), tensors, source)
    module = make()
    module.load_state_dict(tensors)
    return module


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """load_state_dict that names every missing, unknown and misshaped key, and stops there."""
    check_fits(module, tensors, source)
    module.load_state_dict(tensors)


def check_fits(module: nn.Module, tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Raises ValueError where names or shapes are not the module's, which may be on the meta device, or a tensor is
    quantised: its numbers alone are not the weights."""
    own = module.state_dict()
    faults = [f"missing {key}" for key in own if key not in tensors]
    faults += [f"unknown {key}" for key in tensors if key not in own]
    faults += [
        f"{key} has shape {list(tensors[key].shape)}, expected {list(own[key].shape)}"
        for key in own
        if key in tensors and tensors[key].shape != own[key].shape
    ]
    faults += [
        f"{key} is {tensors[key].dtype}, expected floats of 16 to 64 bits"
        for key in own
        if key in tensors and own[key].is_floating_point() and tensors[key].dtype not in FLOATS
    ]
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"{source} does not fit this model: {'; '.join(faults[:8])}{more}")


@contextmanager
def as_told(source: str | Path) -> Iterator[None]:
    """Raises ValueError where torch finds tensors of a stranger's file in other shapes than its config tells of."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError, ZeroDivisionError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        if "allocate memory" in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{source}: tensors do not have the shapes that its config.json tells of ({why})") from None
