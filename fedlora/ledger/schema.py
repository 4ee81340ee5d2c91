"""Tables of the ledger (SQLAlchemy Core) and their version; indexes are in the migrations alone.

(Naming a PostgreSQL option here would load that dialect in every process.)
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

REVISION: Final = "0001"
"""Newest migration that this library knows."""

EARLIER: Final[tuple[str, ...]] = ()
"""Migrations before it, from which a ledger can be brought up to date."""

SEQUENCE: Final = sa.BigInteger().with_variant(sa.Integer, "sqlite")

metadata = sa.MetaData()

accounts = sa.Table(
    "accounts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("client", sa.String(256), nullable=False),
    sa.Column("dataset", sa.String(256), nullable=False),
    sa.UniqueConstraint("client", "dataset", name="uq_accounts_key"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("json", sa.Text, nullable=False),
)

entries = sa.Table(
    "entries",
    metadata,
    sa.Column("seq", SEQUENCE, primary_key=True, autoincrement=False),
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

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("seq", SEQUENCE, sa.ForeignKey("entries.seq"), primary_key=True, autoincrement=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

APPEND_ONLY: Final = ("accounts", "events", "entries", "snapshots")


def append_only_ddl(dialect: str) -> list[str]:
    """Return the statements that make UPDATE and DELETE fail (a guard against accidents, not attackers)."""
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb.upper()} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
            for table in APPEND_ONLY
            for verb in ("update", "delete")
        ]
    function = (
        "CREATE OR REPLACE FUNCTION fedlora_append_only() RETURNS trigger AS $$ "
        "BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$ LANGUAGE plpgsql"
    )
    return [function] + [
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION fedlora_append_only()"
        for table in APPEND_ONLY
    ]
