"""Configs: YAML files and options read once, merged by the types of constructors, checked, and made into objects."""
