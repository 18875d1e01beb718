"""Tables, pictures and the HTML page of comparisons, from saved records.

comparison.py  which records belong together   words.py     tables and sentences
curves.py      runs and their means            figures.py   what plotly draws
styles.py      colors, markers, dashes        pictures.py  curves by matplotlib
recipes.py     changes of each arm            prices.py    gains beside costs
page.py        the page
"""

from headwater_lab.reports.comparison import Comparison, comparisons
from headwater_lab.reports.page import Head, PageTable, Picture, write_report
from headwater_lab.reports.prices import prices_of, terminal_prices
from headwater_lab.reports.words import (
    answer,
    cells,
    columns,
    cost_tables,
    domains_table,
    left_out,
    note,
    reading,
    table,
)

__all__ = [
    "Comparison",
    "Head",
    "PageTable",
    "Picture",
    "answer",
    "cells",
    "columns",
    "comparisons",
    "cost_tables",
    "domains_table",
    "left_out",
    "note",
    "prices_of",
    "reading",
    "table",
    "terminal_prices",
    "write_report",
]
