"""Benchmarks: our trainer against others, peaks of the machine, predictors of memory; and the traces of the package."""
