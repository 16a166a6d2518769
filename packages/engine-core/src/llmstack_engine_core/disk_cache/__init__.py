"""A prefix cache on disk, which outlives the process."""
