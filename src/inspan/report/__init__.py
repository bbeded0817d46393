"""What a run shows: the live view, the table at the end, and one self-contained `report.html`."""

from inspan.report.page import build
from inspan.report.progress import make_progress
from inspan.report.table import print_summary

__all__ = ["build", "make_progress", "print_summary"]
