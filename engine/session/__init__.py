"""A session: one pipeline at a time, loaded, drawn with and replaced from several threads."""
