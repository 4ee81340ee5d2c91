"""Alembic environment: the connection comes from `fedlora.ledger.store`, which holds the write lock."""

from __future__ import annotations

from alembic import context

from fedlora.ledger.schema import metadata

_config = getattr(context, "config", None)  # None when this module is imported outside of Alembic

if _config is not None:
    context.configure(
        connection=_config.attributes["connection"],
        target_metadata=metadata,
        transaction_per_migration=False,
    )
    context.run_migrations()
