"""Pages and pictures made from a log. Empty until the report lands; the room fixes where it goes."""
