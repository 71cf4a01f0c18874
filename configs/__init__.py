"""The default settings, the presets and the JSON Schemas."""
