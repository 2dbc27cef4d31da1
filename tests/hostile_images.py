"""A folder of good, odd and bad files with captions: `python tests/hostile_images.py FOLDER`.

`make` returns what to expect of each: None where it is usable, else the reason for which it is skipped.
"""

import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin


def noise(width=40, height=40, channels=3):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width, height, bits=1):
    """A PNG of so many pixels, all black, in few bytes: what a decompression bomb looks like."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = zlib.compress(bytes((width * bits + 7) // 8 + 1) * min(height, 200), 9)
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def make(folder: Path) -> dict[str, str | None]:
    """Writes the files, returns by file name what to expect."""
    folder.mkdir(parents=True, exist_ok=True)
    expected: dict[str, str | None] = {}

    def add(name, content, reason=None, caption=b"a thing"):
        (folder / name).write_bytes(content)
        if caption is not None:
            (folder / name).with_suffix(".txt").write_bytes(caption)
        expected[name] = reason

    jpeg = encoded(noise(), "JPEG")
    add("plain.jpg", jpeg)
    add("wide.PNG", encoded(noise(120, 40), "PNG"))
    add("webp.webp", encoded(noise(), "WEBP"))
    add("bitmap.bmp", encoded(noise(), "BMP"))
    add("tiff.tif", encoded(noise(), "TIFF"))
    add("gray.jpg", encoded(noise(channels=1), "JPEG"))
    add("cmyk.jpg", encoded(noise().convert("CMYK"), "JPEG"))
    deep = np.full((40, 40), 65535, np.uint16)
    deep[:, 20:] = 257 * 100
    add("sixteen_bits.png", encoded(Image.fromarray(deep), "PNG"))
    palette = noise().quantize(16)
    add("palette.png", encoded(palette, "PNG", transparency=3))
    clear = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    add("clear.png", encoded(clear, "PNG"))
    add("gray_alpha.png", encoded(clear.convert("LA"), "PNG"))
    add("one_bit.png", encoded(noise(channels=1).convert("1"), "PNG"))
    red, blue = (Image.new("RGB", (40, 40), colour) for colour in ("red", "blue"))
    add("animated.gif", encoded(red, "GIF", save_all=True, append_images=[blue]))
    half = Image.new("RGB", (40, 40), "red")
    half.paste(blue.crop((0, 0, 40, 20)), (0, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter
    add("turned.jpg", encoded(half, "JPEG", quality=95, exif=exif))
    add("broken_exif.jpg", jpeg[:2] + b"\xff\xe1\x00\x10Exif\x00\x00broken!!" + jpeg[2:])
    add("tiny.png", encoded(noise(1, 1), "PNG"))
    add("names.jpg", jpeg, caption="صورة قطة 🐈 \x00 naïve".encode())
    add("long.jpg", jpeg, caption=b"\xef\xbb\xbf" + b"word " * 2000)

    add("empty.jpg", b"", "empty file")
    add("text.jpg", b"this is no image at all", "not an image")
    add("truncated.jpg", encoded(noise(200, 200), "JPEG")[:9000], "truncated image")
    broken = bytearray(encoded(noise(), "PNG"))
    broken[200:220] = bytes(20)
    add("broken.png", bytes(broken), "broken image")
    add("bomb.png", png_header(60_000, 60_000), "too many pixels")
    add("large.png", png_header(9_000, 9_000), "too many pixels")
    add("thread.png", png_header(1, 5_000), "too long")
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("bomb", "x" * (2 << 20), zip=True)
    add("text_bomb.png", encoded(noise(), "PNG", pnginfo=chunks), "broken image")
    add("postscript.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image")
    add("drawing.jpg", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "not an image")
    floats = Image.fromarray(np.ones((40, 40), np.float32))
    add("floats.tif", encoded(floats, "TIFF"), "unknown pixel range")
    add("silent.jpg", jpeg, "empty caption", caption=b" \n\t ")
    add("alone.jpg", jpeg, "empty caption", caption=None)
    add("latin.jpg", jpeg, "caption is not UTF-8", caption=b"na\xefve")
    (folder.parent / "secret.jpg").write_bytes(jpeg)
    (folder / "link.jpg").symlink_to(folder.parent / "secret.jpg")
    (folder / "link.txt").write_text("a secret")
    expected["link.jpg"] = "path outside the folder"
    (folder / "folder.jpg").mkdir()  # no file, so no item
    return expected


if __name__ == "__main__":
    made = make(Path(sys.argv[1]))
    print("\n".join(f"{name:<20} {reason or 'usable'}" for name, reason in made.items()))
