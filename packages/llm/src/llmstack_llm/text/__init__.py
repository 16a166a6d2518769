"""Tokenization, detokenization, stop strings and bad words."""
