"""Tables, pictures and the HTML page of comparisons, from saved records.

comparison.py   which records belong together  words.py          tables and sentences
curves.py       runs and their means           pictures.py       what matplotlib draws
numbers.py      rows of numbers                recipes.py        changes of each arm
cost_tables.py  gains and what they cost       table_formats.py  CSV, Markdown, LaTeX
page.py         the page and its files
"""

from headwater_lab.reports.comparison import Comparison, read_comparisons
from headwater_lab.reports.page import FORMATS, write_report
from headwater_lab.reports.table_formats import PageTable
from headwater_lab.reports.words import result_rows

__all__ = ["FORMATS", "Comparison", "PageTable", "read_comparisons", "result_rows", "write_report"]
