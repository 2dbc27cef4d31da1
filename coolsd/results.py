"""The numbers of a run: one image's record, a method's row of results.json, the table, and the machine it was made on.

Knows statistics and strict JSON; knows no model and no loop.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
import rich.markup
import torch
from rich.console import Console
from rich.table import Table

import coolsd
from coolsd.interfaces import DecodeResult

MEASURED = ("accepted_length", "target_calls", "latency_s", "bias_per_token", "kl_per_token", "nll_per_token")
UNLISTED = ("seconds", "emitted")  # of a record, in per_image: too long to list
HEADER = ("method", "accepted length", "target calls", "latency s", "speed-up", "speed-up / length", "bias / token",
          "KL / token", "NLL / token", "NLL drift")  # fmt: skip
COMPARED = ("accepted_length", "nll_per_token")  # image by image, with a baseline
SHOWN = (0, 1, 3, 4, 5, 6, 8)  # columns of the printed table


def record(result: DecodeResult, index: int) -> dict[str, Any]:
    """One image's numbers for strict JSON: an infinite KL is null, and said to be infinite."""

    def number(values: torch.Tensor | None) -> float | None:
        return None if values is None or not bool(values[index].isfinite()) else float(values[index])

    kl, unforced = result.kl_per_token, result.accepted_length_unforced
    return {
        "accepted_length": number(result.accepted_length),
        **({} if unforced is None else {"accepted_length_unforced": number(unforced)}),
        "target_calls": int(result.target_calls[index]),
        "emitted": result.emitted[index][: int(result.target_calls[index])].tolist(),
        "bias_per_token": number(result.bias_per_token),
        "kl_per_token": number(kl),
        "kl_infinite": None if kl is None else bool(kl[index].isinf()),
        "nll_per_token": number(result.nll_per_token),
    }


def row(
    name: str, about: dict[str, Any], depth: int, images: list[dict[str, Any]], plain: list[dict[str, Any]],
    captions: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """A row of results.json from its images' records and those of plain decoding; carries them as `per_image`.

    What was decoded of the same captions is alike: intervals are by caption, those of latencies by what was decoded
    together.
    """
    images = sorted(images, key=lambda image: image["row"])
    listed = [key for key in images[0] if key not in UNLISTED]
    per_image: dict[str, list[Any]] = {key: [image.get(key) for image in images] for key in listed}
    parts = list(images[0]["seconds"])
    words = [captions[image["prompt"]] for image in images]
    of_batch: dict[int, list[str]] = {}
    for image, caption in zip(images, words, strict=True):
        of_batch.setdefault(image["batch"], []).append(caption)
    together = [tuple(of_batch[image["batch"]]) for image in images]
    of_plain = {image["row"]: image for image in plain}
    latencies = [(of_plain[image["row"]]["latency_s"], image["latency_s"]) for image in images]
    faster = ratio(*(list(by_group(values, together)) for values in zip(*latencies, strict=True)))
    infinite = per_image["kl_infinite"]
    measured = [*MEASURED, *(key for key in ("accepted_length_unforced",) if key in per_image)]  # where a layout forces
    summaries = {key: summary(per_image[key], together if key == "latency_s" else words) for key in measured}
    assert summaries["accepted_length"] is not None
    nlls = [(image["nll_per_token"], of_plain[image["row"]]["nll_per_token"]) for image in images]
    drift = [None if own is None or of is None else own - of for own, of in nlls]
    return {
        "name": name,
        **about,
        "images": len(images),
        **summaries,
        "nll_drift": summary(drift, words),
        "kl_infinite_fraction": None if None in infinite else sum(infinite) / len(infinite),
        "speedup": faster["mean"],
        "speedup_ci95": faster["ci95"],
        "speedup_over_accepted_length": faster["mean"] / summaries["accepted_length"]["mean"],
        "seconds": {part: statistics.fmean(image["seconds"][part] for image in images) for part in parts},
        "acceptance_per_position": acceptance_per_position([image["emitted"] for image in images], depth),
        "length_at_token": length_at_token([image["emitted"] for image in images]),
        "fid": None,
        "clip_score": None,
        "image_reward": None,
        "per_image": per_image,
    }


def acceptance_per_position(emitted: Sequence[Sequence[int]], depth: int) -> list[float | None]:
    """Share of the tests executed at each depth that passed. A call of n tokens passed n - 1 and failed the next one,
    where there was one; of the last call, cut at the image's end, the outcome of the next one is unknown: left out."""
    whole = [count for image in emitted for count in image[:-1]]
    last = [image[-1] for image in emitted]
    found: list[float | None] = []
    for position in range(1, depth + 1):
        passed = sum(count > position for count in (*whole, *last))
        executed = passed + sum(count == position for count in whole)
        found.append(passed / executed if executed else None)
    return found


def length_at_token(emitted: Sequence[Sequence[int]]) -> list[float]:
    """How many tokens the call gave that gave token 1, 2, ... T - 1 of an image, the mean over images: where in the
    picture drafts pass. Token 0 is the prefill's."""
    spread = np.array([np.repeat(image, image) for image in emitted], dtype=float)
    return spread.mean(0).round(3).tolist()


def summary(values: Sequence[float | None], groups: Sequence[Any] | None = None) -> dict[str, Any] | None:
    """{"mean", "std", "ci95": [low, high] of the mean by Student's t}; of one value only the mean, of none None.

    groups: what each value belongs to, such as its caption. Values of one group are not independent, so that groups are
    what the interval counts. Values that are None are left out.
    """
    pairs = [(value, group) for value, group in zip(values, groups or range(len(values)), strict=True)
             if value is not None]  # fmt: skip
    if not pairs:
        return None
    known = [value for value, _ in pairs]
    mean, std = statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None
    if groups is not None:
        counted = [group for _, group in pairs]
        interval = ratio(*(list(by_group(of, counted)) for of in (known, [1.0] * len(known))))["ci95"]
        return {"mean": mean, "std": std, "ci95": interval}
    if std is None:
        return {"mean": mean, "std": None, "ci95": None}
    half = student(len(known) - 1) * std / math.sqrt(len(known))
    return {"mean": mean, "std": std, "ci95": [mean - half, mean + half]}


def student(df: int) -> float:
    """Student's 97.5% quantile from the normal one (Fisher and Cornish): 0.1% off at df 5."""
    z = 1.959964
    expanded = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    expanded += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    return {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}.get(df, expanded)


def by_group(values: Sequence[float], groups: Sequence[Any]) -> Iterable[float]:
    """The sum of each group's values."""
    sums: dict[Any, float] = {}
    for value, group in zip(values, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + value
    return sums.values()


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """`summary` of sum(above) / sum(below) of independent pairs, linearised about the ratio (delta method)."""
    found, each = sum(above) / sum(below), statistics.fmean(below)
    linear = summary([found + (x - found * y) / each for x, y in zip(above, below, strict=True)])
    assert linear is not None
    return {**linear, "mean": found}


def half(found: dict[str, Any]) -> float | None:
    """Half-width of the interval of a `summary`; None of one value."""
    return found["ci95"][1] - found["mean"] if found.get("ci95") else None


def with_half(found: dict[str, Any], digits: int, sign: str = "") -> str:
    """ "2.75 ± 0.16", or without an interval "2.75"."""
    own = half(found)
    return f"{found['mean']:{sign}.{digits}f}" + ("" if own is None else f" ± {own:.{digits}f}")


def paired(
    own: dict[str, list[Any]], baseline: dict[str, list[Any]], captions: Sequence[str], metrics: Sequence[str] = ()
) -> dict[str, Any]:
    """{quantity: summary of the differences own - baseline of the same images, by caption, with Student's "t"}.

    own, baseline: `per_image` of two rows. metrics: columns compared where they are scores of single images. t is null
    where there is no interval, or one without width.
    """
    found: dict[str, Any] = {}
    for key in (*COMPARED, *(name for name in metrics if name in own and name in baseline)):
        of_baseline = dict(zip(baseline["row"], baseline[key], strict=True))
        values, words = [], []
        for row, prompt, value in zip(own["row"], own["prompt"], own[key], strict=True):
            if value is not None and of_baseline.get(row) is not None:
                values.append(value - of_baseline[row])
                words.append(captions[prompt])
        differences = summary(values, words)
        if differences is not None:
            error = (half(differences) or 0.0) / student(max(1, len(set(words)) - 1))
            differences["t"] = differences["mean"] / error if error else None
        found[key] = differences
    return found


def header(results: dict[str, Any]) -> list[str]:
    """Of the table: what every run has, and the metrics of images that this one was measured by."""
    return [*HEADER, *(column.replace("_", " ") for column in results.get("metrics", {}))]


def cells(results: dict[str, Any], intervals: bool = True) -> list[list[str]]:
    """The table's cells, as in `header`; behind the sign half-widths of 95% intervals of the mean. Behind the name the
    number of images, where others have more."""

    def measured(summary: dict[str, Any] | None, digits: int) -> str:
        if summary is None:
            return "-"
        return with_half(summary, digits) if intervals else f"{summary['mean']:.{digits}f}"

    table = []
    most = max(row["images"] for row in results["rows"])
    for row in results["rows"]:
        infinite = row["kl_infinite_fraction"]
        kl = measured(row["kl_per_token"], 4) + (f" ({infinite:.0%} infinite)" if infinite else "")
        between = " ({:.2f}-{:.2f})".format(*row["speedup_ci95"]) if intervals and row["speedup_ci95"] else ""
        unforced = row.get("accepted_length_unforced") if intervals else None
        length = measured(row["accepted_length"], 2) + (f" ({unforced['mean']:.2f} unforced)" if unforced else "")
        fewer = f" ({row['images']} images)" if row["images"] < most else ""
        table.append([
            row["name"] + fewer, length, measured(row["target_calls"], 1),
            measured(row["latency_s"], 3), f"{row['speedup']:.2f}x{between}",
            f"{row['speedup_over_accepted_length']:.2f}", measured(row["bias_per_token"], 4), kl,
            measured(row["nll_per_token"], 3), measured(row.get("nll_drift"), 3),
            *("-" if row.get(column) is None else f"{row[column]:.2f}" for column in results.get("metrics", {})),
        ])  # fmt: skip
    return table


def comparison(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the differences to the baseline row; no cells without one."""
    rows = [row for row in results["rows"] if results.get("baseline") is not None and row.get("against_baseline")]
    keys = list(dict.fromkeys(key for row in rows for key in row["against_baseline"]))
    table = []
    for row in rows:
        cells = [row["name"]]
        for key in keys:
            found = row["against_baseline"].get(key) or {"mean": math.nan, "t": None}
            cells += [with_half(found, 3, "+"), "-" if found["t"] is None else f"{found['t']:.1f}"]
        table.append(cells)
    names = [name for key in keys for name in (key.replace("_", " ").replace("nll per", "NLL /"), "t")]
    return [f"less {results.get('baseline')}, image by image", *names], table


def agreement(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: Spearman's rank correlation, over the methods that deviate from the target, of what a run can
    know of itself (bias, KL, NLL drift) with what is measured of its images. No cells for fewer than 4 such methods."""
    from torchmetrics.functional import spearman_corrcoef

    measured = ["nll_drift", *results.get("metrics", {})]
    table = []
    for certificate in ("bias_per_token", "kl_per_token", "nll_drift"):
        cells = [certificate.replace("_", " ")]
        for name in measured:
            pairs = [(_value(row, certificate), _value(row, name)) for row in relaxed(results["rows"])]
            both = torch.tensor([pair for pair in pairs if None not in pair], dtype=torch.float64)
            known = len(both) >= 4 and name != certificate and all(len(of.unique()) > 1 for of in both.T)
            cells.append(f"{spearman_corrcoef(*both.T):.2f} ({len(both)})" if known else "-")
        table.append(cells)
    found = any(cell != "-" for cells in table for cell in cells[1:])
    return ["rank correlation", *(name.replace("_", " ") for name in measured)], table if found else []


def relaxed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The methods that deviate from the target; without certificates, those whose rule may."""
    bounds = [(row, _value(row, "bias_per_token")) for row in rows if row["rule"] is not None]
    return [row for row, bias in bounds if (row["rule"]["name"] != "vanilla" if bias is None else bias > 0)]


def _value(row: dict[str, Any], key: str) -> float | None:
    """A row's mean of a quantity; infinite where it is so for any image."""
    if key == "kl_per_token" and row["kl_infinite_fraction"]:
        return math.inf
    value = row.get(key)
    return value["mean"] if isinstance(value, dict) else value


def merge(runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One table of several runs, each (its own name, results): rows whose names occur twice get their run's name, too.
    Captions are shared by their words. "runs" keeps what each run says of itself. A metric that was measured by other
    networks, settings or numbers of images in one run than in another is left out, and named in "apart"."""
    place: dict[tuple[str, int], int] = {}  # (caption, how often it stood before in its run) -> prompt of the table
    names = [row["name"] for _, run in runs for row in run["rows"]]
    rows: list[dict[str, Any]] = []
    metrics: dict[str, Any] = {}
    apart: list[str] = []
    for name, run in runs:
        words = run["captions"]
        own = [place.setdefault((word, words[:index].count(word)), len(place)) for index, word in enumerate(words)]
        for row in run["rows"]:
            prompts = [own[prompt] for prompt in row["per_image"]["prompt"]]
            title = row["name"] if names.count(row["name"]) == 1 else f"{row['name']} ({name})"
            rows.append({**row, "name": title, "per_image": {**row["per_image"], "prompt": prompts}})
        for column, about in run.get("metrics", {}).items():
            if metrics.setdefault(column, about) != about:
                apart.append(column)
    captions = [word for word, _ in place]
    metrics = {column: about for column, about in metrics.items() if column not in apart}
    merged = {
        "schema": 1,
        "rows": rows,
        "captions": captions,
        "prompts": len(captions),
        "metrics": metrics,
    }
    if len({str(_baseline(run)) for _, run in runs}) == 1:
        merged["baseline"] = runs[0][1].get("baseline")
    else:
        apart.append("differences to a baseline")
    merged["apart"] = sorted(set(apart))
    return {**merged, "minutes": sum(run["minutes"] for _, run in runs), "runs": [run for _, run in runs]}


def _baseline(run: dict[str, Any]) -> list[Any] | None:
    """What a run's differences are to, or None."""
    name = run.get("baseline")
    row = next((row for row in run["rows"] if row["name"] == name), None)
    return None if row is None else [name, run["target"], row["rule"], row["drafter"], row["sampling"]]


def markdown(results: dict[str, Any]) -> str:
    def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
        return ["| " + " | ".join(row) + " |" for row in [escaped[0], ["---"] * len(header), *escaped[1:]]]

    lines = table(header(results), cells(results))
    titles, rows = comparison(results)
    lines += ["", *table(titles, rows)] if rows else []
    return "\n".join([*lines, "", f"{setting(results)}; ± and brackets: 95% intervals", ""])


def show(results: dict[str, Any]) -> None:
    """Print the means, as many of them as fit into 80 columns."""
    names = header(results)
    places = [*SHOWN, *range(len(HEADER), len(names))]
    shown = [[row[i] for i in places] for row in cells(results, intervals=False)]
    tables = [([names[i].replace(" ", "\n", 1) for i in places], shown), comparison(results)]
    for titles, rows in tables:
        table = Table(*map(rich.markup.escape, titles), box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*map(rich.markup.escape, row))
        if rows:
            Console().print(table)
    print(setting(results))


def setting(results: dict[str, Any]) -> str:
    """What the numbers hold for, as one sentence a run that differs."""
    apart = [f"left out, as measured in different ways: {', '.join(results['apart'])}"] if results.get("apart") else []
    runs = results.get("runs", [results])
    several = len({tuple(run["captions"]) for run in runs}) > 1
    total = [f"{results['prompts']} prompts in all"] if several else []
    return "; ".join([*total, *dict.fromkeys(_setting(run) for run in runs), *apart])


def _setting(results: dict[str, Any]) -> str:
    made, sampling = results["environment"], results["rows"][0]["sampling"]
    machine = f"{made['cpu']}, {made['threads']} threads" if made["device"] == "cpu" else made["device"]
    compiled = ", compiled" if results["compiled"] else ""
    shared = f", {processes} processes at once" if (processes := results.get("processes", 1)) > 1 else ""
    return (
        f"{results['prompts']} prompts, {results['repeats']} image(s) each, batch {results['batch_size']}, "
        f"{made['dtype']}{compiled}, guidance {sampling['guidance']:g}, temperature {sampling['temperature']:g}, "
        f"top-k {sampling['top_k']}, top-p {sampling['top_p']:g}; {machine}{shared}"
    )


def source_state() -> dict[str, Any] | None:
    """{"commit", "changed"} of the repository that this code lies in; None where there is none, or no git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        ran = [subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
               for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])]  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": ran[0], "changed": bool(ran[1])}


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a reader needs to judge a time."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {"coolsd": coolsd.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "versions": versions,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "platform": platform.platform(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["coolsd", *sys.argv[1:]]),
    }
