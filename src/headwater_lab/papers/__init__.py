"""Reproduce the papers' tables and figures at an affordable scale, and judge each claim by its interval.

table.py     a table as data: tables/PAPER/TABLE.yaml     arms.py     which run is which arm of it
work.py      what it trains                               training_runs.py  training it
price.py     what that costs
measures.py  what its cells contain                       claims.py   whether the paper's claims replicate
computing.py tables that need no training                 result.py   the table next to the paper's
kept.py      finished runs in one file                    theory.py   theorems of the KV shifting paper as code
"""
