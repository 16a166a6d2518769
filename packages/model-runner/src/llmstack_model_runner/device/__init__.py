"""Steps on a GPU: rows that live on the device, recorded decodes, and a host that runs one step ahead."""
