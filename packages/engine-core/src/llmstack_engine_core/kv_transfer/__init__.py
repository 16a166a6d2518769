"""KV blocks of prompts, which one engine core computes and another uses."""
