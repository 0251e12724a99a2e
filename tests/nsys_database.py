"""Databases as `nsys export --type sqlite` writes them: real table and column names, a few rows."""

import sqlite3

_TABLES = {
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INT, utcTime TEXT, localTime TEXT",
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "NVTX_EVENTS": "start INT, end INT, eventType INT, rangeId INT, category INT, color INT, "
    "text TEXT, globalTid INT, endGlobalTid INT, textId INT, domainId INT, uint64Value INT, "
    "int64Value INT",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT, end INT, globalTid INT, correlationId INT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INT, end INT, deviceId INT, streamId INT, "
    "correlationId INT, globalPid INT, demangledName INT, shortName INT",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INT, end INT, deviceId INT, streamId INT, "
    "correlationId INT, globalPid INT, bytes INT",
}
EPOCH_NS = 1_000_000_000_000
PID, TID, OTHER_TID = 500, 501, 502


def global_id(pid, tid=0):
    """Return what nsys calls a globalTid: some hardware bits, the process, the thread."""
    return (1 << 48) | (pid << 24) | tid


def write(path, *, ranges=(), kernels=(), copies=(), epoch_ns=EPOCH_NS):
    """Write a database.

    Args:
        path: The file.
        ranges: (begin, end, kind, name, tid) in domain `verl_profiler`, category `workers`,
            payload 7; kind is `push` or `start`.
        kernels: (launched at, begin, end, name, tid).
        copies: (begin, end), launched by nobody known.
        epoch_ns: What the times are counted from.
    """
    connection = sqlite3.connect(path)
    strings = {}

    def string(text):
        return strings.setdefault(text, len(strings) + 1)

    def insert(table, **row):
        if not connection.execute(
            "SELECT 1 FROM sqlite_master WHERE name = ?", (table,)
        ).fetchone():
            connection.execute(f"CREATE TABLE {table} ({_TABLES[table]})")
        marks = ", ".join("?" for _ in row)
        connection.execute(
            f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values())
        )

    if epoch_ns:
        insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch_ns)
    if ranges:
        thread = global_id(PID, TID)
        insert("NVTX_EVENTS", eventType=75, text="verl_profiler", globalTid=thread, domainId=1)
        insert(
            "NVTX_EVENTS", eventType=33, text="workers", globalTid=thread, domainId=1, category=3
        )
    for begin, end, kind, name, tid in ranges:
        insert(
            "NVTX_EVENTS",
            start=begin,
            end=end,
            eventType=59 if kind == "push" else 60,
            category=3,
            globalTid=global_id(PID, tid),
            textId=string(name),
            domainId=1,
            int64Value=7,
        )
    for number, (launch, begin, end, name, tid) in enumerate(kernels, 1):
        insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=launch,
            end=launch + 1,
            globalTid=global_id(PID, tid),
            correlationId=number,
        )
        insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=begin,
            end=end,
            deviceId=0,
            streamId=7,
            correlationId=number,
            globalPid=global_id(PID),
            demangledName=string(name),
            shortName=string(name),
        )
    for begin, end in copies:
        insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=begin,
            end=end,
            deviceId=0,
            streamId=7,
            correlationId=999,
            globalPid=global_id(PID),
            bytes=4,
        )
    insert("StringIds", id=0, value="")
    connection.executemany(
        "INSERT INTO StringIds VALUES (?, ?)", [(key, text) for text, key in strings.items()]
    )
    connection.commit()
    connection.close()
