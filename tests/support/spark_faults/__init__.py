"""What is broken in the exactly-once tests, and the query that it happens to."""
