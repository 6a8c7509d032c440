"""The intermediate representation, ops on storages, and the passes over it."""
