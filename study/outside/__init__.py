"""Measurements published by others: the rows, the setups that they describe, and the errors of predictions."""
