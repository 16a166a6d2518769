"""Helpers of the tests of the server."""
