"""The `rockmate` command."""
