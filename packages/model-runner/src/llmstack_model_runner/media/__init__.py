"""Media of prompts: encoders, their work in steps, and the vectors that they make."""
