-- The catalogue of a sample store. One writer at a time: every change is one IMMEDIATE transaction.

CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;

-- What the remote has, or had.
CREATE TABLE keys (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    etag TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    digest TEXT NOT NULL,
    place INTEGER NOT NULL,               -- random: the order of first downloads
    listing INTEGER NOT NULL,             -- the last listing that had it
    is_gone INTEGER NOT NULL DEFAULT 0,   -- the remote has it no more: a local copy is the only one
    is_held INTEGER NOT NULL DEFAULT 0,   -- a file holds bytes for it
    n_fetched INTEGER NOT NULL DEFAULT 0,
    visits INTEGER NOT NULL DEFAULT 0,
    n_failed INTEGER NOT NULL DEFAULT 0,
    retry_at REAL NOT NULL DEFAULT 0,
    fault TEXT,                           -- why it is in quarantine
    is_too_large INTEGER NOT NULL DEFAULT 0  -- the fault is the whole budget: it may leave once that is raised
);
CREATE INDEX keys_next ON keys (n_fetched, place) WHERE NOT is_held AND NOT is_gone AND fault IS NULL;
CREATE INDEX keys_bad ON keys (id) WHERE fault IS NOT NULL;

-- Local copies. Bytes count from the moment that they are reserved until their file is gone.
CREATE TABLE files (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key_id INTEGER NOT NULL REFERENCES keys (id),
    etag TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    cost INTEGER NOT NULL,                -- whole blocks of the disk
    name TEXT NOT NULL UNIQUE,            -- never used again
    state INTEGER NOT NULL,               -- 0 reserved, 1 published, 2 leaving, 3 gone
    lease TEXT,                           -- who works at it, in states 0 and 2
    crc INTEGER,
    published_at REAL,
    used_at REAL,
    visits INTEGER NOT NULL DEFAULT 0,
    died INTEGER                          -- the generation in which it went
);
CREATE UNIQUE INDEX files_held ON files (key_id) WHERE state < 3;
CREATE INDEX files_published ON files (id) WHERE state = 1;
CREATE INDEX files_in_work ON files (lease) WHERE state IN (0, 2);
CREATE INDEX files_died ON files (died) WHERE state = 3;

-- Generations that can be gone back to: the files that were there, and how often each key had been visited by then.
CREATE TABLE snapshots (generation INTEGER PRIMARY KEY, made_at REAL NOT NULL, ids BLOB NOT NULL, visits BLOB NOT NULL);

-- What running epochs have still to read.
CREATE TABLE pins (id INTEGER PRIMARY KEY AUTOINCREMENT, generation INTEGER NOT NULL, lease TEXT NOT NULL);
CREATE TABLE pinned (
    key_id INTEGER NOT NULL,
    pin INTEGER NOT NULL REFERENCES pins (id),
    PRIMARY KEY (key_id, pin)
) WITHOUT ROWID;
CREATE INDEX pinned_by ON pinned (pin);

CREATE TRIGGER file_reserved AFTER INSERT ON files BEGIN
    UPDATE meta SET value = value + NEW.cost WHERE name = 'held_nbytes';
    UPDATE keys SET is_held = 1 WHERE id = NEW.key_id;
END;
CREATE TRIGGER file_gone AFTER UPDATE OF state ON files WHEN OLD.state < 3 AND NEW.state = 3 BEGIN
    UPDATE meta SET value = value - OLD.cost WHERE name = 'held_nbytes';
    UPDATE keys SET is_held = 0 WHERE id = OLD.key_id;
END;

INSERT INTO meta VALUES
    ('version', 2), ('generation', 0), ('held_nbytes', 0), ('listing', 0),
    ('listed_at', 0.0), ('listing_lease', ''), ('remote', ''), ('fetched_nbytes', 0), ('evicted_nbytes', 0),
    ('n_fetched', 0), ('n_evicted', 0), ('n_disk_full', 0);
