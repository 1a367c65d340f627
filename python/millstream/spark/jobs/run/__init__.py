"""One run of a job: `driver` (from the lock to the last batch), what a checkpoint says of it, and `batch` for jobs that answer once."""
