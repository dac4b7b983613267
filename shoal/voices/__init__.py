"""Reusable voices from recordings: decoded and encoded once, kept on disk and in memory.

`voice` defines a voice, `encoder` encodes with a codec (the only module here that needs torch), `folder` is one voice
on disk, `store` is a directory of them, `cache` serves requests.
"""
