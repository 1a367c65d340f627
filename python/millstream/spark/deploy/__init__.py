"""Spark elsewhere: `ship` (the code as a zip or with a session), `shipped_source` (how it arrives), `required_versions` (what it works with)."""
