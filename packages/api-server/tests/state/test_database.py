"""Databases: several processes open a new one at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmstack_server.state.database import Schema, open_database

SCHEMA = Schema(0x1234, 1, ("CREATE TABLE numbers (number INTEGER)",))
NUM_CLIENTS = 4


def test_several_clients_set_up_a_new_shared_database_at_once(tmp_path: Path):
    start = threading.Barrier(NUM_CLIENTS)

    def open_and_write(number: int, path: Path) -> None:
        start.wait()
        database = open_database(path, SCHEMA, is_shared=True)
        database.execute("INSERT INTO numbers VALUES (?)", (number,))
        database.close()

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        for attempt in range(20):
            path = tmp_path / f"{attempt}.sqlite3"
            list(threads.map(open_and_write, range(NUM_CLIENTS), [path] * NUM_CLIENTS))
            database = open_database(path, SCHEMA, is_shared=True)
            assert {number for (number,) in database.execute("SELECT number FROM numbers")} == set(range(NUM_CLIENTS))
            database.close()
