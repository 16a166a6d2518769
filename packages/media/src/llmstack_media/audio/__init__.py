"""Sound of requests: files, windows of speech, and when words are spoken."""
