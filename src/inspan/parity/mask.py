"""What is volatile in a prompt by its form: dates, times, UUIDs, hashes, temporary paths, ports, nonces. Contract:
pure; masking a second time changes nothing, and texts that differ only in such values become equal.
"""

from __future__ import annotations

import re
from typing import Final

_DAY: Final = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)(?:s|nes|rs|ur)?(?:day)?\.?,?"
_MONTH: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_NUMBER: Final = r"\d{1,2}(?:st|nd|rd|th)?"
_CLOCK: Final = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
_ZONE: Final = r"(?:\ ?(?:[AaPp][Mm]|Z|UTC|GMT|[A-Z]{2,4}T|[+-]\d{2}:?\d{2}))*"
_REST: Final = r"""[^\s"'`<>()\[\],;:⟨⟩]*[^\s"'`<>()\[\],;:⟨⟩.]"""  # of a path; a full stop ends the sentence
_FORMS: Final = {
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "date": rf"""\d{{4}}-\d{{2}}-\d{{2}}(?:[T\ ]{_CLOCK}{_ZONE})?
        | \d{{4}}/\d{{2}}/\d{{2}} | \d{{1,2}}/\d{{1,2}}/\d{{4}}
        | (?:{_DAY}\s+)?{_MONTH}\s+{_NUMBER}(?:\s+{_CLOCK}{_ZONE})?(?:,?\s+\d{{4}})?
        | (?:{_DAY}\s+)?{_NUMBER}\s+{_MONTH}(?:,?\s+\d{{4}})?(?:\s+{_CLOCK}{_ZONE})?
        | {_MONTH},?\s+\d{{4}}
        | (?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day""",
    "time": _CLOCK + _ZONE,
    "path": rf"(?:/private)?/(?:var/)?(?:tmp|folders)/{_REST} | /dev/shm/{_REST} | [A-Z]:\\{_REST}\\Temp\\{_REST}",
    "hash": r"(?:0x)?(?=[0-9]*[a-fA-F])(?=[a-fA-F]*[0-9])(?:[0-9a-f]{7,}|[0-9A-F]{7,})",
    "number": r"\d{9,}",
    "nonce": r"(?=(?:[A-Za-z]*\d){2})(?=(?:[^\WA-Z_]*[A-Z]){2})(?=(?:[^\Wa-z_]*[a-z]){2})[A-Za-z0-9]{16,}",
    "key": r"(?<=/r/)[\w-]{16,}",
    "port": r"(?<=localhost:)\d{2,5} | (?<=127\.0\.0\.1:)\d{2,5} | (?<=0\.0\.0\.0:)\d{2,5} | (?<=\[::1\]:)\d{2,5}",
}
# A value neither begins nor ends inside a word, nor beside a mask: so no mask makes room for another.
_VOLATILE: Final = re.compile(
    "(?<![\\w⟩])(?:" + " | ".join(f"(?P<{name}>{form})" for name, form in _FORMS.items()) + ")(?![\\w⟨])", re.VERBOSE
)


def mask(text: str) -> str:
    """The text with volatile values replaced by what they are: "⟨date⟩", "⟨path⟩"."""
    return _VOLATILE.sub(lambda match: f"⟨{match.lastgroup}⟩", text)
