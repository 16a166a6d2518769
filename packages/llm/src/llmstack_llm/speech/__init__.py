"""Speech to text: windows of sound and their prompts."""
