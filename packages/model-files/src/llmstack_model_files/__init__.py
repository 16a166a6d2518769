"""The one opener of model files: resolves a repository id or folder, opens and checks configurations and safetensors headers."""
