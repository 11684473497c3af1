"""Reports: tables, figures and one self-contained HTML page, made from the files of run folders only."""

from __future__ import annotations

from apiece.report import page, results
from apiece.report.page import write
from apiece.report.results import TableRow, cell, columns, load, table

__all__ = ["TableRow", "cell", "columns", "load", "page", "results", "table", "write"]
