"""The ledger: published claims, the checks that judge them, and their verdicts."""
