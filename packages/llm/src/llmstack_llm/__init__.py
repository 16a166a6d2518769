"""Text in, text out: tokenizer, chat template, detokenizer and stop strings over an engine core, offline or asynchronous."""
