"""OpenAI's Decisions API: probabilities of the answers to typed questions."""
