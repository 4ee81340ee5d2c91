"""Alembic environment: the connection comes from `fedlora.ledger.store`, which holds the write lock."""

from __future__ import annotations

from alembic import context

from fedlora.ledger.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=False,
)
context.run_migrations()
