"""The API of Ollama, for clients that speak nothing else."""
