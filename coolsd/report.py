"""`coolsd report`: results.json -> report.html, which needs no network and no other file, and table.md.

Knows results.json and HTML; knows no model.  Every word from a file is escaped, every picture lies in the run's folder.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from coolsd.checkpoint import write_whole
from coolsd.cli import argument_parser
from coolsd.results import cells, comparison, half, header, markdown, setting, show

PROMPTS_SHOWN = 16
PICTURE = 256  # pixels, at most; larger ones are shown smaller
PARTS = {"prefill": "#9aa5b1", "draft": "#e8a33d", "target": "#3b6fb6", "verify": "#7a4fa3", "decode_images": "#5aa469"}


def write(folder: Path, results: dict[str, Any]) -> None:
    """report.html, table.md and figures/, as PNG and SVG, into the folder of results.json."""
    drawn = {name: figure for name, figure in (("chart", chart(results)), ("positions", heat_map(results))) if figure}
    (folder / "figures").mkdir(exist_ok=True)
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            write_whole(folder / "figures" / f"{name}.{kind}", partial(figure.savefig, format=kind))
    page = html(folder, results, {name: png(figure) for name, figure in drawn.items()})
    write_whole(folder / "report.html", lambda part: part.write_text(page, "utf-8"))
    write_whole(folder / "table.md", lambda part: part.write_text(markdown(results), "utf-8"))


def html(folder: Path, results: dict[str, Any], figures: dict[str, bytes]) -> str:
    rows, made = results["rows"], results["environment"]
    best = max(rows, key=lambda row: row["speedup"])
    about = {
        "Command": made["command"],
        "Target": results["target"],
        "Draft head": results["draft"],
        "Machine": f"{made['cpu']}, {made['cores']} cores, {made['threads']} threads; {made['platform']}",
        "Device, dtype": f"{made['device']}, {made['dtype']}{', compiled' if results['compiled'] else ''}",
        "Versions": ", ".join(f"{name} {version}" for name, version in made["versions"].items()),
        "Date": made["date"],
        "Measured for": f"{results['minutes']:.1f} minutes, seed {results['seed']}",
    }
    fits = results["prompts"] <= PROMPTS_SHOWN
    depth = max(len(row["acceptance_per_position"]) for row in rows)
    positions = [
        [row["name"], schedule(row)] + [f"{share:.2f}" if share is not None else "-" for share in padded(row, depth)]
        for row in rows
        if row["acceptance_per_position"]
    ]
    pictures = grid(folder, results)
    differences = comparison(results)
    return PAGE.format(
        style=STYLE,
        headline=escape(
            f"{best['name']}: {best['speedup']:.2f} times as fast as plain decoding, "
            f"{best['accepted_length']['mean']:.2f} tokens per target call"
        ),
        setting=escape(setting(results) + "; ± and brackets: 95% intervals"),
        table=table_html(header(results), cells(results)) + (table_html(*differences) if differences[1] else ""),
        chart=f'<img class="chart" alt="bar charts of the table" src="{png_uri(figures["chart"])}">',
        heat_map=HEAT_MAP.format(png_uri(figures["positions"])) if "positions" in figures else "",
        positions=table_html(["method", "relaxation w", *(f"depth {d + 1}" for d in range(depth))], positions),
        grid=pictures,
        shown=f"Same caption and seed in each row{'' if fits else f'; the first {PROMPTS_SHOWN} prompts'}. Lossless "
        "methods draw other samples of the target's own distribution; relaxed ones deviate from it by the bias above.",
        about="".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in about.items()),
    )


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
    columns = [row["per_image"] for row in results["rows"]]
    files = [{p: f for p, f in zip(of["prompt"], of["file"], strict=True) if f} for of in columns]
    head = "<th></th>" + "".join(f"<th>{escape(row['name'])}</th>" for row in results["rows"])
    body = ""
    for prompt, caption in enumerate(results["captions"][:PROMPTS_SHOWN]):
        body += f"<tr><th>{escape(caption)}</th>"
        for of in files:
            source = f' src="{png_uri(picture(folder, of[prompt]))}"' if prompt in of else ""
            body += f'<td><img alt="{escape(caption)}"{source}></td>' if source else "<td></td>"
        body += "</tr>"
    return f'<div class="wide"><table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(folder: Path, name: str) -> bytes:
    """A run's picture as PNG bytes without its metadata. Raises ValueError for a file outside the run's folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"results.json names the picture {name!r}, which lies outside {folder}")
    with Image.open(path) as image:
        small = image.convert("RGB")
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
    count = 1 + len(rows[0]["length_at_token"])
    side = math.isqrt(count)
    shape = (side, side) if side * side == count else (1, count)
    maps = [np.reshape([np.nan, *row["length_at_token"]], shape) for row in rows]
    across = min(4, len(rows))
    down = -(-len(rows) // across)
    figure = Figure(figsize=(2.6 * across + 1, 2.7 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    limits = {"vmin": min(np.nanmin(one) for one in maps), "vmax": max(np.nanmax(one) for one in maps)}
    for axis, row, one in zip(axes, rows, maps, strict=False):
        image = axis.imshow(one, cmap="viridis", aspect="equal" if shape[0] > 1 else "auto", **limits)
        axis.set_title(row["name"].replace("$", r"\$"), fontsize=9)
    for axis in axes:
        axis.set_axis_off()
    bar = figure.colorbar(image, ax=axes.tolist(), shrink=0.8)
    bar.set_label("tokens per target call", fontsize=8)
    return figure


def chart(results: dict[str, Any]) -> Any:
    """Accepted length, time by part, bias and NLL of each method."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    names = [row["name"].replace("$", r"\$") for row in rows]
    colours = ["#9aa5b1" if row["rule"] is None else "#3b6fb6" for row in rows]
    figure = Figure(figsize=(11, 1.6 + 0.62 * len(rows)), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flatten()
    panels = (("accepted_length", "accepted length (tokens per target call)"), None,
              ("bias_per_token", "bias per token (bound)"), ("nll_per_token", "NLL per token (nats)"))  # fmt: skip
    for axis, panel in zip(axes, panels, strict=True):
        if panel is None:
            left = [0.0] * len(rows)
            for part, colour in PARTS.items():
                width = [row["seconds"][part] for row in rows]
                axis.barh(names, width, left=left, color=colour, label=part.replace("_", " "))
                left = [a + b for a, b in zip(left, width, strict=True)]
            axis.bar_label(axis.containers[-1], [f" {row['speedup']:.2f}x" for row in rows], fontsize=8)
            axis.set_title("seconds per image, and speed-up", fontsize=10)
            axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
            axis.margins(x=0.12)
            continue
        key, title = panel
        means = [(row[key] or {"mean": 0.0})["mean"] for row in rows]
        halves = [half(row[key] or {}) or 0.0 for row in rows]
        bars = axis.barh(names, means, xerr=halves, color=colours, error_kw={"lw": 1, "ecolor": "#333"})
        axis.bar_label(bars, [f" {mean:#.3g}" for mean in means], fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure


HEAT_MAP = """<h2>Where in the picture drafts pass</h2>
<p class="quiet">Tokens of the target call that gave each token, row by row of the image, the mean over all images.</p>
<img class="chart" alt="accepted length at each place of the image" src="{}">"""
STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d232b; background: #fff; max-width: 1120px; margin: 2.5rem auto;
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
A difference to plain decoding beyond chance is drift.</dd>
<dt>Speed-up</dt><dd>Mean latency of plain decoding divided by the method's, on the same prompts, from caption to
pixels, loading excluded.</dd>
</dl>
<h2>How the numbers were made</h2>
<dl>{about}</dl>
<p class="quiet">To be read with care: latencies hold for this machine, dtype and batch size, and other work on it
lengthens them. All methods were warmed up and took turns prompt by prompt; certificates are computed within the
measured time. Relaxed rules trade exactness for speed: bias and KL are bounds, not distances, and neither measures
image quality. With few prompts, small differences between methods are chance; see the intervals.</p>
</body>
</html>
"""


def main(args: list[str]) -> None:
    parser = argument_parser("report", "results.json -> report.html and table.md, in the same folder.")
    parser.add_argument("folder", type=Path, help="folder of results.json, as coolsd evaluate writes it")
    folder = parser.parse_args(args).folder
    try:
        results = json.loads((folder / "results.json").read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'results.json'} is not JSON ({error}); make it with coolsd evaluate") from None
    if not isinstance(results, dict) or results.get("schema") != 1:
        raise ValueError(f"{folder / 'results.json'} is not of schema 1; make it with coolsd evaluate")
    write(folder, results)
    show(results)
    print(folder / "report.html")
