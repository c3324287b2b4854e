"""Schema of the cluster's database, as one SQL script per version."""

MIGRATIONS = (
    """
    CREATE TABLE meta (one INTEGER PRIMARY KEY CHECK (one = 1), cluster TEXT, name TEXT, epoch INTEGER);
    INSERT INTO meta VALUES (1, '', '', 0);
    CREATE TABLE members (node TEXT PRIMARY KEY, name TEXT, machine TEXT, hardware TEXT, serial TEXT, joined REAL,
                          cordoned INTEGER, removed REAL);
    CREATE TABLE tokens (id TEXT PRIMARY KEY, key BLOB, created REAL, expires REAL, uses_left INTEGER, name TEXT,
                         revoked INTEGER);
    CREATE TABLE keys (id TEXT PRIMARY KEY, name TEXT, scopes TEXT, digest BLOB, created REAL, expires REAL,
                       revoked REAL);
    CREATE TABLE denied (subject TEXT PRIMARY KEY, at REAL, reason TEXT);
    """,
    """
    ALTER TABLE keys ADD COLUMN limits TEXT;
    ALTER TABLE members ADD COLUMN labels TEXT NOT NULL DEFAULT '';
    CREATE TABLE usage (key TEXT, model TEXT, day TEXT, requests INTEGER, failed INTEGER, prompt_tokens INTEGER,
                        cached_tokens INTEGER, completion_tokens INTEGER, PRIMARY KEY (key, model, day));
    CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, actor TEXT, action TEXT, subject TEXT);
    """,
    """
    ALTER TABLE meta ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE members ADD COLUMN video INTEGER NOT NULL DEFAULT 0;
    UPDATE members SET video = 1;
    """,
    """
    ALTER TABLE audit ADD COLUMN address TEXT NOT NULL DEFAULT '';
    """,
    """
    CREATE TABLE wishes (model TEXT PRIMARY KEY, wish TEXT NOT NULL);
    """,
)
"""One SQL script per schema version. SQLite's `user_version` is the number of applied scripts."""
