"""What job `audit` does: a lake or a copy against streams (`audit_lake`, `audit_copy`), how both are compared, and the report."""
