"""The Files and Batches APIs of OpenAI."""
