"""The engine loop and its process: schedule, execute, update, behind ZeroMQ with msgpack frames."""
