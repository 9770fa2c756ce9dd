"""Evaluation of a policy on questions: runs, scores and tables."""
