"""`coolsd report`: results.json of one run or several -> table.md, figures/ and report.html, which needs no other file.

Knows results.json and HTML; knows no model.  Every word from a file is escaped, every picture lies in its run's folder.
"""

from __future__ import annotations

import base64
import io
import json
import math
import textwrap
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from coolsd.checkpoint import write_whole
from coolsd.cli import argument_parser, is_mistake
from coolsd.metrics import PIXELS
from coolsd.results import agreement, cells, comparison, half, header, markdown, merge, relaxed, setting, show

PROMPTS_SHOWN = 16
DIALS = ("delta", "k")  # of a rule: what moves along its curve
PICTURE = 256  # pixels, at most; larger ones are shown smaller
DRAWN = 8  # prompts of the figure of images
PARTS = {"prefill": "#9aa5b1", "draft": "#e8a33d", "target": "#3b6fb6", "verify": "#7a4fa3", "decode_images": "#5aa469"}


def write(folder: Path, results: dict[str, Any]) -> None:
    """report.html, table.md and figures/, as PNG and SVG, into the folder of results.json."""
    figures = (("chart", chart(results)), ("tradeoff", tradeoff(results)), ("positions", heat_map(results)))
    drawn = {name: figure for name, figure in figures if figure}
    sheet = images(folder, results)
    (folder / "figures").mkdir(exist_ok=True)
    pngs = {}
    for name, figure in (drawn | ({"images": sheet} if sheet else {})).items():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once for both formats
        pngs[name] = png(figure)
        write_whole(folder / "figures" / f"{name}.png", partial(Path.write_bytes, data=pngs[name]))
        write_whole(folder / "figures" / f"{name}.svg", partial(figure.savefig, format="svg"))
    page = html(folder, results, pngs)
    write_whole(folder / "report.html", lambda part: part.write_text(page, "utf-8"))
    write_whole(folder / "table.md", lambda part: part.write_text(markdown(results), "utf-8"))


def html(folder: Path, results: dict[str, Any], figures: dict[str, bytes]) -> str:
    rows = results["rows"]
    best = max(rows, key=lambda row: row["speedup"])
    abouts = [about(run) for run in results.get("runs", [results])]
    merged = {key: "; ".join(dict.fromkeys(one[key] for one in abouts)) for key in abouts[0]}
    fits = results["prompts"] <= PROMPTS_SHOWN
    seeded = " and seed" if len({run["seed"] for run in results.get("runs", [results])}) == 1 else ""
    depth = max(len(row["acceptance_per_position"]) for row in rows)
    positions = [
        [row["name"], schedule(row)] + [f"{share:.2f}" if share is not None else "-" for share in padded(row, depth)]
        for row in rows
        if row["acceptance_per_position"]
    ]
    differences, ranks = comparison(results), agreement(results)
    return PAGE.format(
        style=STYLE,
        headline=escape(
            f"{best['name']}: {best['speedup']:.2f} times as fast as plain decoding, "
            f"{best['accepted_length']['mean']:.2f} tokens per target call"
        ),
        setting=escape(setting(results) + "; ± and brackets: 95% intervals"),
        table=table_html(header(results), cells(results)) + (table_html(*differences) if differences[1] else ""),
        chart=f'<img class="chart" alt="bar charts of the table" src="{png_uri(figures["chart"])}">',
        tradeoff=TRADEOFF.format(png_uri(figures["tradeoff"]), table_html(*ranks) if ranks[1] else "")
        if "tradeoff" in figures
        else "",
        heat_map=HEAT_MAP.format(png_uri(figures["positions"])) if "positions" in figures else "",
        positions=table_html(["method", "relaxation w", *(f"depth {d + 1}" for d in range(depth))], positions),
        grid=grid(folder, results),
        shown=f"Same caption{seeded} in each row{'' if fits else f'; the first {PROMPTS_SHOWN} prompts'}. Lossless "
        "methods draw other samples of the target's own distribution; relaxed ones deviate, at most by the bias.",
        about="".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in merged.items()),
    )


def about(run: dict[str, Any]) -> dict[str, str]:
    """How a run's numbers were made."""
    made = run["environment"]
    return {
        "Command": made["command"]
        + (f" ({processes} processes)" if (processes := run.get("processes", 1)) > 1 else ""),
        "Target": str(run["target"]),
        "Draft head": str(run["draft"]),
        "Machine": f"{made['cpu']}, {made['cores']} cores, {made['threads']} threads; {made['platform']}",
        "Device, dtype": f"{made['device']}, {made['dtype']}{', compiled' if run['compiled'] else ''}",
        "Versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "Metrics": "; ".join(f"{name}: {settings}" for name, settings in run.get("metrics", {}).items()) or "none",
        "Date": made["date"],
        "Measured for": f"{run['minutes']:.1f} minutes, seed {run['seed']}",
    }


def schedule(row: dict[str, Any]) -> str:
    return ", ".join(f"{w:.2f}" for w in row["rule"].get("schedule", [])) or "-"


def padded(row: dict[str, Any], depth: int) -> list[float | None]:
    return (row["acceptance_per_position"] + [None] * depth)[:depth]


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def grid(folder: Path, results: dict[str, Any]) -> str:
    """The same prompts in rows, the methods in columns."""
    folders, files = pictures(folder, results)
    head = "<th></th>" + "".join(f"<th>{escape(row['name'])}</th>" for row in results["rows"])
    body = ""
    for prompt, caption in enumerate(results["captions"][:PROMPTS_SHOWN]):
        body += f"<tr><th>{escape(caption)}</th>"
        for own, of in zip(folders, files, strict=True):
            source = f' src="{png_uri(picture(own, of[prompt]))}"' if prompt in of else ""
            body += f'<td><img alt="{escape(caption)}"{source}></td>' if source else "<td></td>"
        body += "</tr>"
    return f'<div class="wide"><table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pictures(folder: Path, results: dict[str, Any]) -> tuple[list[Path], list[dict[int, str]]]:
    """Of each method its run's folder, and the first file of each prompt that has one."""
    rows = results["rows"]
    found: list[dict[int, str]] = [{} for _ in rows]
    for row, files in zip(rows, found, strict=True):
        for prompt, file in zip(row["per_image"]["prompt"], row["per_image"]["file"], strict=True):
            if file:
                files.setdefault(prompt, file)
    return [row.get("folder", folder) for row in rows], found


def images(folder: Path, results: dict[str, Any]) -> Any:
    """The pictures of the first prompts, a row a method; None where a run kept none."""
    from matplotlib.figure import Figure

    folders, files = pictures(folder, results)
    captions = results["captions"][:DRAWN]
    shown = [number for number, of in enumerate(files) if any(prompt in of for prompt in range(len(captions)))]
    if not shown:
        return None
    figure = Figure(figsize=(1.7 + 1.05 * len(captions), 0.5 + 1.05 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), len(captions), squeeze=False)
    for axis, caption in zip(axes[0], captions, strict=True):
        axis.set_title(wrapped(caption, 16, 4), fontsize=7)
    for line, number in zip(axes, shown, strict=True):
        row, of = results["rows"][number], files[number]
        for prompt, axis in enumerate(line):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if prompt in of:
                with Image.open(io.BytesIO(picture(folders[number], of[prompt]))) as image:
                    axis.imshow(np.asarray(image))
        name = f"{wrapped(row['name'], 18, 3)}\n{row['speedup']:.2f}x"
        line[0].set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center")
    return figure


def wrapped(words: str, width: int, lines: int) -> str:
    """In so many lines at most, none of it read as mathematics."""
    return textwrap.fill(words, width, max_lines=lines, placeholder=" ...").replace("$", r"\$")


def picture(folder: Path, name: str) -> bytes:
    """A run's picture as PNG bytes without its metadata. Raises ValueError for a file outside the run's folder, or one
    that is no PNG of a size that we draw."""
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"results.json names the picture {name!r}, which lies outside {folder}")
        with Image.open(path, formats=("PNG",)) as image:
            if image.width * image.height > PIXELS:
                raise ValueError(f"{path} has {image.width} x {image.height} pixels, more than {PIXELS}")
            small = image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"{folder / name} is no picture of a run: {error}") from None
    small.thumbnail((PICTURE, PICTURE))
    small.save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def png_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def png(figure: Any) -> bytes:
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=170)
    return buffer.getvalue()


def heat_map(results: dict[str, Any]) -> Any:
    """Accepted length where it happens in the picture, a panel a method; None where no method has drafted. Tokens that
    make no square are shown in one line."""
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"] if row["rule"] is not None and row.get("length_at_token")]
    if not rows:
        return None
    maps = []
    for row in rows:
        lengths = [np.nan, *row["length_at_token"]]
        side = math.isqrt(len(lengths))
        maps.append(np.reshape(lengths, (side, side) if side * side == len(lengths) else (1, -1)))
    across = min(4, len(rows))
    down = -(-len(rows) // across)
    figure = Figure(figsize=(2.6 * across + 1, 2.7 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    limits = {"vmin": min(np.nanmin(one) for one in maps), "vmax": max(np.nanmax(one) for one in maps)}
    for axis, row, one in zip(axes, rows, maps, strict=False):
        image = axis.imshow(one, cmap="viridis", aspect="equal" if len(one) > 1 else "auto", **limits)
        axis.set_title(row["name"].replace("$", r"\$"), fontsize=9)
    for axis in axes:
        axis.set_axis_off()
    bar = figure.colorbar(image, ax=axes.tolist(), shrink=0.8)
    bar.set_label("tokens per target call", fontsize=8)
    return figure


def family(row: dict[str, Any]) -> str:
    """What a curve of the trade-off has in common: all of rule and drafter but the rule's dial."""
    rule = {key: value for key, value in row["rule"].items() if key not in ("name", "schedule", *DIALS)}
    words = [row["rule"]["name"], *(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                                    for key, value in rule.items() if value is not None)]  # fmt: skip
    drafter = [str(value) for value in row["drafter"].values() if value is not None]
    return f"{' '.join(words)}, {' '.join(drafter)}"


def tradeoff(results: dict[str, Any]) -> Any:
    """Accepted length against bias, KL, NLL drift and each metric, with 95% intervals; settings of one rule on one
    drafter are joined. None for fewer than 3 methods that deviate from the target."""
    from matplotlib.figure import Figure

    if len(relaxed(results["rows"])) < 3:
        return None
    panels = {"bias_per_token": "bias per token (bound)", "kl_per_token": "KL per token (bound, nats)"}
    panels |= {"nll_drift": "NLL drift (nats)"} | {key: key.replace("_", " ") for key in results.get("metrics", {})}
    panels = {key: title for key, title in panels.items() if any(row.get(key) for row in results["rows"])}
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["rows"]:
        if row["rule"] is not None:
            same = str([row["sampling"], row["images"], row.get("folder")])
            families.setdefault((family(row), same), []).append(row)
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.2 * across + 2, 3.9 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
    for axis, (key, title) in zip(axes, panels.items(), strict=False):
        for number, of in enumerate(families.values()):
            found = []
            for row in of:
                infinite = key == "kl_per_token" and row["kl_infinite_fraction"]
                if row.get(key) is not None and not infinite:
                    value = row[key] if isinstance(row[key], dict) else {"mean": row[key]}
                    found.append((value, row["accepted_length"]))
            found.sort(key=lambda pair: pair[1]["mean"])
            axis.errorbar(
                [x["mean"] for x, _ in found], [y["mean"] for _, y in found],
                xerr=[half(x) or 0 for x, _ in found], yerr=[half(y) or 0 for _, y in found],
                color=f"C{number % 10}", marker="osD^v"[number // 10 % 5], ms=4, lw=1.2, elinewidth=0.8,
            )  # fmt: skip
        axis.set_xlabel(title.replace("$", r"\$"), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis in axes[::across]:
        axis.set_ylabel("accepted length", fontsize=9)
    labels = [name.replace("$", r"\$") for name, _ in families]
    figure.legend(axes[0].containers, labels, fontsize=8, frameon=False, loc="outside right upper")
    return figure


def chart(results: dict[str, Any]) -> Any:
    """Accepted length, time by part, bias and NLL drift of each method."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    names = [row["name"].replace("$", r"\$") for row in rows]
    colours = ["#9aa5b1" if row["rule"] is None else "#3b6fb6" for row in rows]
    figure = Figure(figsize=(11, 1.6 + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flatten()
    panels = (("accepted_length", "accepted length (tokens per target call)"), None,
              ("bias_per_token", "bias per token (bound)"), ("nll_drift", "NLL drift (nats per token)"))  # fmt: skip
    for axis, panel in zip(axes, panels, strict=True):
        if panel is None:
            left = [0.0] * len(rows)
            for part, colour in PARTS.items():
                width = [row["seconds"][part] for row in rows]
                axis.barh(range(len(rows)), width, left=left, color=colour, label=part.replace("_", " "))
                left = [a + b for a, b in zip(left, width, strict=True)]
            axis.bar_label(axis.containers[-1], [f" {row['speedup']:.2f}x" for row in rows], fontsize=8)
            axis.set_title("seconds per image, and speed-up", fontsize=10)
            axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
            axis.margins(x=0.12)
            continue
        key, title = panel
        known = [isinstance(row.get(key), dict) for row in rows]
        means = [row[key]["mean"] if measured else 0.0 for row, measured in zip(rows, known, strict=True)]
        halves = [half(row.get(key) or {}) or 0.0 for row in rows]
        bars = axis.barh(range(len(rows)), means, xerr=halves, color=colours, error_kw={"lw": 1, "ecolor": "#333"})
        labels = [f" {mean:#.3g}" if measured else " -" for mean, measured in zip(means, known, strict=True)]
        axis.bar_label(bars, labels, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.12)
    axes[0].set_yticks(range(len(rows)), names)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure


TRADEOFF = """<h2>What length costs</h2>
<p class="quiet">Accepted length against what the run knows of its deviation from the target (bias and KL are bounds)
and what was measured of its images; bars are 95% intervals, settings of one rule on one drafter are joined. Higher and
further left is better; of a score further right.</p>
<img class="chart" alt="accepted length against bias, KL, NLL drift and metrics" src="{}">
{}"""
HEAT_MAP = """<h2>Where in the picture drafts pass</h2>
<p class="quiet">Tokens of the target call that gave each token, row by row of the image, the mean over all images.</p>
<img class="chart" alt="accepted length at each place of the image" src="{}">"""
STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d232b; background: #fff; max-width: 1240px; margin: 2.5rem auto;
  padding: 0 1.2rem }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.4rem }
.lead { font-size: 1.1rem; margin: .2rem 0 } .quiet { color: #5b6672; font-size: .9rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums }
th, td { padding: .4rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e8ec }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #c5ccd3; font-weight: 600 }
tbody tr:hover { background: #f5f7f9 } .chart { width: 100%; margin-top: .6rem }
.grid th, .grid td { text-align: center; padding: .25rem }
.grid tbody th { font-weight: 400; white-space: normal; text-align: left; min-width: 11rem; max-width: 15rem }
.grid img { width: 96px; height: 96px; object-fit: contain; border-radius: 4px; display: block; margin: auto }
dt { font-weight: 600; font-size: .9rem; margin-top: .5rem } dd { margin: 0; font-size: .9rem; overflow-wrap: anywhere }
"""

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>coolsd report</title>
<style>{style}</style></head>
<body>
<h1>Speculative decoding of images, measured</h1>
<p class="lead">{headline}</p>
<p class="quiet">{setting}</p>
{table}
{chart}
{tradeoff}
<h2>The same prompts</h2>
<p class="quiet">{shown}</p>
{grid}
<h2>Acceptance by depth</h2>
<p class="quiet">Of the drafted tokens that were tested at each depth, the share that was accepted.</p>
{positions}
{heat_map}
<h2>What the words mean</h2>
<dl>
<dt>Accepted length</dt><dd>Image tokens after the first, divided by the target calls that gave them; plain decoding
has exactly 1. Tokens cut off at the image's end are not counted. Unforced: without those that the layout of the image
dictates, such as ends of lines.</dd>
<dt>Bias per token</dt><dd>For each test of a drafted token, the probability mass accepted beyond the target's; summed
over the tests of an image, divided by its tokens. The mean of the sum bounds the total variation between the output's
distribution and the target's. Exactly 0 for lossless rules.</dd>
<dt>KL per token</dt><dd>A bound of the same kind on the Kullback-Leibler divergence, in nats; infinite where a token
that the target excludes was possible.</dd>
<dt>NLL per token</dt><dd>Minus the log probability, before top-k and top-p, that the target gives the emitted tokens.
NLL drift is its difference to plain decoding's, image by image.</dd>
<dt>Rank correlation</dt><dd>Spearman's, over the methods that deviate from the target (their number in brackets): does
the setting with the larger bound also have the larger measured difference?</dd>
<dt>Speed-up</dt><dd>Mean latency of plain decoding divided by the method's, on the same prompts, from caption to
pixels, loading excluded.</dd>
</dl>
<h2>How the numbers were made</h2>
<dl>{about}</dl>
<p class="quiet">To be read with care: latencies hold for this machine, dtype and batch size, and other work on it
lengthens them. All methods were warmed up and took turns prompt by prompt; certificates, where the table
has any, are computed within the measured time. Relaxed rules trade exactness for speed: bias and KL are bounds, not
distances, and neither measures image quality. With few prompts, small differences between methods are chance; see the
intervals.</p>
</body>
</html>
"""


def read(folder: Path) -> dict[str, Any]:
    """A run's results.json, each row with its folder. Raises ValueError where it is none of ours."""
    path = folder / "results.json"

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        results = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); make it with coolsd evaluate") from None
    if not isinstance(results, dict) or results.get("schema") != 1 or not results.get("rows"):
        raise ValueError(f"{path} is not of schema 1, or has no rows; make it with coolsd evaluate")
    for ours in ("runs", "apart"):
        results.pop(ours, None)
    for row in results["rows"]:
        row["folder"] = folder
    return results


def main(args: list[str]) -> None:
    parser = argument_parser("report", "results.json -> report.html, table.md and figures/; several runs become one.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders of results.json, as coolsd evaluate writes it")
    parser.add_argument("--out", type=Path, default=None, help="folder to write into; of one run its own if not given")
    options = parser.parse_args(args)
    folders: list[Path] = options.folders
    out: Path | None = options.out or (folders[0] if len(folders) == 1 else None)
    if out is None:
        raise ValueError(f"a report of {len(folders)} runs needs a folder of its own: add --out DIR")
    names = [folder.resolve().name for folder in folders]
    names = [name if names.count(name) == 1 else f"{name} {number + 1}" for number, name in enumerate(names)]
    try:
        runs = [(name, read(folder)) for name, folder in zip(names, folders, strict=True)]
        results = merge(runs) if len(runs) > 1 else runs[0][1]
        out.mkdir(parents=True, exist_ok=True)
        write(out, results)
        show(results)
    except Exception as error:  # strangers' files break in more ways than can be listed
        if is_mistake(error):
            raise
        found, why = ", ".join(str(folder / "results.json") for folder in folders), f"{type(error).__name__} {error}"
        raise ValueError(f"{found}: not as coolsd evaluate writes it ({why.splitlines()[0]})") from error
    print(out / "report.html")
