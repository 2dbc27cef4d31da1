"""Finished pieces of a long run, one line of JSON each, so that an interrupted run goes on where it stopped.

Knows one file; knows no model.  Its first line holds the settings that all pieces share.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """`pieces` by key; a line that was not written whole does not count."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises ValueError where the file was begun with other settings, or is none of ours."""
        self.path = path
        self.pieces: dict[str, Any] = {}
        try:
            settings = json.loads(json.dumps(settings, allow_nan=False))  # as they come back
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings must be words and finite numbers, to be reported: {error}") from None
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        try:
            if lines and not whole and not json.dumps(settings).encode().startswith(lines[0]):
                raise ValueError("not even the first line is ours")
            begun, *entries = [json.loads(line) for line in whole] or [settings]
            self.pieces = dict(entries)
            differing = [name for name, value in settings.items() if begun.get(name) != value]
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"{path} is no record of finished images; choose another folder, or delete this one"
            ) from None
        if differing:
            raise ValueError(
                f"{path} was begun with another {' and '.join(differing)}; choose another folder, or delete "
                "this one to measure anew"
            )
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(sum(map(len, whole)))
        if not whole:
            self._append(settings)

    def add(self, key: str, piece: Any) -> None:
        """Keep a piece; it is on the disk when this returns."""
        self._append([key, piece])
        self.pieces[key] = piece

    def _append(self, value: Any) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(value, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
