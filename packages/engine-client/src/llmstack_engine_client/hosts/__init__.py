"""Membership of machines: the first one listens, and the others join it."""
