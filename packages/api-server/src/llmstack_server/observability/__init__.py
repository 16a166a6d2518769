"""Metrics, logs, traces and the watchdog."""
