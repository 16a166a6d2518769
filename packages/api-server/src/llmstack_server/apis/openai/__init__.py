"""The OpenAI API: its request fields, its answers and its event streams."""
