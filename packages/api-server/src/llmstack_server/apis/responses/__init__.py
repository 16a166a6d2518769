"""The Responses API: `/v1/responses` and what belongs to it."""
