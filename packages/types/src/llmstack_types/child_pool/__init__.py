"""Jobs in child processes that can be killed: a client, and a server that forks."""
