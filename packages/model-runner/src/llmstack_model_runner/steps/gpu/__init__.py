"""Steps on a GPU: rows on the device, captured decodes, asynchronous results."""
