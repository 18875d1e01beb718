"""Evaluate trained models, headwater's and others', on benchmarks and on text in one table.

Benchmarks run through lm-evaluation-harness (`tasks`), text through sliding windows (`text_likelihood`). Both produce
each model's score on each item, so that two models are compared item by item (`paired_differences`).
"""

from headwater_lab.evaluation.evaluation import EvaluationResult, build_tables, evaluate, to_json

__all__ = ["EvaluationResult", "build_tables", "evaluate", "to_json"]
