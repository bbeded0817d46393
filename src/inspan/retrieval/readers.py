"""From a file to its text. Contract: a text, or a `Skipped` that says why the file has none; nothing is guessed.

Text, Markdown, reStructuredText, HTML, manual pages (groff, gzipped or not) and, with pypdf, PDF.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

TEXT = (".txt", ".text", ".md", ".markdown", ".rst")
HTML = (".html", ".htm", ".xhtml")
MANUAL = re.compile(r"\.[1-9][a-z0-9]*(\.gz)?$")
LARGEST = 64 * 1024 * 1024  # bytes of a file


class Skipped(ValueError):
    """A file that is no document; its text says why."""


def read_document(path: Path) -> str:
    """The text of a file. Raises `Skipped`, and OSError when it cannot be read at all."""
    read = _reader(path.name)
    if read is None:
        raise Skipped(f"unknown ending {path.suffix or 'none'}")
    if path.stat().st_size > LARGEST:
        raise Skipped(f"larger than {LARGEST} bytes")
    text = read(path.read_bytes()).replace("\r\n", "\n").strip()
    if not text:
        raise Skipped("no text in it")
    return text + "\n"


def _reader(name: str) -> Callable[[bytes], str] | None:
    lower = name.lower()
    if lower.endswith(TEXT):
        return _decoded
    if lower.endswith(HTML):
        return lambda data: from_html(_decoded(data))
    if MANUAL.search(lower):
        return lambda data: from_manual(_decoded(_unzipped(data)))
    return _from_pdf if lower.endswith(".pdf") else None


def _decoded(data: bytes) -> str:
    if b"\0" in data[:8192]:
        raise Skipped("binary")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Skipped(f"not UTF-8 (byte {error.start})") from None


def _unzipped(data: bytes) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.open(BytesIO(data)) as file:
            out = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Skipped(f"damaged gzip: {error}") from None
    if len(out) > LARGEST:
        raise Skipped(f"unpacks to more than {LARGEST} bytes")
    return out


def _from_pdf(data: bytes) -> str:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError:
        raise Skipped("PDF needs pypdf (pip install 'inspan[pdf]')") from None
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(BytesIO(data)).pages)
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # as damaged ones do
        raise Skipped(f"damaged PDF: {error}") from None


# ---- HTML -------------------------------------------------------------------------------------------------------

_BLOCK_TAGS = (
    "address article aside blockquote body dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 "
    "h6 header hr li main nav ol p pre section summary table tbody thead title tr ul"
)
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_SILENT = frozenset(("script", "style", "template", "noscript", "svg"))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent = self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in _SILENT
        self._pre += tag == "pre"
        if tag in _BLOCKS:
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(0, self._silent - (tag in _SILENT))
        self._pre = max(0, self._pre - (tag == "pre"))
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def from_html(source: str) -> str:
    """The visible text of a page: a paragraph a block, code as it stands."""
    page = _Page()
    page.feed(source)
    page.close()
    text = re.sub(r"[ \t]*\n[ \t]*\n\s*?(?=\S|$)", "\n\n", "".join(page.parts))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)^ (?=\S)", "", text))


# ---- manual pages -----------------------------------------------------------------------------------------------

_HEADINGS = frozenset(("SH", "Sh", "SS", "Ss", "TH", "Dt"))
_BREAKS = frozenset(
    ("PP", "P", "LP", "Pp", "TP", "TQ", "IP", "HP", "It", "sp", "RS", "RE", "nf", "fi", "EX", "EE", "Bd", "Ed")
)
_QUIET = frozenset(
    ("de", "ie", "if", "el", "ds", "nr", "so", "ig", "tr", "ft", "ad", "nh", "hy", "Dd", "Os", "Bl", "El")
)
_ESCAPES = {
    "-": "-",
    "e": "\\",
    "&": "",
    "|": "",
    "^": "",
    " ": " ",
    "~": " ",
    "0": " ",
    "/": "",
    ",": "",
    "%": "",
    ":": "",
}
_NAMED = {
    "aq": "'",
    "dq": '"',
    "lq": "“",
    "rq": "”",
    "bu": "•",
    "em": "—",
    "en": "–",
    "co": "©",
    "ti": "~",
    "ha": "^",
    "rs": "\\",
}
_ESCAPE = re.compile(
    r"\\(?:\((..)|\[([^\]]*)\]|f(?:\[[^\]]*\]|\(..|.)|s[+-]?\d+|\*(?:\[[^\]]*\]|\(..|.)|\"[^\n]*|(.)|$)"
)


def from_manual(source: str) -> str:
    """The text of a manual page in the man or mdoc macros, section by section."""
    lines: list[str] = []
    for line in source.split("\n"):
        if not line.startswith((".", "'")):
            lines.append(_plain(line))
            continue
        name, _, rest = line[1:].strip().partition(" ")
        if name in _HEADINGS:
            lines += ["", _plain(rest.replace('"', "")), ""]
        elif name in _BREAKS:
            lines.append("")
            if name in ("IP", "It") and rest:
                lines.append(_arguments(rest))
        elif name and not name.startswith("\\") and name not in _QUIET:
            lines.append(_arguments(rest, "" if name in ("BR", "RB", "IR", "RI", "BI", "IB") else " "))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _arguments(rest: str, between: str = " ") -> str:
    words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
    return _plain(between.join(words))


def _plain(text: str) -> str:
    def written(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name is not None:
            return _NAMED.get(name, "")
        return _ESCAPES.get(found[3], found[3]) if found[3] else ""

    return _ESCAPE.sub(written, text).rstrip()
