"""Spark elsewhere: `ship` (the code as a zip or with a session), `carrier` (how it arrives), `versions` (what it works with)."""
