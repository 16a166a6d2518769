"""`llmstack run-batch`: a file of requests in OpenAI's batch form, answered into another file."""
