"""First schema: accounts, events, entries, snapshots; append-only by triggers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from fedlora.ledger.schema import append_only_ddl

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, the sentinel rows that foreign keys of ledger-wide entries point to, and the guards."""
    sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    accounts = op.create_table(
        "accounts",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("client", sa.String(256), nullable=False),
        sa.Column("dataset", sa.String(256), nullable=False),
        sa.UniqueConstraint("client", "dataset", name="uq_accounts_key"),
    )
    events = op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("json", sa.Text, nullable=False),
    )
    _create_entries(sequence)
    op.create_table(
        "snapshots",
        sa.Column("seq", sequence, sa.ForeignKey("entries.seq"), primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.bulk_insert(accounts, [{"id": 0, "client": "", "dataset": ""}])
    op.bulk_insert(events, [{"id": 0, "hash": "", "json": ""}])
    for statement in append_only_ddl(op.get_bind().dialect.name):
        op.execute(statement)


def _create_entries(sequence: sa.types.TypeEngine[int]) -> None:
    op.create_table(
        "entries",
        sa.Column("seq", sequence, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(1), nullable=False),
        sa.Column("account_id", sa.Integer, sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("run_id", sa.String(256), nullable=False),
        sa.Column("server_round", sa.BigInteger, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("event_id", sa.Integer, sa.ForeignKey("events.id"), nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("charge", sa.BigInteger, nullable=False),
        sa.Column("ref", sa.BigInteger, nullable=False),
        sa.Column("period", sa.Integer, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("mac", sa.LargeBinary(32), nullable=False),
    )
    op.create_index(
        "uq_entries_round",
        "entries",
        ["run_id", "server_round", "account_id", "attempt"],
        unique=True,
        sqlite_where=sa.text("kind = 'R'"),
        postgresql_where=sa.text("kind = 'R'"),
    )
    op.create_index(
        "ix_entries_ref",
        "entries",
        ["ref"],
        sqlite_where=sa.text("ref > 0"),
        postgresql_where=sa.text("ref > 0"),
    )
