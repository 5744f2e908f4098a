"""What others load: the records, claims and predictions as tables."""
