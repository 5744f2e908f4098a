"""The ledger: published claims, the verdicts that people wrote, and the evidence that is computed."""
