"""Evaluation by the field's own evaluators, and the statistics of paired comparisons."""
