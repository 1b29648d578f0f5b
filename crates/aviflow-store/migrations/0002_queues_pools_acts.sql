-- Documents of pools.
CREATE TABLE pools (
    name TEXT PRIMARY KEY,
    pool TEXT NOT NULL
) WITHOUT ROWID;

-- The policy, what is remembered of ended jobs, and the drains that go on: one row each, as JSON.
CREATE TABLE settings (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- Decayed use, by which queues and users take their turns.
CREATE TABLE decayed (
    queue TEXT NOT NULL,
    user  TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (queue, user)
) WITHOUT ROWID;

-- What people did. AUTOINCREMENT: whoever pages holds row ids.
CREATE TABLE acts (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    at     INTEGER NOT NULL,
    by     TEXT    NOT NULL,
    what   TEXT    NOT NULL,
    kind   TEXT    NOT NULL,
    name   TEXT    NOT NULL,
    reason TEXT
);
CREATE INDEX acts_object ON acts (kind, name, id);

ALTER TABLE meta ADD COLUMN last_drain INTEGER NOT NULL DEFAULT 0;
