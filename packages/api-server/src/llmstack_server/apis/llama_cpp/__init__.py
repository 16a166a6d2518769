"""Routes of llama.cpp's server beside OpenAI's API: text for a gap."""
