"""From the hidden states of a prompt to one vector."""
