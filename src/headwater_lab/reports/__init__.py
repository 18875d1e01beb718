"""Tables, pictures and the HTML page of comparisons, from saved records.

comparison.py  which records belong together   words.py     tables and sentences
curves.py      runs and their means            pictures.py  what matplotlib draws
styles.py      colors, markers, dashes         recipes.py   changes of each arm
numbers.py     rows of numbers                 cost_tables.py    gains and what they cost
page.py        the page and its files          table_formats.py  CSV, Markdown, LaTeX
"""

from headwater_lab.reports.comparison import Comparison, read_comparisons
from headwater_lab.reports.page import FORMATS, write_report
from headwater_lab.reports.table_formats import PageTable
from headwater_lab.reports.words import result_rows

__all__ = ["FORMATS", "Comparison", "PageTable", "read_comparisons", "result_rows", "write_report"]
