"""Steps: input batch, inputs, forward pass, sampling, and results."""
