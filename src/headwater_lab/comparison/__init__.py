"""Compare arms of a recipe: trials side by side in worker processes, and statistics over their records.

running.py     all that a recipe's comparison trains      pool.py        trials side by side
trials.py      what to train                              rounds.py      seeds in rounds until every arm is decided
budget.py      arms at equal tokens, FLOPs or parameters  tuning.py      learning rates
earlier.py     runs that exist already                    search.py      which mechanisms together
statistics.py  paired tests with fixed seeds              sequential.py  paired tests after every seed
scaling.py     laws of loss against size                  arm_costs.py   cost of each arm, counted and timed
run_costs.py   cost of all runs, counted

Four measures say how much compute an arm saves at equal loss. They differ in the loss, and in what fills the gaps
between the baseline's runs:

measure                     module               at the loss of         the baseline's compute is     saves if
Summary.flops_to_threshold  statistics.py        `compare.threshold`    measured in the same runs     below 1
EquivalentFlops.factor      equivalent_flops.py  the arm, at its end    interpolated in `budget_arms` above 1
EquivalentSize.extra        scaling.py           the arm, at each size  of its fitted law, any N      above 0
Speedup                     speedup.py           the arm, at each size  of a law through its loss     above 1
"""
