"""All tables of the owner's database, as one value. Opened and used in its thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.batches.batch_table import BatchTable
from router.batches.database import Database
from router.batches.file_table import FileTable
from router.batches.line_table import LineTable
from router.batches.webhooks import WebhookTable


@dataclass(frozen=True, slots=True)
class Tables:
    database: Database
    files: FileTable
    batches: BatchTable
    lines: LineTable
    webhooks: WebhookTable


def open_tables(folder: Path) -> Tables:
    """Open, or make, the database in `folder`. Raises ConfigurationError."""
    database = Database(folder)
    files = FileTable(database)
    batches = BatchTable(database, files)
    return Tables(database, files, batches, LineTable(database, batches), WebhookTable(database))
