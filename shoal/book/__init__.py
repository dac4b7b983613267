"""Audiobooks: an epub, text or Markdown file -> chapters of sentences -> one audio file with chapter marks."""
