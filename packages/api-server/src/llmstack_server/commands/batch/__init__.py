"""`llmstack run-batch`: answers a file of requests in OpenAI's batch form."""
