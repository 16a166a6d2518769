"""Processes of engine cores: start, supervision, one in reserve."""
