"""Benchmarks: our trainer against others, peaks of the machine, scores of predictors; traces and constants to keep."""
