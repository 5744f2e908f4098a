"""Benchmarks: our trainer against others, the machine's peaks, and predictors of memory."""
