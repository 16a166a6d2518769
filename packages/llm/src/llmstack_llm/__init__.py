"""Text in, text out: chat templates, detokenization and stop strings over an engine core, offline or asynchronous."""
