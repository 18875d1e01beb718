"""Pages of results that the site builds from results/: see docs/results_hook.py."""
