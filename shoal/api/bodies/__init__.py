"""Request bodies: bounded parsing of JSON, MessagePack and forms, and the schemas that validate them."""
