"""Runs a language model one scheduled step at a time: persistent input batch, paged attention, sampler."""
