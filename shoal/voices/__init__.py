"""Recording -> reusable voice: read it, encode it once, keep it on disk and in memory.

`voice` is the noun, `encoder` makes codes with a codec (the only file here that needs torch), `folder` is one voice on
disk, `store` is all of them, `cache` is what requests ask.
"""
