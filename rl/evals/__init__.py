"""Evaluations: suites of tasks run over several passes, and what their scores mean."""
