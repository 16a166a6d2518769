"""Transcriptions and translations of sound, in the form of OpenAI."""
