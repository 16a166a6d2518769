"""The one opener of model files: resolves a repository id or folder, opens configurations, checks safetensors headers."""
