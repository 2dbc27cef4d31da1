"""`coolsd evaluate`: prompts -> images of several methods -> accepted length, latency, bias -> results.json.

Knows how to measure fairly: everything warmed up, methods interleaved prompt by prompt, plain always among them. An
interrupted run goes on where it stopped: what was measured stands in measured.jsonl. Under torchrun the processes
share the prompts, each with a journal of its own; the first waits for the others and writes the results.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from coolsd import report, results
from coolsd.checkpoint import read_json, write_json
from coolsd.cli import argument_parser, call
from coolsd.decode import generate
from coolsd.generate_images import (
    EMOJI_SAMPLING,
    Job,
    checkpoint_name,
    load_image_target,
    progress_bar,
    read_prompts,
    slug,
    write_png,
)
from coolsd.heads.checkpoint import load_head
from coolsd.journal import Journal
from coolsd.methods import Drafting, Rule, describe_drafter, describe_rule, make_drafter, make_rule, needs_head
from coolsd.metrics import ImageMetric, Metric, ready
from coolsd.sampling import Sampling

JOURNAL = "measured.jsonl"  # in the folder of a run: what it has measured, or its first process has
RESULTS_BYTES = 1 << 30
WARM_UP_ROUNDS = 12


@dataclass(frozen=True)
class Method:
    """One row of the results: a rule on a drafter.

    Args:
        name: Its name in the table and in the files.
        rule: vanilla, uniform, cool-sd, linear-sd, lantern, lantern++, grouped or a class_path.
        delta: Mean relaxation of uniform, cool-sd and linear-sd.
        nu: Decay of cool-sd's relaxation with depth.
        floor: Lower bound of cool-sd's and linear-sd's relaxation.
        k: Nearest codes that lantern and lantern++ look at.
        bound: Most mass that lantern adds to a token, or lantern++'s largest relaxation.
        resampling: After a rejection, lantern, lantern++ and grouped: optimal or own, the public code's.
        drafter: chain, eagle-25, lantern-57, dynamic-tree, sjd, scd or a class_path.
        length: Tokens the chain drafts per target call; the window of sjd and scd.
        head: Checkpoint folder of its draft head; null takes the run's.
        first: Only the first so many prompts; null takes all.
    """

    name: str
    rule: Rule = "cool-sd"
    delta: float | None = None
    nu: float | None = None
    floor: float | None = None
    k: int | None = None
    bound: float | None = None
    resampling: str | None = None
    drafter: Drafting = "chain"
    length: int | None = None
    head: str | None = None
    first: int | None = None


@dataclass(frozen=True)
class Contender:
    """A method with everything loaded; plain decoding has neither drafter nor rule. images: its per-image records."""

    name: str
    drafter: Any
    rule: Any
    about: dict[str, Any]
    prompts: int
    images: list[dict[str, Any]]

    @property
    def depth(self) -> int:
        return self.drafter.depth if self.drafter else 0


def evaluate(
    out: Path,
    methods: list[Method],
    target: str = "emoji/target",
    head: str = "emoji/draft",
    split: Literal["combo", "novel"] = "combo",
    limit: int | None = None,
    prompts: list[str] | Path | None = None,
    repeats: int = 1,
    sampling: Sampling = EMOJI_SAMPLING,
    batch_size: int = 1,
    baseline: str | None = None,
    metrics: list[Metric] | None = None,
    check: bool = False,
    compile: bool = False,
    certificates: bool = True,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
) -> dict[str, Any] | None:
    """Measure methods against plain decoding, which is always the first row ("ar").

    Args:
        out: Folder for results.json, table.md, report.html and images/; an interrupted run in it goes on.
        methods: What to compare, each {name, rule, ...}.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        head: The same of the draft head.
        split: Held-out emoji captions: combo (parts seen, not together) or novel (names never seen).
        limit: Only so many captions; null takes 64 held-out ones, or all prompts.
        prompts: Captions instead: a list, or a file with one a line.
        repeats: Images per prompt and method, each with a row index of its own.
        sampling: How logits become a distribution, the same for all.
        batch_size: Images decoded together; latency is then a batch's time divided by its size.
        baseline: Name of a method: the others' accepted length and NLL less its own, image by image, with Student's t.
        metrics: Of the images of each method, as coolsd.metrics.FID and coolsd.metrics.ClipScore; one whose network is
            missing is named and left out.
        check: Load and check everything, decode nothing.
        compile: torch.compile target and head.
        certificates: Bound each relaxed method's bias and KL. That is part of the measured time, and LANTERN's, of all
            codes, takes longest: false compares speeds alone.
        device: cpu, cuda, mps or auto.
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the hardware has it).
        seed: Image i is a function of (caption, seed, i).
    """
    _check(
        {"limit": limit, "repeats": repeats, "batch_size": batch_size}, [method.name for method in methods], baseline
    )
    captions = find_captions(prompts, split, limit, seed)
    rank, processes = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
    if processes > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    model = load_image_target(target, device, dtype, compile)
    for row, caption in enumerate(captions):
        if why := model.problem(caption):
            raise ValueError(f"caption {row} ({caption[:60]!r}) has {why}")
    for first in range(0, len(captions), 64):  # keeps what is encoded on disk
        model.encode(captions[first : first + 64], sampling.branches == 2)
    contenders = list(load(model, methods, head, len(captions), sampling, compile, batch_size))
    wanted: list[Metric] = []
    if rank == 0:
        print(f"{len(captions)} prompts, {repeats} repeats, methods: {', '.join(c.name for c in contenders)}")
        wanted = ready(metrics or [])
    if len({metric.column for metric in wanted}) < len(wanted):
        raise ValueError("two metrics of one kind would share a column of the table; measure them in two runs")
    if metrics and rank == 0:
        print(f"metrics of images: {', '.join(metric.column for metric in wanted) or 'none'}")
    if check:
        return None
    about = {
        "environment": results.environment(model.device, model.dtype),
        "target": model.fingerprint,
        "image_tokenizer": model.image_tokenizer.fingerprint,
        "draft": checkpoint_name(head) if any(m.head is None and needs_head(m.drafter) for m in methods) else None,
        "repeats": repeats,
        "batch_size": batch_size,
        "compiled": compile,
        "certificates": certificates,
        "processes": processes,
        "seed": seed,
    }
    measured_on = {name: about["environment"][name] for name in ("versions", "device", "cpu", "threads", "dtype")}
    same = {
        **about,
        "environment": measured_on,
        "captions": captions,
        "methods": [[c.name, c.about, c.prompts] for c in contenders],
    }
    if processes > 1:  # first of all: a process that ends with an error now ends the others, too
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=30))  # the slowest share may take long
    if (out / "results.json").exists() and not (out / JOURNAL).exists():
        raise ValueError(f"{out / 'results.json'} is of a run that cannot be continued; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out / journal_name(rank), same)
    (out / "images").mkdir(exist_ok=True)
    before = read_json(out / "results.json", RESULTS_BYTES) if (out / "results.json").exists() else None
    work = list(turns(contenders, len(captions), repeats, batch_size))

    def collect(pieces: dict[str, Any]) -> None:
        for key, contender, *_ in work:
            contender.images.extend(pieces.get(key, []))

    try:
        own = [batch for batch in work if batch[2] % processes == rank]
        measure(model, own, captions, sampling, seed, batch_size, certificates, out, journal, quiet=rank > 0)
    except BaseException:  # also Ctrl-C: what all methods have decoded by now stays, with its numbers
        collect(journal.pieces)
        if processes == 1 and all(contender.images for contender in contenders):
            conclude(contenders, captions, about, out, before, baseline, [], model.device)
        raise
    if processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if rank > 0:
        return None
    others = [Journal(out / journal_name(other), same) for other in range(1, processes)]
    pieces = {key: piece for of in (journal, *others) for key, piece in of.pieces.items()}
    if lost := [key for key, *_ in work if key not in pieces]:
        raise ValueError(
            f"{len(lost)} of {len(work)} batches are in no journal in {out}, {lost[0]!r} for one; all processes must "
            "write into one folder of a disk that they share"
        )
    collect(pieces)
    return conclude(contenders, captions, about, out, before, baseline, wanted, model.device)


def _check(numbers: dict[str, int | None], methods: list[str], baseline: str | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be >= 1")
    names = ["ar", *(slug(method) for method in methods)]
    if doubled := {name for name in names if names.count(name) > 1 or not name}:
        raise ValueError(f"method names must differ, also from 'ar' and from nothing: {', '.join(sorted(doubled))!r}")
    if baseline not in (None, "ar", *methods):
        raise ValueError(f"no method named {baseline!r} for a baseline; choose one of ar, {', '.join(methods)}")


def conclude(
    contenders: Sequence[Contender], captions: Sequence[str], about: dict[str, Any], out: Path,
    before: dict[str, Any] | None, baseline: str | None, metrics: Sequence[Metric], device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Write results.json, table.md and report.html of what all methods have decoded, and show them. before: an
    earlier results.json, whose scores of the same images stay. Raises ValueError, after that, where a metric failed."""
    plain = contenders[0].images
    measured = {image["row"] for image in plain}  # after Ctrl-C another method may be one batch ahead
    images = {c.name: [image for image in c.images if image["row"] in measured] for c in contenders}
    shown = captions[: 1 + max(image["prompt"] for image in plain)]
    found = {
        "schema": 1,
        **about,
        "prompts": len(shown),
        "captions": shown,
        "minutes": sum(image["latency_s"] for of in images.values() for image in of) / 60,
        "rows": [results.row(c.name, c.about, c.depth, images[c.name], plain, shown) for c in contenders],
    }
    keep_scores(found, before)
    write_json(out / "results.json", found)  # a metric that fails, or is stopped, costs no other number
    failures: list[str] = []
    try:
        for metric in metrics:
            failures += filter(None, [score(metric, found, out, device)])
    finally:
        if baseline is not None:
            found["baseline"] = baseline
            base = next(row for row in found["rows"] if row["name"] == baseline)
            for row in found["rows"]:
                pair, metrics_of = (row["per_image"], base["per_image"]), [*found["metrics"]]
                row["against_baseline"] = None if row is base else results.paired(*pair, shown, metrics_of)
        write_json(out / "results.json", found)
        report.write(out, found)
        results.show(found)
        print(f"{out / 'results.json'}, {out / 'table.md'}, {out / 'report.html'}")
    if failures:
        raise ValueError(f"all else is measured, but not {'; '.join(failures)}")
    return found


def journal_name(rank: int) -> str:
    return JOURNAL if rank == 0 else f"measured-{rank}.jsonl"


def keep_scores(found: dict[str, Any], before: dict[str, Any] | None) -> None:
    """What metrics said of the same images when this run ended before stays until they are measured anew."""
    found["metrics"] = {}
    rows = {row["name"]: row for row in before["rows"]} if before else {}
    if before and [rows.get(row["name"], {}).get("images") for row in found["rows"]] == [
        row["images"] for row in found["rows"]
    ]:
        found["metrics"] = before.get("metrics", {})
        for row in found["rows"]:
            old = rows[row["name"]]
            for column in found["metrics"]:
                row[column] = old.get(column)
                if column in old["per_image"]:
                    row["per_image"][column] = old["per_image"][column]


def score(metric: Metric, found: dict[str, Any], out: Path, device: torch.device) -> str | None:
    """Fill a metric's column of all rows; a distance between sets is left out where a method has fewer images than
    plain decoding. Returns why it failed, in one sentence, and then the column is null."""
    made = []
    for row in found["rows"]:
        shown = zip(row["per_image"]["file"], row["per_image"]["prompt"], strict=True)
        made.append([(out / file, found["captions"][prompt]) for file, prompt in shown if file is not None])
    why = None
    columns: list[tuple[float | None, list[float] | None]] = []
    try:
        for pairs in made:
            pictures, words = [picture for picture, _ in pairs], [word for _, word in pairs]
            each = metric.each(pictures, words, device) if isinstance(metric, ImageMetric) else None
            value = statistics.fmean(each) if each else None
            if each is None and len(pairs) == len(made[0]):
                value = metric.score(pictures, words, device)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"the score is {value}")
            columns.append((value, each))
            if len(columns) == 1:
                found["metrics"][metric.column] = metric.about()  # of plain decoding, which has all images
    except Exception as error:  # of a library's network, of pictures, of captions: the other metrics go on
        found["metrics"].pop(metric.column, None)
        columns = [(None, None)] * len(made)
        why = f"{metric.column}: {type(error).__name__} {error}".splitlines()[0]
    for row, (value, each) in zip(found["rows"], columns, strict=True):
        row[metric.column] = value
        row["per_image"].pop(metric.column, None)
        if each:
            scores = iter(each)
            files = row["per_image"]["file"]
            row["per_image"][metric.column] = [None if file is None else next(scores) for file in files]
    return why


def find_captions(prompts: list[str] | Path | None, split: str, limit: int | None, seed: int) -> list[str]:
    """The prompts: a list, a file, or the held-out captions of the embedded emojis (which the repository holds)."""
    if isinstance(prompts, Path):
        return read_prompts(prompts, seed)[:limit]
    if prompts is not None:
        if not prompts:
            raise ValueError("prompts is an empty list; give captions, or leave it out for the emojis' held-out ones")
        return prompts[:limit]
    emoji = importlib.import_module("data.emoji.dataset")  # by name: coolsd does not depend on data
    return [item.caption for item in emoji.EmojiImages(split, jitter=False, limit=limit or 64).items]


def load(
    model: Any, methods: Sequence[Method], head: str, prompts: int, sampling: Sampling, compile: bool, batch_size: int
) -> Iterator[Contender]:
    """Plain decoding, then the methods; each head is loaded once."""
    yield Contender("ar", None, None, {"rule": None, "drafter": None, "sampling": asdict(sampling)}, prompts, [])
    heads = {
        folder: load_head(folder, model, compile=compile)
        for folder in {method.head or head for method in methods if needs_head(method.drafter)}
    }
    for method in methods:
        if method.first is not None and not 1 <= method.first <= prompts:
            raise ValueError(f"method {method.name}: first is {method.first}, but must be 1 to {prompts}, the prompts")
        if (method.first or prompts) not in (prompts, *range(0, prompts, batch_size)):
            raise ValueError(
                f"method {method.name}: first is {method.first}, but latencies compare whole batches of {batch_size}; "
                "give a multiple"
            )
        folder = method.head or head
        settings = ("delta", "nu", "floor", "k", "bound", "resampling")
        rule = make_rule(method.rule, **{name: getattr(method, name) for name in settings})
        rule = rule.bind(model) if hasattr(rule, "bind") else rule
        drafter = make_drafter(method.drafter, heads.get(folder), method.length)
        about = {
            "rule": describe_rule(rule, drafter.depth),
            "drafter": describe_drafter(drafter, checkpoint_name(folder)),
            "sampling": asdict(sampling),
        }
        yield Contender(method.name, drafter, rule, about, method.first or prompts, [])


# one method on one batch: its key in the journal, the method, the batch's number, the repeat, the first prompt
Batch: TypeAlias = tuple[str, Contender, int, int, int]


def turns(contenders: Sequence[Contender], prompts: int, repeats: int, batch_size: int) -> Iterator[Batch]:
    """Every batch of prompts by all methods, one after another, in an order that turns from batch to batch, so that
    drift of the machine hits all alike."""
    starts = [(repeat, first) for repeat in range(repeats) for first in range(0, prompts, batch_size)]
    for turn, (repeat, first) in enumerate(starts):
        for contender in [*contenders[turn % len(contenders) :], *contenders[: turn % len(contenders)]]:
            if first < contender.prompts:
                yield f"{contender.name} {repeat} {first}", contender, turn, repeat, first


def measure(
    model: Any, work: Sequence[Batch], captions: Sequence[str], sampling: Sampling, seed: int, batch_size: int,
    certificates: bool, out: Path, journal: Journal, quiet: bool,
) -> None:  # fmt: skip
    """Decode what the journal does not have. Beforehand each method starts on a batch of each size, unmeasured, to warm
    up."""

    def done(key: str) -> bool:
        pictures = [record["file"] for record in journal.pieces.get(key, []) if "file" in record]
        return key in journal.pieces and all((out / name).is_file() for name in pictures)

    left = [batch for batch in work if not done(batch[0])]
    cold = {(c.name, min(batch_size, c.prompts - first)): c for _, c, _, _, first in left}
    with progress_bar("evaluate", len(work) + len(cold), "batches measured", quiet) as bar:
        for (_, size), contender in cold.items():
            warm_up(model, captions[:size], contender.drafter, contender.rule, sampling, certificates)
            bar.update(bar.task_ids[0], advance=1)
        bar.update(bar.task_ids[0], advance=len(work) - len(left))
        for key, contender, _, repeat, first in left:
            batch = range(first, min(first + batch_size, contender.prompts))
            journal.add(key, decode(model, contender, captions, batch, sampling, seed, repeat, certificates, out))
            bar.update(bar.task_ids[0], advance=1, rate=str(len(journal.pieces)))


class _WarmedUp(Exception):
    pass


def warm_up(
    model: Any, captions: Sequence[str], drafter: Any, rule: Any, sampling: Sampling, certificates: bool
) -> None:
    """The first rounds of an image, in which all shapes of a method occur, and the decoding of its pixels."""
    rounds = itertools.count(1)

    def stop(_: Any) -> None:
        if next(rounds) == WARM_UP_ROUNDS:
            raise _WarmedUp

    with contextlib.suppress(_WarmedUp):
        generate(model, captions, drafter, rule, sampling, observer=stop, certificates=certificates)
    model.decode_images(torch.zeros(len(captions), model.image_tokens, dtype=torch.long, device=model.device))


def decode(
    model: Any, contender: Contender, captions: Sequence[str], batch: range, sampling: Sampling, seed: int, repeat: int,
    certificates: bool, out: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """Decode prompts `batch` together: one record per image; the pictures of repeat 0 go to out/images."""
    rows = [repeat * len(captions) + prompt for prompt in batch]
    words = [captions[prompt] for prompt in batch]
    began = time.perf_counter()
    drafter, rule = contender.drafter, contender.rule
    result = generate(model, words, drafter, rule, sampling, seed, rows, certificates=certificates)
    latency = (time.perf_counter() - began) / len(batch)
    assert result.images is not None
    records = []
    for index, prompt in enumerate(batch):
        numbers: dict[str, Any] = {"prompt": prompt, "repeat": repeat, "row": rows[index], "batch": rows[0]}
        numbers["latency_s"] = latency
        numbers |= results.record(result, index)
        numbers["seconds"] = {part: value / len(batch) for part, value in result.seconds.items()}
        if repeat == 0:
            numbers["file"] = f"images/{prompt:04d}-{slug(words[index])}--{slug(contender.name)}.png"
            job = Job(words[index], rows[index], out / numbers["file"])
            write_png(result.images[index], job, {"seed": seed, **contender.about})
        records.append(numbers)
    return records


def main(args: list[str]) -> None:
    parser = argument_parser("evaluate", "Prompts -> images of several methods -> results.json, table.md, report.html.")
    call(evaluate, parser, args)
