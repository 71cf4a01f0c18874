"""The built-in family files, one YAML file for each model class."""
