"""Settings: YAML for values, schema.py for types and ranges."""
