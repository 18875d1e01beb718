"""Compare arms of a recipe: trials side by side in worker processes, and statistics over their records.

running.py     all that a recipe's comparison trains
trials.py      what to train              budget.py    arms at equal tokens, FLOPs or parameters
pool.py        training it side by side   tuning.py    learning rates
statistics.py  what the results say       scaling.py   loss against size, and what equals what
search.py      which mechanisms together  prices.py     what each arm costs, measured
run_costs.py   what all runs cost, counted
earlier.py     runs that are there already  sequential.py  what may be said after every seed
"""
