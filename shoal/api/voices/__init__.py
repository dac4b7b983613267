"""Voices as clients see them: listing, uploading, OpenAI's names, and finished speech kept to become a voice."""
