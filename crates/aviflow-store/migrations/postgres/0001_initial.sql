-- One row: who holds the store and how far it got. Rows are numbered from here and not by sequences,
-- whose numbers are lost when a transaction fails and may come in another order than the rows.
CREATE TABLE meta (
    one          int8 PRIMARY KEY CHECK (one = 1),
    version      int8 NOT NULL,
    term         int8 NOT NULL,
    generation   int8 NOT NULL,
    clock        int8 NOT NULL,
    last_job     int8 NOT NULL,
    last_node    int8 NOT NULL,
    last_drain   int8 NOT NULL,
    last_entry   int8 NOT NULL,
    last_moment  int8 NOT NULL,
    last_act     int8 NOT NULL,
    last_journal int8 NOT NULL,
    paused       text
);
INSERT INTO meta VALUES (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL);

-- Who took which term, and after which commit. A writer knows itself again by its holder, and finds
-- out here whether its last commit was written before another took over.
CREATE TABLE terms (
    term       int8 PRIMARY KEY,
    holder     text NOT NULL,
    generation int8 NOT NULL
);

-- Columns are for lists and lookups; `job` and `record` are the truth.
-- Names are compared byte by byte, so that no index depends on a locale.
CREATE TABLE jobs (
    id        int8 PRIMARY KEY,
    namespace text COLLATE "C" NOT NULL,
    name      text COLLATE "C" NOT NULL,
    work      text COLLATE "C" NOT NULL, -- the document's own name, before `-2`, `-3`
    "user"    text COLLATE "C" NOT NULL,
    queue     text COLLATE "C" NOT NULL,
    phase     text COLLATE "C" NOT NULL,
    submitted int8 NOT NULL,
    ended     int8,                      -- NULL while it lives
    job       text NOT NULL,
    record    text NOT NULL
);
CREATE UNIQUE INDEX jobs_name ON jobs (namespace, name);
CREATE INDEX jobs_work ON jobs (namespace, work, id);
CREATE INDEX jobs_user ON jobs ("user", id);
CREATE INDEX jobs_queue ON jobs (queue, id);
CREATE INDEX jobs_live ON jobs (id) WHERE ended IS NULL;
CREATE INDEX jobs_ended ON jobs (ended) WHERE ended IS NOT NULL;

CREATE TABLE nodes (
    id   int8 PRIMARY KEY,
    name text NOT NULL,
    node text NOT NULL
);

-- How many GPUs a node had, from when on; the first row holds from the beginning of its account.
CREATE TABLE capacity (
    node  int8 NOT NULL,
    since int8 NOT NULL,
    gpus  int8 NOT NULL,
    PRIMARY KEY (node, since)
);

CREATE TABLE queues (
    name  text COLLATE "C" PRIMARY KEY,
    queue text NOT NULL
);

-- Documents of pools.
CREATE TABLE pools (
    name text COLLATE "C" PRIMARY KEY,
    pool text NOT NULL
);

-- The policy, what is remembered of ended jobs, and the drains that go on: one row each, as JSON.
CREATE TABLE settings (
    name  text COLLATE "C" PRIMARY KEY,
    value text NOT NULL
);

-- Decayed use, by which queues and users take their turns.
CREATE TABLE decayed (
    queue  text COLLATE "C" NOT NULL,
    "user" text COLLATE "C" NOT NULL,
    value  text NOT NULL,
    PRIMARY KEY (queue, "user")
);

CREATE TABLE environments (
    hash  text COLLATE "C" PRIMARY KEY,
    state text NOT NULL
);

-- The open intervals of each node, and when its account began.
CREATE TABLE accounts (
    node      int8 PRIMARY KEY,
    began     int8 NOT NULL,
    intervals text NOT NULL
);

-- Closed intervals. They outlive their jobs, so they carry what a report needs.
CREATE TABLE ledger (
    id      int8 PRIMARY KEY,
    job     int8,
    name    text,                 -- namespace/name
    attempt int8,
    "user"  text,
    queue   text,
    state   text COLLATE "C" NOT NULL,
    from_ms int8 NOT NULL,
    to_ms   int8 NOT NULL,
    gpus    int8 NOT NULL,        -- how many
    slots   text NOT NULL         -- node to mask
);
CREATE INDEX ledger_job ON ledger (job) WHERE job IS NOT NULL;
CREATE INDEX ledger_to ON ledger (to_ms);

CREATE TABLE moments (
    id      int8 PRIMARY KEY,
    job     int8 NOT NULL,
    at      int8 NOT NULL,
    attempt int8 NOT NULL,
    kind    text NOT NULL
);
CREATE INDEX moments_job ON moments (job, id);

-- What people did.
CREATE TABLE acts (
    id     int8 PRIMARY KEY,
    at     int8 NOT NULL,
    by     text COLLATE "C" NOT NULL,
    what   text NOT NULL,
    kind   text COLLATE "C" NOT NULL,
    name   text COLLATE "C" NOT NULL,
    reason text
);
CREATE INDEX acts_object ON acts (kind, name, id);

CREATE TABLE journal (
    id         int8 PRIMARY KEY,
    generation int8 NOT NULL,
    at         int8 NOT NULL,
    text       text NOT NULL
);
