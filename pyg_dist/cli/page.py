"""One self-contained HTML page of a plan or a profile: its text and its pictures, nothing from elsewhere."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_STYLE = "body{font-family:sans-serif;margin:2em;max-width:90em}pre{overflow-x:auto}svg{max-width:100%;height:auto}"


def write_page(path: str | Path, title: str, text: str, pictures: Sequence[Callable[[Path], None]]) -> None:
    """Write the page.

    Args:
        path: the file.
        title: the heading.
        text: shown as it is.
        pictures: each draws into the .svg file that it is given.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    drawn = []
    with tempfile.TemporaryDirectory(prefix="pyg_dist") as folder:
        for number, draw in enumerate(pictures):
            file = Path(folder) / f"{number}.svg"
            draw(file)
            svg = file.read_text()
            drawn.append(svg[svg.index("<svg") :])
    name = html.escape(title)
    Path(path).write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{_STYLE}</style></head>\n"
        f"<body><h1>{name}</h1>\n<pre>{html.escape(text)}</pre>\n" + "\n".join(drawn) + "\n</body></html>\n"
    )
