"""Benchmarks: our trainer against others, peaks of the machine, predictors of memory; traces and constants to keep."""
