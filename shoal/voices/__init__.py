"""Reusable voices: recordings decoded and encoded once, stored on disk and cached in memory.

`voice` defines a voice, `encoder` encodes with a codec (the only module here that needs torch), `folder` is one voice
on disk, `store` a directory of them, `cache` keeps encoded voices for requests.
"""
