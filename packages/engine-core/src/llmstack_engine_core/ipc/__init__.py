"""Typed messages between clients and engine cores: msgpack over ZeroMQ."""
