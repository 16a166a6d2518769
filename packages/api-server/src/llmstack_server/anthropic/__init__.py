"""The Messages API in Anthropic's form: `/v1/messages` and `/v1/messages/count_tokens`."""
