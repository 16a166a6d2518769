"""Encoders of pictures, one file for each tower."""
