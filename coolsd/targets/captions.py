"""What a LlamaGen target is prompted with: words with vectors of their own, T5's hidden states, or a class number.

Knows text and its features; knows no image. An encoder is called with B captions and the number of prompt slots P, and
returns features [B, P, D], left-padded with zeros, and mask bool [B, P].
"""

from __future__ import annotations

import hashlib
import html
import re
import urllib.parse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from coolsd.checkpoint import write_whole

LONGEST = 10_000  # characters of a caption that are looked at; the slots hold a few hundred


class WordEncoder(nn.Module):
    """Captions without a language model: one learned vector per word. Needs no download and trains with the target."""

    def __init__(self, tokenizer: Tokenizer, words: int, caption_dim: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.embedding = nn.Embedding(words, caption_dim)

    def problem(self, caption: str) -> str | None:
        """Why this caption would be refused."""
        return None if self.tokenizer.encode(caption).ids else "no words"

    def forward(self, captions: Sequence[str], slots: int) -> tuple[Tensor, Tensor]:
        """Raises ValueError for a caption without words. Warns of words that it does not know, which all share one
        vector, and of words that do not fit into the slots, which are left out."""
        ids = torch.zeros(len(captions), slots, dtype=torch.long)
        mask = torch.zeros(len(captions), slots, dtype=torch.bool)
        unknown = self.tokenizer.token_to_id("[unknown]")
        for row, encoding in enumerate(self.tokenizer.encode_batch(list(captions))):
            words = encoding.ids[:slots]
            if not words:
                raise ValueError(f"caption {row} ({captions[row]!r}) has no words")
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            strange = [captions[row][start:end] for id, (start, end) in spans if id == unknown]
            if strange:
                warnings.warn(
                    f"{captions[row][:60]!r}: the target does not know {', '.join(dict.fromkeys(strange))}",
                    stacklevel=3,
                )
            if len(encoding.ids) > slots:
                warnings.warn(f"{captions[row][:60]!r}: only its first {slots} words count", stacklevel=3)
            ids[row, slots - len(words) :] = torch.tensor(words)
            mask[row, slots - len(words) :] = True
        device = self.embedding.weight.device
        ids, mask = ids.to(device), mask.to(device)
        return self.embedding(ids) * mask[..., None], mask


def read_features(path: Path, slots: int) -> Tensor:
    """[n <= slots, D] float32 that a `T5Encoder` has kept. Raises ValueError where the file is broken."""
    try:
        kept = load_file(path)["features"].float()
        if kept.ndim != 2 or not 1 <= len(kept) <= slots:
            raise ValueError(f"its features have shape {list(kept.shape)}")
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} holds no caption features ({error}); delete it, and it is made anew") from None
    return kept


class T5Encoder:
    """flan-t5's hidden states, as LlamaGen and LANTERN take them: cleaned text, at most P tokens, padding on the left.

    The model is loaded at the first caption that is not kept already, on `device` and in `dtype`, which need not be
    the target's (bfloat16 as in LANTERN, or float32). keep: folder of features made before, one safetensors file a
    caption, named by what made it; `coolsd captions` fills it, so that decoding needs no T5 at all.
    """

    def __init__(
        self,
        name: str = "google/flan-t5-xl",
        keep: Path | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.name, self.keep, self.device, self.dtype = name, keep, torch.device(device), dtype
        self._loaded: tuple[Any, Any] | None = None

    def problem(self, caption: str) -> str | None:
        """Why this caption would be refused."""
        return None if clean(caption) else "no words"

    def __call__(self, captions: Sequence[str], slots: int) -> tuple[Tensor, Tensor]:
        """Raises ValueError for a caption of which cleaning leaves nothing."""
        texts = [clean(caption) for caption in captions]
        for row, (text, caption) in enumerate(zip(texts, captions, strict=True)):
            if not text:
                raise ValueError(f"caption {row} ({caption[:60]!r}) has no words")
        rows = [self._row(text, slots) for text in texts]
        width = rows[0].shape[-1]
        if other := next((len(row[0]) for row in rows if row.shape[-1] != width), 0):
            raise ValueError(f"{self.keep} has caption features {width} wide, and {other}; delete it, it is made anew")
        features = torch.zeros(len(rows), slots, width)
        mask = torch.zeros(len(rows), slots, dtype=torch.bool)
        for index, states in enumerate(rows):
            features[index, slots - len(states) :] = states
            mask[index, slots - len(states) :] = True
        return features, mask

    def _row(self, text: str, slots: int) -> Tensor:
        """[n <= slots, D] float32 of one cleaned caption."""
        path = None
        if self.keep is not None:
            made_by = f"{self.name} {self.dtype} {slots} {text}"
            path = self.keep / f"{hashlib.sha256(made_by.encode(errors='replace')).hexdigest()[:32]}.safetensors"
            if path.is_file():
                return read_features(path, slots)
        row = self._run(text, slots)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lambda part: save_file({"features": row.to(self.dtype)}, part))
        return row

    @torch.inference_mode()
    def _run(self, text: str, slots: int) -> Tensor:
        tokenizer, model = self._load()
        tokens = tokenizer(text, max_length=slots, truncation=True, add_special_tokens=True, return_tensors="pt")
        ids = tokens["input_ids"].to(model.device)  # once loaded, it stays where it is
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].float().cpu()

    def _load(self) -> tuple[Any, Any]:
        """Raises FileNotFoundError where the text encoder is neither on this machine nor to be had."""
        if self._loaded is None:
            from transformers import AutoTokenizer, T5EncoderModel

            try:
                tokenizer = AutoTokenizer.from_pretrained(self.name)
                model = T5EncoderModel.from_pretrained(self.name, dtype=self.dtype)
            except (OSError, ValueError) as error:
                raise FileNotFoundError(
                    f"the text encoder {self.name} could not be loaded ({str(error).splitlines()[0][:120]}); download "
                    f"it with `hf download {self.name}`, or make the captions' features elsewhere: coolsd captions"
                ) from None
            self._loaded = tokenizer, model.eval().to(self.device)  # type: ignore[arg-type]
        return self._loaded


def read_vocabulary(path: Path, ids: int) -> Tokenizer:
    """Raises ValueError where the file is no tokenizer, or has ids that a table of so many rows has not."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path} is no tokenizer ({error}); copy the checkpoint's own {path.name} there") from None
    if (last := max(tokenizer.get_vocab().values(), default=0)) >= ids:
        raise ValueError(f"{path} has ids up to {last}, but the model has {ids}; copy the checkpoint's own there")
    return tokenizer


class ClassLabels:
    """A class number as a caption: "207". Returns the numbers [B, 1, 1] in place of features."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def problem(self, caption: str) -> str | None:
        """Why this caption would be refused."""
        number = re.fullmatch(r"\s*[0-9]{1,9}\s*", caption)
        return None if number and int(caption) < self.classes else "no class number"

    def __call__(self, captions: Sequence[str], slots: int) -> tuple[Tensor, Tensor]:
        """Raises ValueError for anything but 0 .. classes - 1."""
        for row, caption in enumerate(captions):
            if self.problem(caption):
                raise ValueError(
                    f"caption {row} is {caption[:60]!r}, but this target draws classes: give a number from 0 to "
                    f"{self.classes - 1}"
                )
        labels = torch.tensor([int(caption) for caption in captions])[:, None, None]
        return labels, torch.ones(len(captions), slots, dtype=torch.bool)


# LlamaGen cleans captions as DeepFloyd IF does: these patterns in this order, twice over. (pattern, what it becomes)
_ADDRESS = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)"
_FILES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_BEFORE_HTML = [
    ("<person>", "person"),
    (rf"\b((?:https?:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_ADDRESS}))", ""),
    (rf"\b((?:www:(?:\/{{1,3}}|[a-zA-Z0-9%])|{_ADDRESS}))", ""),
]
_BLOCKS = ["\u31c0-\u31ef", "\u31f0-\u31ff", "\u3200-\u32ff", "\u3300-\u33ff", "\u3400-\u4dbf", "\u4dc0-\u4dff",
           "\u4e00-\u9fff"]  # fmt: skip
_DASHES = (
    "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58"
    "\ufe63\uff0d"
)
_AFTER_HTML = [
    (r"@[\w\d]+\b", ""),
    *((f"[{block}]+", "") for block in _BLOCKS),
    (f"[{_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"[\S]+\.(?:{_FILES})", ""),
    (r"[\"\']{2,}", '"'),
    (r"[\.]{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]{1,}", " "),
    (r"\s+\.\s+", " "),
]
_AFTER_REPAIR = [
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_FILES})(\simage[s]?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),
    (r"\b\s+\:\s+", ": "),
    (r"(\D[,\./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
    (r"^[\'\_,\-\:;]", ""),
    (r"[\'\_,\-\:\-\+]$", ""),
    (r"^\.\S+$", ""),
]


def clean(caption: str) -> str:
    """A caption as LlamaGen hands it to T5: lower case, no addresses, markup, file names, CJK or shop talk.

    Raises ModuleNotFoundError, naming the extra, without ftfy and beautifulsoup4.
    """
    try:
        import ftfy
        from bs4 import BeautifulSoup
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} cleans captions for T5 and is not installed; pip install 'coolsd[llamagen]'"
        ) from None

    def once(text: str) -> str:
        text = _replace(urllib.parse.unquote_plus(text).strip().lower(), _BEFORE_HTML)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a caption that looks like a file name or an address is one all the same
            text = BeautifulSoup(text, features="html.parser").text
        text = _replace(text, _AFTER_HTML)
        if len(re.findall(r"[-_]", text)) > 3:  # this-is-my-cute-cat
            text = re.sub(r"[-_]", " ", text)
        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        return _replace(text, _AFTER_REPAIR).strip()

    whole = caption[:LONGEST].replace("\0", " ").encode(errors="replace").decode()
    return once(once(whole))


def _replace(text: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text
