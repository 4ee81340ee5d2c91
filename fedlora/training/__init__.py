"""The trainer: Poisson sampling, cohort training, ledger order."""
