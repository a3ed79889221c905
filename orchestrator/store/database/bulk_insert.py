"""Insert many rows into a table at once."""

from functools import cache
from typing import Any

from sqlalchemy import Connection, Dialect, Table


def insert_rows(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows with the same columns. It takes half the time of `execute(table.insert(), rows)`, because SQLAlchemy
    processes every value of every row.
    """
    statement, names = _insert(table, connection.dialect, tuple(rows[0]))
    connection.exec_driver_sql(statement, [tuple(row[name] for name in names) for row in rows] if names else rows)


@cache
def _insert(table: Table, dialect: Dialect, columns: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(statement for the driver, columns in its order, or none if the driver takes them by name)"""
    compiled: Any = table.insert().inline().compile(dialect=dialect, column_keys=columns)
    return str(compiled), tuple(compiled.positiontup or ())
