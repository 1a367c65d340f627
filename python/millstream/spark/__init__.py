"""The Spark connector and the jobs that run on it."""

from __future__ import annotations
