"""The database under a ledger: SQLite in WAL mode (a path) or any server by SQLAlchemy URL.

Durability guarantee: when a write transaction returns, its rows are on disk (SQLite:
`synchronous=FULL`, one fsync per commit; PostgreSQL: `synchronous_commit` on). Writers are
serialised: `BEGIN IMMEDIATE` on SQLite, a transaction-scoped advisory lock on PostgreSQL.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger.schema import EARLIER, REVISION

BUSY_TIMEOUT_SECONDS: Final = 60.0
IDLE_TIMEOUT_SECONDS: Final = 600.0
"""After this long inside one transaction without a word a PostgreSQL writer is taken for dead (stopped, or cut off)."""
_POLL_SECONDS: Final = (0.001, 0.004)
"""Pause between two tries for SQLite's write lock. Its own handler sleeps up to 100 ms and starves beside a writer
whose pauses are shorter than that."""
_ADVISORY_LOCK: Final = 0x66656C6F  # the same number for every fedlora ledger in one database
_DAMAGE: Final = (
    "malformed",
    "not a database",
    "corrupt",
    "no such table",
    "no such column",
    "does not exist",
    "Could not decode",
)


def is_url(location: str) -> bool:
    """Return whether a text is a database URL rather than a path."""
    return "://" in location


class Store:
    """One database with serialised, durable write transactions. Not for use across `fork`."""

    def __init__(self, location: str | os.PathLike[str], *, create: bool, read_only: bool = False) -> None:
        """Connect, and create or migrate the tables where allowed.

        Args:
            location: path of a SQLite file, or a SQLAlchemy URL.
            create: make the database's tables if there are none.
            read_only: never write, not even a migration.

        Raises:
            LedgerError: if the database cannot be reached, is missing or is read-only.
            LedgerIntegrityError: if it is damaged or from a newer library.
        """
        text = os.fspath(location)
        self.path = self._path_of(text)
        self.read_only = read_only
        self._pid = os.getpid()
        self._lock = threading.RLock()
        if self.path is not None:
            self._prepare_file(self.path, create=create and not read_only)
        self.location = str(self.path) if self.path is not None else _hide_password(text)
        self._engine = self._make_engine(text)
        self._inode = self._current_inode()
        try:
            self._check_schema(create=create)
        except BaseException:
            self.close()
            raise
        self._inode = self._current_inode()

    @staticmethod
    def _path_of(text: str) -> Path | None:
        if not is_url(text):
            return Path(text).absolute()
        url = sa.make_url(text)
        if url.get_backend_name() != "sqlite":
            return None
        if not url.database or url.database == ":memory:":
            raise LedgerError("ledger: got an in-memory database; a ledger must be durable; give a file path")
        return Path(url.database).absolute()

    def _prepare_file(self, path: Path, *, create: bool) -> None:
        if path.exists():
            return
        if not create:
            raise LedgerError(f"ledger {path}: no such file; check the path (nothing was created)")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as error:
            raise LedgerError(
                f"ledger {path}: cannot be created ({error.strerror}); choose another path"
            ) from error

    def _make_engine(self, text: str) -> sa.Engine:
        if self.path is None:
            try:
                return sa.create_engine(text, pool_pre_ping=True)
            except (sa.exc.ArgumentError, ImportError) as error:
                raise LedgerError(
                    f"ledger {_hide_password(text)}: no driver ({type(error).__name__}); "
                    "for PostgreSQL install fedlora[postgres] and use postgresql+psycopg://"
                ) from error
        fixed = self.read_only and _cannot_change(self.path)
        place = f"file:{quote(str(self.path))}?mode=ro&immutable=1" if fixed else str(self.path)

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(place, BUSY_TIMEOUT_SECONDS, check_same_thread=False, uri=fixed)

        engine = sa.create_engine("sqlite://", poolclass=StaticPool, creator=connect)
        sa.event.listen(engine, "connect", self._configure_sqlite)
        sa.event.listen(engine, "begin", self._begin_sqlite)
        return engine

    def _configure_sqlite(self, connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        try:
            if self.read_only:
                cursor.execute("PRAGMA query_only=ON")
            else:
                cursor.execute("PRAGMA journal_mode=WAL")
                cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA foreign_keys=ON")
            cursor.execute("PRAGMA cell_size_check=ON")
            cursor.execute("PRAGMA trusted_schema=OFF")
            cursor.execute("PRAGMA cache_size=-65536")
        finally:
            cursor.close()

    @staticmethod
    def _begin_sqlite(connection: sa.Connection) -> None:
        if connection.get_execution_options().get("fedlora_read", False):
            connection.exec_driver_sql("BEGIN")
            return
        cursor = connection.connection.cursor()
        try:
            cursor.execute("PRAGMA busy_timeout=0")
            _wait_for_the_lock(cursor)
        finally:
            cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_SECONDS * 1000)}")
            cursor.close()

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Open the one write transaction; committed durably on leaving, rolled back on any error.

        Raises:
            LedgerError: if the database cannot be written (full, read-only, locked, gone).
            LedgerIntegrityError: if it is damaged, or its file was exchanged underneath.
        """
        if self.read_only:
            raise LedgerError(f"ledger {self.location}: opened read-only; open it for writing")
        with self._lock, self._translated(), self._engine.begin() as connection:
            self._check_same_file()
            if connection.dialect.name == "postgresql":
                self._begin_postgres(connection)
            yield connection

    @staticmethod
    def _begin_postgres(connection: sa.Connection) -> None:
        """Take the writers' lock; neither a stopped writer nor a server that does not sync holds others up or lies."""
        for setting in (
            f"lock_timeout TO '{int(BUSY_TIMEOUT_SECONDS)}s'",
            f"idle_in_transaction_session_timeout TO '{int(IDLE_TIMEOUT_SECONDS)}s'",
            "synchronous_commit TO on",
        ):
            connection.execute(sa.text(f"SET LOCAL {setting}"))
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        if connection.execute(sa.text("SHOW fsync")).scalar() != "on":
            raise LedgerError(
                "ledger: the PostgreSQL server runs with fsync off and may forget what it has confirmed; required: "
                "fsync = on in its configuration"
            )

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open one consistent read transaction.

        Raises:
            LedgerError: if the database cannot be read.
            LedgerIntegrityError: if it is damaged, or its file was exchanged underneath.
        """
        with self._lock, self._translated():
            connection = self._engine.connect()
            options = {"fedlora_read": True}
            if connection.dialect.name == "postgresql":
                options["isolation_level"] = "REPEATABLE READ"  # type: ignore[assignment]
            connection = connection.execution_options(**options)
            try:
                with connection.begin():
                    self._check_same_file()
                    yield connection
            finally:
                connection.close()

    def _check_same_file(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError("ledger: used in a forked process; open the ledger again in each process")
        if self.path is not None and self._current_inode() != self._inode:
            raise LedgerIntegrityError(
                f"ledger {self.path}: the file was exchanged or removed while open; "
                "put the right file back and run 'fedlora budget verify'"
            )

    def _current_inode(self) -> tuple[int, int] | None:
        if self.path is None:
            return None
        try:
            status = os.stat(self.path)
        except OSError:
            return (-1, -1)
        return status.st_dev, status.st_ino

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            raise self._translate(error) from error
        except UnicodeDecodeError as error:
            raise LedgerIntegrityError(
                f"ledger {self.location}: damaged (a text is not UTF-8); required: an intact database; "
                "restore the newest backup and run 'fedlora budget verify'; what it lacks counts as spent"
            ) from error
        except (sa.exc.SQLAlchemyError, OSError) as error:
            raise LedgerError(
                f"ledger {self.location}: cannot be used ({type(error).__name__}); nothing may be released"
            ) from error

    def _translate(self, error: Exception) -> LedgerError:
        cause = getattr(error, "orig", None) or error
        text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        if any(word in text for word in _DAMAGE):
            return LedgerIntegrityError(
                f"ledger {self.location}: damaged ({text}); required: an intact database; "
                "restore the newest backup and run 'fedlora budget verify'; what it lacks counts as spent"
            )
        advice = (
            "to read it, copy the file and its -wal to a folder that can be written"
            if self.read_only
            else "nothing may be released until it is writable again"
        )
        return LedgerError(f"ledger {self.location}: cannot be used ({text}); {advice}")

    def _check_schema(self, *, create: bool) -> None:
        with self.read() as connection:
            found = self._revision(connection)
        if found == REVISION:
            return
        if found is None and not create:
            raise LedgerIntegrityError(
                f"ledger {self.location}: got no ledger tables; give the path of a ledger"
            )
        if found is not None and found not in EARLIER:
            raise LedgerIntegrityError(
                f"ledger {self.location}: got schema {found[:16]!r}; known are those up to {REVISION}; update fedlora, "
                "or restore the newest backup if the file is damaged (what it lacks counts as spent)"
            )
        if self.read_only:
            raise LedgerError(
                f"ledger {self.location}: schema is older than {REVISION}; open it for writing to migrate"
            )
        self._migrate()

    @staticmethod
    def _revision(connection: sa.Connection) -> str | None:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        value = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        return None if value is None else str(value)

    def _migrate(self) -> None:
        from alembic import command
        from alembic.config import Config

        with self.write() as connection:
            if self._revision(connection) == REVISION:
                return
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def integrity_check(self) -> None:
        """Let SQLite check its pages and indexes; on PostgreSQL, look every reserved round up by its index.

        Raises:
            LedgerIntegrityError: naming the first problem.
        """
        with self.read() as connection:
            if self.path is not None:
                first = str(connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar())
            else:
                first = _index_problem(connection)
        if first != "ok":
            raise LedgerIntegrityError(
                f"ledger {self.location}: damaged pages ({first.splitlines()[0]}); restore the newest backup; "
                "what it lacks counts as spent"
            )

    def close(self) -> None:
        """Close all connections."""
        if os.getpid() == self._pid:
            self._engine.dispose()


def _index_problem(connection: sa.Connection) -> str:
    """Return "ok", or the round that the index of rounds does not find in full though the table holds it.

    A round that is not found would be granted again. (After a change of the system's collations, or with a damaged
    page, PostgreSQL looks things up wrongly without a word.)
    """
    if connection.dialect.name != "postgresql":
        return "ok"
    counted = "SELECT run_id, server_round, count(*) FROM entries WHERE kind = 'R'"
    for name in ("indexscan", "indexonlyscan", "bitmapscan"):
        connection.execute(sa.text(f"SET LOCAL enable_{name} TO off"))
    held = connection.execute(sa.text(f"{counted} GROUP BY run_id, server_round")).all()
    for name in ("indexscan", "indexonlyscan"):
        connection.execute(sa.text(f"SET LOCAL enable_{name} TO on"))
    connection.execute(sa.text("SET LOCAL enable_seqscan TO off"))
    one = sa.text(f"{counted} AND run_id = :run AND server_round = :number GROUP BY run_id, server_round")
    for run_id, number, count in held:
        found = connection.execute(one, {"run": run_id, "number": number}).first()
        if found is None or found[2] != count:
            return f"the index of rounds misses round {number} of run {run_id!r}; rebuild it with REINDEX"
    return "ok"


def _cannot_change(path: Path) -> bool:
    """Return whether a ledger lies whole in a folder that this process cannot write.

    SQLite would make its shared memory there. Without a write-ahead log everything is in the file, and a writer
    with other rights who comes meanwhile leaves what is read valid up to its last entry.
    """
    log = Path(f"{path}-wal")
    return not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size > 0)


def _wait_for_the_lock(cursor: Any) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        try:
            cursor.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(*_POLL_SECONDS))  # noqa: S311
        else:
            return


def _hide_password(url: str) -> str:
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return "<unreadable URL>"
