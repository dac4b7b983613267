"""`shoal say`: speak a text to a file or a player, with a server of this user or an engine in this process."""
