"""LoRA adapters: reading, checking, and the slots of a step."""
