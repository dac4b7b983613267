"""Settings of the server and the engine, and where their values come from.

Every setting is one field of `Settings`: a flag of `shoal serve`, a variable `SHOAL_…` and a key of the TOML file, all
by the same name.
"""

from shoal.settings.fields import Settings, default_keys_file
from shoal.settings.sources import ResolvedSettings, read_settings

__all__ = ["ResolvedSettings", "Settings", "default_keys_file", "read_settings"]
