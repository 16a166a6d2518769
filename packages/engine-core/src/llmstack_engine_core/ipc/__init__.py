"""How clients and engine cores talk: typed messages, msgpack frames, ZeroMQ sockets in a private directory."""
