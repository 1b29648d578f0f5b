-- One row: who holds the store and how far it got.
CREATE TABLE meta (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    term       INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    clock      INTEGER NOT NULL,
    last_job   INTEGER NOT NULL,
    last_node  INTEGER NOT NULL,
    paused     TEXT
);
INSERT INTO meta VALUES (1, 0, 0, 0, 0, 0, NULL);

-- Columns are for lists and lookups; `job` and `record` are the truth.
CREATE TABLE jobs (
    id        INTEGER PRIMARY KEY,
    namespace TEXT    NOT NULL,
    name      TEXT    NOT NULL,
    work      TEXT    NOT NULL, -- the document's own name, before `-2`, `-3`
    user      TEXT    NOT NULL,
    queue     TEXT    NOT NULL,
    phase     TEXT    NOT NULL,
    submitted INTEGER NOT NULL,
    ended     INTEGER,          -- NULL while it lives
    job       TEXT    NOT NULL,
    record    TEXT    NOT NULL
);
CREATE UNIQUE INDEX jobs_name ON jobs (namespace, name);
CREATE INDEX jobs_work ON jobs (namespace, work, id);
CREATE INDEX jobs_user ON jobs (user, id);
CREATE INDEX jobs_queue ON jobs (queue, id);
CREATE INDEX jobs_live ON jobs (id) WHERE ended IS NULL;
CREATE INDEX jobs_ended ON jobs (ended) WHERE ended IS NOT NULL;

CREATE TABLE nodes (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    node TEXT NOT NULL
);

-- How many GPUs a node had, from when on; the first row holds from the beginning of its account.
CREATE TABLE capacity (
    node  INTEGER NOT NULL,
    since INTEGER NOT NULL,
    gpus  INTEGER NOT NULL,
    PRIMARY KEY (node, since)
) WITHOUT ROWID;

CREATE TABLE queues (
    name  TEXT PRIMARY KEY,
    queue TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE environments (
    hash  TEXT PRIMARY KEY,
    state TEXT NOT NULL
) WITHOUT ROWID;

-- The open intervals of each node, and when its account began.
CREATE TABLE accounts (
    node      INTEGER PRIMARY KEY,
    began     INTEGER NOT NULL,
    intervals TEXT    NOT NULL
);

-- Closed intervals. They outlive their jobs, so they carry what a report needs.
CREATE TABLE ledger (
    id      INTEGER PRIMARY KEY,
    job     INTEGER,
    name    TEXT,             -- namespace/name
    attempt INTEGER,
    user    TEXT,
    queue   TEXT,
    state   TEXT    NOT NULL,
    from_ms INTEGER NOT NULL,
    to_ms   INTEGER NOT NULL,
    gpus    INTEGER NOT NULL, -- how many
    slots   TEXT    NOT NULL  -- node to mask
);
CREATE INDEX ledger_job ON ledger (job) WHERE job IS NOT NULL;
CREATE INDEX ledger_to ON ledger (to_ms);

-- AUTOINCREMENT: followers hold row ids, which must not come again after a deletion.
CREATE TABLE moments (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    job     INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    kind    TEXT    NOT NULL
);
CREATE INDEX moments_job ON moments (job, id);

CREATE TABLE journal (
    id         INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    text       TEXT    NOT NULL
);
