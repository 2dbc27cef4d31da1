"""The numbers of a run: one image's record, a method's row of results.json, the table, and the machine it was made on.

Knows statistics and strict JSON; knows no model and no loop.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
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
    name: str, about: dict[str, Any], depth: int, images: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """A row of results.json from its images' records and those of plain decoding; carries them as `per_image`."""
    images = sorted(images, key=lambda image: image["row"])
    listed = [key for key in images[0] if key not in UNLISTED]
    per_image: dict[str, list[Any]] = {key: [image.get(key) for image in images] for key in listed}
    parts = list(images[0]["seconds"])
    of_plain = {image["row"]: image["latency_s"] for image in plain}
    batches: dict[int, list[float]] = {}  # images of one batch share one latency: [plain, own, images], summed
    for image in images:
        of = batches.setdefault(image["batch"], [0.0, 0.0, 0.0])
        for index, value in enumerate((of_plain[image["row"]], image["latency_s"], 1.0)):
            of[index] += value
    speedup, interval = ratio([of[0] for of in batches.values()], [of[1] for of in batches.values()])
    infinite = per_image["kl_infinite"]
    measured = [*MEASURED, *(key for key in ("accepted_length_unforced",) if key in per_image)]  # where a layout forces
    summaries = {key: summary([value for value in per_image[key] if value is not None]) for key in measured}
    summaries["latency_s"] = summary([own / count for _, own, count in batches.values()], statistics.fmean(
        image["latency_s"] for image in images
    ))  # fmt: skip
    assert summaries["accepted_length"] is not None
    nll_of_plain = {image["row"]: image["nll_per_token"] for image in plain}
    nlls = [(image["nll_per_token"], nll_of_plain[image["row"]]) for image in images]
    drift = [own - of for own, of in nlls if own is not None and of is not None]
    return {
        "name": name,
        **about,
        "images": len(images),
        **summaries,
        "nll_drift": summary(drift),
        "kl_infinite_fraction": None if None in infinite else sum(infinite) / len(infinite),
        "speedup": speedup,
        "speedup_ci95": interval,
        "speedup_over_accepted_length": speedup / summaries["accepted_length"]["mean"],
        "seconds": {part: statistics.fmean(image["seconds"][part] for image in images) for part in parts},
        "acceptance_per_position": acceptance_per_position([image["emitted"] for image in images], depth),
        "length_at_token": length_at_token([image["emitted"] for image in images]),
        "fid": None,
        "clip_score": None,
        "image_reward": None,
        "per_image": per_image,
    }


def acceptance_per_position(emitted: Sequence[Sequence[int]], depth: int) -> list[float | None]:
    """Share of the tests executed at each depth that passed. The last call of an image is cut at its end: left out."""
    calls = [count for image in emitted for count in image[:-1]]
    executed = [sum(count >= position for count in calls) for position in range(1, depth + 2)]
    return [after / before if before else None for before, after in itertools.pairwise(executed)]


def length_at_token(emitted: Sequence[Sequence[int]]) -> list[float]:
    """How many tokens the call gave that gave token 1, 2, ... T - 1 of an image, the mean over images: where in the
    picture drafts pass. Token 0 is the prefill's."""
    spread = np.array([np.repeat(image, image) for image in emitted], dtype=float)
    return spread.mean(0).round(3).tolist()


def summary(values: Sequence[float], mean: float | None = None) -> dict[str, Any] | None:
    """{"mean", "std", "ci95": [low, high] of the mean by Student's t}; of one value only the mean, of none None.

    mean: a better one than the values', such as one that weighs batches by their images.
    """
    count = len(values)
    if not count:
        return None
    mean = statistics.fmean(values) if mean is None else mean
    if count < 2:
        return {"mean": mean, "std": None, "ci95": None}
    std = statistics.stdev(values)
    z, df = 1.959964, count - 1  # Student's 97.5% quantile from the normal one (Fisher and Cornish; 0.7% off at df 5)
    expanded = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    quantile = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}.get(df, expanded)
    half = quantile * std / math.sqrt(count)
    return {"mean": mean, "std": std, "ci95": [mean - half, mean + half]}


def half(found: dict[str, Any]) -> float | None:
    """Half-width of the interval of a `summary`; None of one value."""
    return found["ci95"][1] - found["mean"] if found.get("ci95") else None


def with_half(found: dict[str, Any], digits: int, sign: str = "") -> str:
    """ "2.75 ± 0.16", or without an interval "2.75"."""
    own = half(found)
    return f"{found['mean']:{sign}.{digits}f}" + ("" if own is None else f" ± {own:.{digits}f}")


def paired(own: dict[str, list[Any]], baseline: dict[str, list[Any]], metrics: Sequence[str] = ()) -> dict[str, Any]:
    """{quantity: summary of the differences own - baseline of the same images, with Student's "t"}.

    own, baseline: `per_image` of two rows. metrics: columns compared where they are scores of single images. t is null
    where all differences are equal, or there is but one.
    """
    found: dict[str, Any] = {}
    for key in (*COMPARED, *(name for name in metrics if name in own and name in baseline)):
        of_baseline = dict(zip(baseline["row"], baseline[key], strict=True))
        pairs = [(value, of_baseline.get(row)) for row, value in zip(own["row"], own[key], strict=True)]
        values = [value - other for value, other in pairs if value is not None and other is not None]
        differences = summary(values)
        if differences is not None:
            error = (differences["std"] or 0.0) / math.sqrt(len(values))
            differences["t"] = differences["mean"] / error if error else None
        found[key] = differences
    return found


def ratio(plain: Sequence[float], own: Sequence[float]) -> tuple[float, list[float] | None]:
    """Ratio of sums of latencies and its 95% interval: 2,000 bootstrap samples of (plain, own) pairs; None of one."""
    pairs = np.array([plain, own])
    if pairs.shape[1] < 2:
        return float(pairs[0, 0] / pairs[1, 0]), None
    chosen = np.random.default_rng(0).integers(0, pairs.shape[1], (2000, pairs.shape[1]))
    above, below = pairs[:, chosen].mean(-1)
    return float(pairs[0].mean() / pairs[1].mean()), np.percentile(above / below, [2.5, 97.5]).tolist()


def header(results: dict[str, Any]) -> list[str]:
    """Of the table: what every run has, and the metrics of images that this one was measured by."""
    return [*HEADER, *(column.replace("_", " ") for column in results.get("metrics", {}))]


def cells(results: dict[str, Any], intervals: bool = True) -> list[list[str]]:
    """The table's cells, as in `header`; behind the sign half-widths of 95% intervals of the mean."""

    def measured(summary: dict[str, Any] | None, digits: int) -> str:
        if summary is None:
            return "-"
        return with_half(summary, digits) if intervals else f"{summary['mean']:.{digits}f}"

    table = []
    for row in results["rows"]:
        infinite = row["kl_infinite_fraction"]
        kl = measured(row["kl_per_token"], 4) + (f" ({infinite:.0%} infinite)" if infinite else "")
        between = " ({:.2f}-{:.2f})".format(*row["speedup_ci95"]) if intervals and row["speedup_ci95"] else ""
        unforced = row.get("accepted_length_unforced") if intervals else None
        length = measured(row["accepted_length"], 2) + (f" ({unforced['mean']:.2f} unforced)" if unforced else "")
        table.append([
            row["name"], length, measured(row["target_calls"], 1),
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
    (_, first), *_ = runs
    metrics = {column: about for column, about in metrics.items() if column not in apart}
    merged = {
        "schema": 1,
        "apart": sorted(set(apart)),
        "rows": rows,
        "captions": captions,
        "prompts": len(captions),
        "metrics": metrics,
    }
    if len({run.get("baseline") for _, run in runs}) == 1:
        merged["baseline"] = first.get("baseline")
    return {**merged, "minutes": sum(run["minutes"] for _, run in runs), "runs": [run for _, run in runs]}


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
    return "; ".join([*dict.fromkeys(_setting(run) for run in results.get("runs", [results])), *apart])


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
