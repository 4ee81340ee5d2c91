"""Alembic migrations of the ledger's tables; `fedlora.ledger.store` runs them."""
