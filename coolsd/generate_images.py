"""`coolsd generate`: captions in, PNG files and stats.json out.  Knows files and batches; decodes by `coolsd.generate`.

Image number `row` is a function of (caption, seed, row) alone, so batches can be split and resumed at will.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import coolsd
from coolsd.checkpoint import find_folder, fingerprint, numbers_stored, read_json, write_json, write_whole
from coolsd.cli import argument_parser, call
from coolsd.decode import generate
from coolsd.heads.checkpoint import load_head
from coolsd.methods import Drafting, Rule, describe_drafter, describe_rule, make_drafter, make_rule, needs_head
from coolsd.results import environment, record
from coolsd.sampling import Sampling
from coolsd.targets import free_memory, load_target, pick_device, pick_dtype
from coolsd.transformer import TransformerConfig

LARGEST_BATCH = 16  # a finished batch survives Ctrl-C, so batches stay small even where memory would hold more
EMOJI_SAMPLING = Sampling(guidance=1.25)


@dataclass(frozen=True)
class Job:
    """One image to make: its caption, its global row index and its file."""

    caption: str
    row: int
    file: Path


def generate_images(
    out: Path,
    captions: Sequence[str] = (),
    prompts: Path | None = None,
    target: str = "emoji/target",
    head: str = "emoji/draft",
    rule: Rule = "cool-sd",
    delta: float | None = None,
    nu: float | None = None,
    floor: float | None = None,
    k: int | None = None,
    bound: float | None = None,
    resampling: str | None = None,
    drafter: Drafting = "chain",
    length: int | None = None,
    plain: bool = False,
    sampling: Sampling = EMOJI_SAMPLING,
    images_per_prompt: int = 1,
    batch_size: int | None = None,
    overwrite: bool = False,
    compile: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
) -> None:
    """Draw an image per caption.

    Args:
        out: Folder for the PNG files and stats.json; an image already there, made with the same settings, is kept.
        captions: The captions.
        prompts: File of further captions, one a line.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        head: The same of the draft head.
        rule: vanilla, uniform, cool-sd, linear-sd, lantern, lantern++, grouped or a class_path.
        delta: Mean relaxation of uniform, cool-sd and linear-sd (1.1 if not given).
        nu: Decay of cool-sd's relaxation with depth (0.7 if not given).
        floor: Lower bound of cool-sd's and linear-sd's relaxation; papers have none, 1.0 never tightens below vanilla.
        k: Nearest codes that lantern (1000 if not given) and lantern++ (10) look at.
        bound: Most mass that lantern adds to a token (0.1), or lantern++'s largest relaxation (2).
        resampling: After a rejection, lantern, lantern++ and grouped: optimal (if not given) or own, the public code's.
        drafter: chain, eagle-25, lantern-57, dynamic-tree, sjd, scd or a class_path.
        length: Tokens the chain drafts per target call (5 if not given); the window of sjd and scd (16).
        plain: Decode without a draft.
        sampling: How logits become a distribution.
        images_per_prompt: Images of each caption.
        batch_size: Images at a time; null takes as many as fit into half of the free memory, up to 16.
        overwrite: Replace images of other settings.
        compile: torch.compile target and head.
        device: cpu, cuda, mps or auto.
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the hardware has it).
        seed: Image i is a function of (caption, seed, i).
    """
    captions = [*captions, *(read_prompts(prompts) if prompts else [])]
    if not captions:
        raise ValueError('no captions; give some, as in coolsd generate "red apple" --out DIR, or --prompts FILE')
    if empty := [row for row, caption in enumerate(captions) if not caption.strip()]:
        raise ValueError(f"caption {empty[0]} is empty; a caption needs words")
    for name, value in (("images_per_prompt", images_per_prompt), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be >= 1")
    settings = {"delta": delta, "nu": nu, "floor": floor, "k": k, "bound": bound, "resampling": resampling}
    if plain and (rule != "cool-sd" or drafter != "chain" or {*settings.values(), length} != {None}):
        raise ValueError("--plain decodes without a draft; leave out either it or the options of rule and drafter")
    acceptance = None if plain else make_rule(rule, **settings)
    precision = pick_dtype(dtype, pick_device(device))
    made_with = {"target": checkpoint_name(target), "sampling": asdict(sampling), "seed": seed, "dtype": f"{precision}"}
    if not plain:
        # the head's file name and the drafter's shape are known before anything heavy is loaded
        shape = make_drafter(drafter, None, length)
        made_with["rule"] = describe_rule(acceptance, shape.depth)
        made_with["drafter"] = describe_drafter(shape, checkpoint_name(head))
    nodes = 1 if plain else shape.nodes

    jobs = plan(captions, images_per_prompt, out)
    missing = [job for job in jobs if not is_made(job, made_with, overwrite)]
    cache, logits = bytes_per_image(read_json(find_folder(target) / "config.json"), sampling.branches, nodes,
                                    precision.itemsize)  # fmt: skip
    heads = [head] if not plain and needs_head(drafter) else []
    weights = precision.itemsize * sum(numbers_stored(find_folder(folder)) for folder in [target, *heads])
    free = max(0, free_memory(pick_device(device)) - weights)
    batch_size = batch_size or max(1, min(LARGEST_BATCH, len(missing), free // 2 // (cache + logits)))
    print(
        f"{len(missing)} images to make, {len(jobs) - len(missing)} already there; {cache / 1e6:.1f} MB of cache and "
        f"{logits / 1e6:.1f} MB of logits each, {free / 1e9:.1f} GB free beside target and head: "
        f"batches of {batch_size}"
    )
    if not missing:
        return
    model = load_image_target(target, device, dtype, compile)
    drafting = None
    if not plain:
        loaded = load_head(head, model, compile=compile) if needs_head(drafter) else None
        drafting = make_drafter(drafter, loaded, length)

    out.mkdir(parents=True, exist_ok=True)
    images = kept_records(out, missing)
    start, tokens = time.perf_counter(), 0
    try:
        with progress_bar("images", len(missing), "tokens/s") as bar:
            for first in range(0, len(missing), batch_size):
                batch = missing[first : first + batch_size]

                def advance(done: int, total: int, first: int = first, size: int = len(batch)) -> None:
                    drawn = first * total + done * size
                    bar.update(bar.task_ids[0], completed=first + size * done / total,
                               rate=f"{drawn / (time.perf_counter() - start):.0f}")  # fmt: skip

                began = time.perf_counter()
                result = generate(model, [job.caption for job in batch], drafting, acceptance, sampling, seed,
                                  [job.row for job in batch], progress=advance)  # fmt: skip
                seconds = (time.perf_counter() - began) / len(batch)
                assert result.images is not None
                for index, job in enumerate(batch):
                    write_png(result.images[index], job, made_with)
                    images.append({"file": job.file.name, "caption": job.caption, "row": job.row,
                                   **record(result, index), "seconds": seconds})  # fmt: skip
                tokens += result.tokens.numel()
    finally:  # also on Ctrl-C: what is finished stays, with its numbers
        elapsed = time.perf_counter() - start
        images.sort(key=lambda image: image["row"])
        write_json(out / "stats.json", {"schema": 1, "environment": environment(model.device, model.dtype), **made_with,
                                        "images": images, "seconds": elapsed,
                                        "tokens_per_second": tokens / elapsed})  # fmt: skip
        made = sum(job.file.is_file() for job in jobs)
        print(f"{made} of {len(jobs)} images and stats.json in {out}: {tokens / elapsed:.0f} tokens/s")


def load_image_target(folder: str, device: str, dtype: str, compile: bool) -> Any:
    """`load_target`, and a ValueError where it could not decode its tokens to pixels."""
    target = load_target(folder, device, dtype, compile)
    if target.image_tokenizer is None:
        raise ValueError(f"{folder} has no image tokenizer; put one into its folder image_tokenizer")
    return target


def read_prompts(path: Path, seed: int = 0) -> list[str]:
    """Captions of a UTF-8 file. Blank ones are ignored.

    .json: MS-COCO's captions, one of each image, images and captions in an order drawn by the seed. .tsv: the column
    Prompt of a table, as PartiPrompts has it. Anything else: one a line.
    """
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    if path.suffix.lower() == ".json":
        lines = _coco_captions(text, path, seed)
    elif path.suffix.lower() == ".tsv":
        header, *rows = [line.split("\t") for line in text.split("\n")]
        header = [name.strip() for name in header]
        if "Prompt" not in header:
            raise ValueError(f"{path} has no column Prompt; its columns are {', '.join(header)}")
        lines = [" ".join(row[header.index("Prompt")].split()) for row in rows if len(row) > header.index("Prompt")]
    else:
        lines = text.splitlines()
    if not (captions := [line.strip() for line in lines if line.strip()]):
        raise ValueError(f"{path} holds no caption; write one a line")
    return captions


def _coco_captions(text: str, path: Path, seed: int) -> list[str]:
    try:
        of_images: dict[int, list[str]] = {}
        for entry in json.loads(text)["annotations"]:
            if not isinstance(entry["caption"], str):
                raise TypeError(f"a caption is {entry['caption']!r}")
            of_images.setdefault(int(entry["image_id"]), []).append(entry["caption"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is no caption file of MS-COCO: {type(error).__name__} {error}") from None
    chance = random.Random(seed)
    images = sorted(of_images)
    chance.shuffle(images)
    return [" ".join(chance.choice(of_images[image]).split()) for image in images]


def checkpoint_name(folder: str) -> str:
    """name@fingerprint of a checkpoint folder, as loading gives it."""
    path = find_folder(folder)
    return f"{path.resolve().name}@{fingerprint(path)}"


def slug(text: str) -> str:
    """A caption as a piece of a file name: ASCII letters, digits and single hyphens, at most 60."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:60].strip("-")


def plan(captions: Sequence[str], images_per_prompt: int, out: Path) -> list[Job]:
    """Row = prompt * images_per_prompt + number: what an image shows does not depend on how batches are split."""
    rows = enumerate(caption for caption in captions for _ in range(images_per_prompt))
    return [Job(caption, row, out / (f"{row:05d}-{slug(caption)}".strip("-") + ".png")) for row, caption in rows]


def png_text(job: Job, made_with: dict[str, Any]) -> dict[str, str]:
    settings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in made_with.items()}
    return {"caption": job.caption, "row": str(job.row), **settings}


def is_made(job: Job, made_with: dict[str, Any], overwrite: bool) -> bool:
    """Whether the job's image exists with these very settings; another one there is a ValueError unless overwritten."""
    if not job.file.exists():
        return False
    try:
        with Image.open(job.file, formats=("PNG",)) as image:
            found = {key: str(value) for key, value in getattr(image, "text", {}).items() if key != "coolsd"}
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # no picture, or half of one
        found = {}
    if found == png_text(job, made_with):
        return True
    if overwrite:
        return False
    raise ValueError(f"{job.file} exists and was made with other settings; add --overwrite, or choose another --out")


def write_png(image: torch.Tensor, job: Job, made_with: dict[str, Any]) -> None:
    """uint8 [3, h, w] -> the job's file, its making in the file's text chunks; whole or not at all."""
    info = PngInfo()
    for key, value in {**png_text(job, made_with), "coolsd": coolsd.__version__}.items():
        info.add_itxt(key, value)
    picture = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
    write_whole(job.file, lambda part: picture.save(part, "PNG", pnginfo=info))


def kept_records(out: Path, missing: Sequence[Job]) -> list[dict[str, Any]]:
    """What stats.json of earlier runs says of images that are there and stay."""
    path = out / "stats.json"
    if not path.is_file():
        return []
    redone = {job.file.name for job in missing}
    try:
        images = json.loads(path.read_text("utf-8"))["images"]
        return [image for image in images if image["file"] not in redone and (out / Path(image["file"]).name).is_file()]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what coolsd generate writes ({error}); move it away") from None


def bytes_per_image(config: dict[str, Any], branches: int, nodes: int, itemsize: int) -> tuple[int, int]:
    """(cache, logits) of one image while it is decoded, from the target's config.json."""
    try:
        shape = TransformerConfig(**config["transformer"])
        slots = config["prompt_slots"] + config["grid"][0] * config["grid"][1] + nodes
        codes = config["codebook_size"]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the target's config.json does not describe a decoder: {error}") from None
    layers = shape.layers + 1  # the draft head has one
    cache = branches * slots * layers * 2 * shape.key_heads * shape.head_dim * itemsize
    return cache, nodes * codes * (branches * itemsize + 6 * 4)  # 6: guided, both distributions, mass, certificates


def progress_bar(what: str, total: int, unit: str, quiet: bool = False) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn(f"{{task.fields[rate]}} {unit}"), TimeRemainingColumn())  # fmt: skip
    bar = Progress(*columns, disable=quiet)
    bar.add_task(what, total=total, rate="-")
    return bar


def main(args: list[str]) -> None:
    parser = argument_parser("generate", "Captions in, PNG files and stats.json out.")
    parser.add_argument("captions", type=str, nargs="*", default=argparse.SUPPRESS, help="captions, each one image")
    call(generate_images, parser, args)
