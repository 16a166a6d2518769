"""Sound out of files, at the rate of a model, and its spectrogram."""
