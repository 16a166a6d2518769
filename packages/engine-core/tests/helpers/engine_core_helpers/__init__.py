"""What several test modules of this package share."""
