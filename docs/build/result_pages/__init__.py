"""Pages of results that the site builds from results/: see docs/build/results_hook.py."""
